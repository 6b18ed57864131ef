"""The level `tiny`: a shop of few words for models of less than a million parameters, by the same rules and score."""

from __future__ import annotations

from collections.abc import Iterator

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.product import CATEGORY_SEPARATOR
from spear_rl.envs.webshop.generated.catalogue import SEED, Entry, goods

NUM_TINY = 250


def tiny_entries(num_products: int = NUM_TINY, *, seed: int = SEED) -> Iterator[Entry]:
    """Five products of every (attribute, kind): the same title at other prices and in other colours."""
    words = goods("tiny")
    pairs = [(attribute, kind) for kind in words["kinds"] for attribute in words["attributes"]]
    num_products = min(num_products, NUM_TINY)
    for number in range(num_products):
        (attribute, kind), dice = pairs[number % len(pairs)], Dice("tiny", seed, number)
        copy = number // len(pairs)
        price = Dice("tiny price", seed, attribute, kind).shuffled(words["prices"])[copy]
        kept = set(dice.shuffled(words["colors"])[:4])
        colors = [color for color in words["colors"] if color in kept]
        item = {
            # Made of words that the pages are full of anyway: a tiny model cannot learn to copy hundreds of names.
            "asin": f"{attribute[:2]}-{kind}-{copy + 1}",
            "name": f"{attribute} {kind}",
            "full_description": "",
            "small_description": [],
            "pricing": f"${price}",
            "product_category": f"things {CATEGORY_SEPARATOR} {kind}",
            "category": kind,
            "query": kind,
            "customization_options": {"color": [{"value": color} for color in colors]},
        }
        wishes = [
            {
                "instruction": f"{color} {attribute} {kind}",
                "instruction_attributes": [attribute],
                "instruction_options": [color],
            }
            for color in colors
        ]
        yield Entry(item, {"attributes": [attribute]}, wishes)
