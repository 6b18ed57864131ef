"""The embedded shop: a seeded generator of products and wishes in the schema of WebShop's own files.

`python -m spear_rl.envs.webshop.generated.catalogue FOLDER --products 1000` writes such files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.product import CATEGORY_SEPARATOR
from spear_rl.envs.webshop.generated.wishes import agreed, is_plural, wish, with_article

SEED = 233
GOODS = Path(__file__).with_name("goods")
SHELVES = ("fashion", "beauty", "electronics", "grocery", "garden")
_ASIN_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SOUNDS = (
    "Exactly what it says",
    "Would buy again",
    "Better than expected",
    "Does the job",
    "Not for me",
    "A solid buy",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A product as the three official files would hold it."""

    item: dict[str, Any]
    """Of items_shuffle.json."""
    attributes: dict[str, Any]
    """Of items_ins_v2.json."""
    wishes: list[dict[str, Any]]
    """Of items_human_ins.json."""


def generated_entries(num_products: int, *, seed: int = SEED) -> Iterator[Entry]:
    """Products of all kinds, taking turns; a product does not depend on how many there are."""
    kinds = [(goods(shelf), kind) for shelf in SHELVES for kind in goods(shelf)["kind"]]
    for number in range(num_products):
        shelf, kind = kinds[number % len(kinds)]
        yield _entry(shelf, kind, number, Dice("product", seed, number), seed)


@cache
def goods(shelf: str) -> dict[str, Any]:
    """The words that a shelf's products are made of."""
    return tomllib.loads((GOODS / f"{shelf}.toml").read_text("utf-8"))


def asin_of(number: int, seed: int) -> str:
    """Ten characters: some that look drawn, and the number itself, so that no two products share one."""
    mixed = int.from_bytes(hashlib.sha256(f"asin/{seed}/{number}".encode()).digest()[:8], "big")
    return "B0" + _digits(mixed, 4) + _digits(number, 4)


def _digits(value: int, count: int) -> str:
    letters = ""
    for _ in range(count):
        value, digit = divmod(value, len(_ASIN_LETTERS))
        letters = _ASIN_LETTERS[digit] + letters
    return letters


def _entry(shelf: dict[str, Any], kind: dict[str, Any], number: int, dice: Dice, seed: int) -> Entry:
    brand, line, name = dice.choice(shelf["brands"]), dice.choice(shelf["lines"]), dice.choice(kind["names"])
    has = {
        "adjectives": dice.shuffled(kind["adjectives"])[: dice.between(1, 3)],
        "features": dice.shuffled(kind["features"])[: dice.between(1, 2)],
        "purposes": dice.shuffled(kind["purposes"])[: dice.between(0, 2)],
    }
    options = {which: _some(values, dice) for which, values in kind["options"].items()}
    title, told = _title(f"{brand} {line}", name, has, dice)
    meaning = {words: shelf[group][words] for group, attributes in has.items() for words in attributes}
    hidden = dice.shuffled([words for words in meaning if words not in told])
    sentence = _sentences(kind["noun"], meaning, dice)
    price, is_range, pricing = _price(kind, dice)
    reviews = _reviews(kind, list(meaning), dice)
    num_bullets = max(len(hidden) - 1, 1)
    thing = with_article(kind["noun"], kind["noun"])
    item = {
        "asin": asin_of(number, seed),
        "name": title,
        "full_description": " ".join(
            [
                f"The {line} line by {brand} offers {thing} for people of every taste.",
                *(sentence[words] for words in hidden[num_bullets:]),
                f"{brand} answers questions within a day and takes it back within {dice.choice((30, 45, 60))} days.",
            ]
        ),
        "small_description": [
            *(sentence[words] for words in hidden[:num_bullets]),
            *(f"{which.capitalize()}: {', '.join(values)}." for which, values in options.items()),
        ],
        "pricing": pricing,
        "product_category": f" {CATEGORY_SEPARATOR} ".join(kind["path"]),
        "category": shelf["category"],
        "query": kind["query"],
        "images": [""],
        "customization_options": {
            which: [
                {"value": value, "price": round(price * (1 + is_range * 0.25 * place / len(values)), 2), "image": None}
                for place, value in enumerate(values)
            ]
            for which, values in options.items()
        },
        "average_rating": f"{sum(review['stars'] for review in reviews) / len(reviews):.1f}",
        "reviews": reviews,
    }
    clauses = {words: clause for words, (_, clause) in meaning.items()}
    wanted = wish(kind["noun"], has, told, clauses, options, Dice("wish", seed, number))
    instruction = f"i am looking for {thing}, {', '.join(wanted.attributes)}"
    asked = {"instruction_attributes": list(wanted.attributes), "attributes": list(meaning)}
    values = [f"{which}: {value}" for which, values in options.items() for value in values]
    said = {"instruction": wanted.text, "instruction_options": list(wanted.options), "options": values}
    return Entry(item, {"instruction": instruction, **asked}, [said | asked])


