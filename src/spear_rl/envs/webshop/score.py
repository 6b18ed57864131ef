"""WebShop's score of a purchase, as a pure function that also returns the parts."""

from dataclasses import dataclass

from spear_rl.envs.webshop.data.product import CATEGORY_SEPARATOR, Goal, Product, Purchase
from spear_rl.envs.webshop.data.words import color_of, is_match, nouns


@dataclass(frozen=True, slots=True)
class Score:
    """A score and its parts."""

    total: float
    type_factor: float  # 1.0, 0.5, 0.1 or 0: whether it is the right kind of product
    title_share: float  # fraction of the nouns in the goal's title that are in the bought title
    is_same_query: bool
    num_shared_categories: int
    attributes: dict[str, bool]  # wanted attribute -> whether the purchase has it
    options: dict[str, bool]  # wanted option value -> whether it was chosen
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
    factor = _type_factor(share, is_same_kind=is_same_query or num_shared >= 2 or share > 0.2)
    has_attribute = [_has_attribute(product, wanted.lower()) for wanted in goal.attributes]
    chosen = [color_of(value) for value in purchase.options.values()]
    has_option = [any(is_match(value, color_of(wanted.lower())) for value in chosen) for wanted in goal.options]
    is_affordable = product.price <= goal.price_limit
    matched = sum(has_attribute) + sum(has_option) + is_affordable
    total = factor * matched / (len(has_attribute) + len(has_option) + 1)
    attributes = dict(zip(goal.attributes, has_attribute, strict=True))
    options = dict(zip(goal.options, has_option, strict=True))
    return Score(total, factor, share, is_same_query, num_shared, attributes, options, is_affordable)


def title_share(bought: str, wanted: str) -> float:
    """Fraction of the wanted title's nouns that are in the bought title; 0.2, which changes nothing, if it has none."""
    wanted_nouns = set(nouns(wanted))
    return len(wanted_nouns & set(nouns(bought))) / len(wanted_nouns) if wanted_nouns else 0.2


def _type_factor(share: float, *, is_same_kind: bool) -> float:
    if share == 0:
        return 0.0
    if share < 0.1:
        return 0.1
    return 1.0 if is_same_kind else 0.5


def _categories(path: str) -> set[str]:
    return {name.strip() for name in path.split(CATEGORY_SEPARATOR)}


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(is_match(own, wanted) for own in product.attributes):
        return True
    return any(wanted in text.lower() for text in (product.title, " ".join(product.bullets), product.description))
