"""WebShop's score of a purchase, as a pure function that also returns the parts."""

from collections.abc import Iterator
from dataclasses import dataclass

from spear_rl.envs.webshop.data.product import CATEGORY_SEPARATOR, Goal, Purchase
from spear_rl.envs.webshop.data.words import COLORS, all_nouns, color_of, is_match, is_rounded_match, nouns

SCORERS = ("spear", "original")
"""`spear` compares all options by value and ignores case; `original` gives what the original code gives."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score and its parts."""

    total: float
    type_factor: float  # 1.0, 0.5, 0.1 or 0: whether it is the right kind of product
    title_share: float  # fraction of the nouns in the goal's title that are in the bought title
    attributes: dict[str, bool]  # wanted attribute -> whether the purchase has it
    options: dict[str, bool]  # wanted option value -> whether it was chosen
    is_affordable: bool
    attribute_share: float = 0.0  # fraction of the wanted attributes, repeated ones included
    option_share: float | None = None  # the same of the wanted options; None if there are none

    @property
    def is_success(self) -> bool:
        return self.total == 1.0


def score(purchase: Purchase, goal: Goal, scorer: str = "spear") -> Score:
    """r = r_type * (attributes matched + options matched + [price <= limit]) / (|attributes| + |options| + 1)."""
    product, is_original = purchase.product, scorer == "original"
    matches = is_rounded_match if is_original else is_match
    share = title_share(product.title, goal.title, repeated=is_original)
    is_same_query = product.query == goal.query
    num_shared = len(_categories(product.product_category) & _categories(goal.product_category))
    factor = _type_factor(share, is_same_kind=is_same_query or num_shared >= 2 or share > 0.2)
    texts = [text.lower() for text in (product.title, " ".join(product.bullets), product.description)]
    asked = goal.attributes if is_original else tuple(map(str.lower, goal.attributes))
    has_attribute = [
        any(matches(own, wanted) for own in product.attributes) or any(wanted in text for text in texts)
        for wanted in asked
    ]
    chosen = [color_of(value) for value in purchase.options.values()]
    wanted_options = _original_options(goal) if is_original else (color_of(wanted.lower()) for wanted in goal.options)
    has_option = [any(matches(value, wanted) for value in chosen) for wanted in wanted_options]
    is_affordable = product.price <= goal.price_limit
    matched = sum(has_attribute) + sum(has_option) + is_affordable
    return Score(
        total=matched / (len(has_attribute) + len(has_option) + 1) * factor,
        type_factor=factor,
        title_share=share,
        attributes=dict(zip(goal.attributes, has_attribute, strict=True)),
        options=dict(zip(goal.options, has_option, strict=True)),
        is_affordable=is_affordable,
        attribute_share=sum(has_attribute) / max(len(has_attribute), 1),
        option_share=sum(has_option) / len(has_option) if has_option else None,
    )


def _original_options(goal: Goal) -> Iterator[str]:
    """What the original compares with the chosen values.

    Options that are given by name are (name, value) pairs there: one that contains a colour as its name or its whole
    value is that colour, every other one is compared as the text of the pair, as in "('size', 'small')".
    """
    if not goal.option_names:
        yield from map(color_of, goal.options)
        return
    for pair in zip(goal.option_names, goal.options, strict=True):
        yield next((color for color in COLORS if color in pair), str(pair))


def title_share(bought: str, wanted: str, *, repeated: bool = False) -> float:
    """Fraction of the wanted title's nouns that are in the bought title; 0.2, which changes nothing, if it has none.

    A noun counts once. With `repeated`, the fraction is of all nouns of the wanted title, repeated ones included.
    """
    wanted_nouns = all_nouns(wanted) if repeated else nouns(wanted)
    return len({*wanted_nouns} & {*nouns(bought)}) / len(wanted_nouns) if wanted_nouns else 0.2


def _type_factor(share: float, *, is_same_kind: bool) -> float:
    if share == 0:
        return 0.0
    if share < 0.1:
        return 0.1
    return 1.0 if is_same_kind else 0.5


def _categories(path: str) -> set[str]:
    return {name.strip() for name in path.split(CATEGORY_SEPARATOR)}