def _sentences(noun: str, meaning: dict[str, list[str]], dice: Dice) -> dict[str, str]:
    """What the pages say about each attribute: its name in a sentence, or what it means, in other words."""
    subject = "They" if is_plural(noun) else "It"
    return {
        words: f"{subject} {agreed(clause, noun)}." if dice.chance(0.4) else sentence
        for words, (sentence, clause) in meaning.items()
    }


def _price(kind: dict[str, Any], dice: Dice) -> tuple[float, bool, str]:
    """The lowest price, whether there is a higher one too, and how a shop would write it."""
    least, most = kind["price"]
    price = round(least + dice.below(1000) / 1000 * (most - least)) - dice.choice((0.01, 0.05, 0.5, 0.0))
    is_range = dice.chance(0.12)
    return price, is_range, f"${price:.2f} to ${price * 1.25:.2f}" if is_range else f"${price:.2f}"


def _some(values: Sequence[str], dice: Dice) -> list[str]:
    """Most of an option's values, in the order of the table."""
    kept = set(dice.shuffled(values)[: max(len(values) - dice.between(0, 2), 2)])
    return [value for value in values if value in kept]


def _title(maker: str, name: str, has: dict[str, list[str]], dice: Dice) -> tuple[str, set[str]]:
    """A title, and the attributes that it tells; the others are to be found on the product's pages."""
    told: list[str] = []
    before, after = "", ""
    if dice.chance(0.6):
        told.append(has["adjectives"][0])
        before = f"{told[-1].title()} "
    if dice.chance(0.45):
        told.append(has["features"][0])
        after = f" with {told[-1].title()}"
    if has["purposes"] and dice.chance(0.25):
        told.append(has["purposes"][0])
        after += f" for {told[-1].title()}"
    return f"{maker} {before}{name}{after}", set(told)


def _reviews(kind: dict[str, Any], attributes: Sequence[str], dice: Dice) -> list[dict[str, Any]]:
    return [
        {
            "title": dice.choice(_SOUNDS),
            "stars": dice.weighted((5, 4, 3, 2), (5, 4, 2, 1)),
            "review": f"We have had this {kind['noun']} for {dice.between(2, 11)} months. "
            f"It is {dice.choice(('really', 'mostly', 'supposed to be'))} what the page says about "
            f"{dice.choice(attributes)}.",
        }
        for _ in range(dice.between(1, 3))
    ]


def main(arguments: Sequence[str]) -> int:
    """Writes the embedded catalogue as WebShop's three files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--products", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args(arguments)
    entries = list(generated_entries(given.products, seed=given.seed))
    given.folder.mkdir(parents=True, exist_ok=True)
    files = {
        "items_shuffle.json": [entry.item for entry in entries],
        "items_ins_v2.json": {entry.item["asin"]: entry.attributes for entry in entries},
        "items_human_ins.json": {entry.item["asin"]: entry.wishes for entry in entries},
    }
    for name, content in files.items():
        (given.folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
