"""How well a purchase meets a goal: WebShop's score, as a pure function with its parts."""

from __future__ import annotations

from dataclasses import dataclass

from spear_rl.envs.webshop.data.colors import color_of
from spear_rl.envs.webshop.data.extra import fuzz, plain
from spear_rl.envs.webshop.data.nouns import nouns
from spear_rl.envs.webshop.data.product import CATEGORY_SEPARATOR, Goal, Product, Purchase

MATCH = 85
"""Two texts match if their token_set_ratio is above this."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score and why it is what it is."""

    total: float
    type_factor: float
    """1.0, 0.5, 0.1 or 0: whether it is the right kind of thing at all."""
    title_share: float
    """Share of the nouns in the goal's title that the bought title has."""
    is_same_query: bool
    num_shared_categories: int
    attributes: dict[str, bool]
    """Wanted attribute -> whether the purchase has it."""
    options: dict[str, bool]
    """Wanted option value -> whether it was chosen."""
    is_affordable: bool

    @property
    def is_success(self) -> bool:
        return self.total == 1.0


def score(purchase: Purchase, goal: Goal) -> Score:
    """r = r_type * (attributes matched + options matched + [price <= limit]) / (|attributes| + |options| + 1)."""
    product = purchase.product
    share = title_share(product.title, goal.title)
    is_same_query = product.query == goal.query
    num_shared = len(_categories(product.product_category) & _categories(goal.product_category))
    factor = _type_factor(share, is_match=is_same_query or num_shared >= 2 or share > 0.2)
    has = [_has_attribute(product, wanted) for wanted in goal.attributes]
    chosen = [color_of(value) for value in purchase.options.values()]
    took = [any(_match(value, color_of(wanted)) for value in chosen) for wanted in goal.options]
    is_affordable = product.price <= goal.price_limit
    matched = sum(has) + sum(took) + is_affordable
    return Score(
        total=factor * matched / (len(has) + len(took) + 1),
        type_factor=factor,
        title_share=share,
        is_same_query=is_same_query,
        num_shared_categories=num_shared,
        attributes=dict(zip(goal.attributes, has, strict=True)),
        options=dict(zip(goal.options, took, strict=True)),
        is_affordable=is_affordable,
    )


def title_share(bought: str, wanted: str) -> float:
    """Share of the wanted title's nouns that the bought title has; 0.2, which decides nothing, where there are none."""
    looked_for = set(nouns(wanted))
    return len(looked_for & set(nouns(bought))) / len(looked_for) if looked_for else 0.2


def _type_factor(share: float, *, is_match: bool) -> float:
    if share == 0:
        return 0.0
    if share < 0.1:
        return 0.1
    return 1.0 if is_match else 0.5


def _categories(path: str) -> set[str]:
    return {name.strip() for name in path.split(CATEGORY_SEPARATOR)}


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(_match(own, wanted) for own in product.attributes):
        return True
    return any(wanted in text.lower() for text in (product.title, " ".join(product.bullets), product.description))


def _match(one: str, other: str) -> bool:
    return bool(fuzz().token_set_ratio(one, other, processor=plain()) > MATCH)
