"""Seeded generators of products and instructions in the schema of WebShop's own files.

Instructions and product pages name or paraphrase an attribute: a search with an instruction as it is does not find
everything. `python -m spear_rl.envs.webshop.generated.catalogue FOLDER --products 1000` writes such files.
"""

import argparse
import hashlib
import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.entries import Entry
from spear_rl.envs.webshop.data.product import CATEGORY_SEPARATOR

SEED = 233
NUM_TINY = 250
CATEGORIES = ("fashion", "beauty", "electronics", "grocery", "garden")
_PHRASES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text("utf-8"))
_Lists = Mapping[str, Sequence[str]]
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@cache
def goods(category: str) -> dict[str, Any]:
    """The words that a category's products are made of."""
    return tomllib.loads((Path(__file__).with_name("goods") / f"{category}.toml").read_text("utf-8"))


def tiny_entries(num_products: int = NUM_TINY, *, seed: int = SEED) -> Iterator[Entry]:
    """Products of few words, for models below a million parameters: five prices and colours of each title."""
    words = goods("tiny")
    pairs = [(attribute, kind) for kind in words["kinds"] for attribute in words["attributes"]]
    for number in range(min(num_products, NUM_TINY)):
        (attribute, kind), copy = pairs[number % len(pairs)], number // len(pairs)
        price = Dice("tiny price", seed, attribute, kind).shuffled(words["prices"])[copy]
        kept = Dice("tiny", seed, number).shuffled(words["colors"])[:4]
        colors = [color for color in words["colors"] if color in kept]
        item = {
            # Made of words that are on every page: a tiny model cannot learn to copy hundreds of asins.
            "asin": f"{attribute[:2]}-{kind}-{copy + 1}",
            "name": f"{attribute} {kind}",
            "pricing": f"${price}",
            "product_category": f"things {CATEGORY_SEPARATOR} {kind}",
            "category": kind,
            "query": kind,
            "customization_options": {"color": [{"value": color} for color in colors]},
        }
        asked = {"instruction_attributes": [attribute]}
        instructions = [
            {"instruction": f"{color} {attribute} {kind}", **asked, "instruction_options": [color]} for color in colors
        ]
        yield Entry(item, {"attributes": [attribute]}, instructions)


def generated_entries(num_products: int, *, seed: int = SEED) -> Iterator[Entry]:
    """Products of all kinds in turn; a product does not depend on how many there are."""
    kinds = [(goods(category), kind) for category in CATEGORIES for kind in goods(category)["kind"]]
    for number in range(num_products):
        words, kind = kinds[number % len(kinds)]
        yield _entry(words, kind, number, Dice("product", seed, number), seed)


def asin_of(number: int, seed: int) -> str:
    """Ten characters: four drawn ones, and the number itself, which makes it unique."""
    drawn = int.from_bytes(hashlib.sha256(f"asin/{seed}/{number}".encode()).digest()[:8], "big")
    return "B0" + _base_36(drawn) + _base_36(number)


def _base_36(value: int) -> str:
    """The last four digits."""
    return "".join(_DIGITS[value // 36**place % 36] for place in (3, 2, 1, 0))


def _entry(words: dict[str, Any], kind: dict[str, Any], number: int, dice: Dice, seed: int) -> Entry:
    brand, line, name = dice.choice(words["brands"]), dice.choice(words["lines"]), dice.choice(kind["names"])
    attributes = {
        "adjectives": dice.shuffled(kind["adjectives"])[: dice.between(1, 3)],
        "features": dice.shuffled(kind["features"])[: dice.between(1, 2)],
        "purposes": dice.shuffled(kind["purposes"])[: dice.between(0, 2)],
    }
    options = {option: _most_values(values, dice) for option, values in kind["options"].items()}
    title, in_title = _title(f"{brand} {line}", name, attributes, dice)
    meaning = {attribute: words[group][attribute] for group, own in attributes.items() for attribute in own}
    hidden = dice.shuffled([attribute for attribute in meaning if attribute not in in_title])
    sentence = _sentences(kind["noun"], meaning, dice)
    price, is_range, pricing = _price(kind, dice)
    reviews = _reviews(kind, list(meaning), dice)
    num_bullets = max(len(hidden) - 1, 1)
    thing = _with_article(kind["noun"], kind["noun"])
    description = [
        f"The {line} line by {brand} offers {thing} for people of every taste.",
        *(sentence[attribute] for attribute in hidden[num_bullets:]),
        f"{brand} answers questions within a day and takes it back within {dice.choice((30, 45, 60))} days.",
    ]
    bullets = [sentence[attribute] for attribute in hidden[:num_bullets]]
    bullets += [f"{option.capitalize()}: {', '.join(values)}." for option, values in options.items()]
    item = {
        "asin": asin_of(number, seed),
        "name": title,
        "full_description": " ".join(description),
        "small_description": bullets,
        "pricing": pricing,
        "product_category": f" {CATEGORY_SEPARATOR} ".join(kind["path"]),
        "category": words["category"],
        "query": kind["query"],
        "images": [""],
        "customization_options": {
            option: [
                {"value": value, "price": round(price * (1 + is_range * 0.25 * place / len(values)), 2), "image": None}
                for place, value in enumerate(values)
            ]
            for option, values in options.items()
        },
        "average_rating": f"{sum(review['stars'] for review in reviews) / len(reviews):.1f}",
        "reviews": reviews,
    }
    clauses = {attribute: clause for attribute, (_, clause) in meaning.items()}
    dice = Dice("wish", seed, number)
    text, wanted, values = _instruction(kind["noun"], attributes, in_title, clauses, options, dice)
    synthetic = f"i am looking for {thing}, {', '.join(wanted)}"
    asked = {"instruction_attributes": wanted, "attributes": list(meaning)}
    all_values = [f"{option}: {value}" for option, values in options.items() for value in values]
    human = {"instruction": text, "instruction_options": values, "options": all_values}
    return Entry(item, {"instruction": synthetic, **asked}, [human | asked])


def _sentences(noun: str, meaning: dict[str, list[str]], dice: Dice) -> dict[str, str]:
    """What the pages say about each attribute: a sentence that names it, or its paraphrase."""
    subject = "They" if _is_plural(noun) else "It"
    return {
        attribute: f"{subject} {_agreed(clause, noun)}." if dice.chance(0.4) else sentence
        for attribute, (sentence, clause) in meaning.items()
    }


def _price(kind: dict[str, Any], dice: Dice) -> tuple[float, bool, str]:
    """The lowest price, whether it begins a range, and the text on the page."""
    low, high = kind["price"]
    price = round(low + dice.below(1000) / 1000 * (high - low)) - dice.choice((0.01, 0.05, 0.5, 0.0))
    is_range = dice.chance(0.12)
    return price, is_range, f"${price:.2f} to ${price * 1.25:.2f}" if is_range else f"${price:.2f}"


def _most_values(values: Sequence[str], dice: Dice) -> list[str]:
    kept = dice.shuffled(values)[: max(len(values) - dice.between(0, 2), 2)]
    return [value for value in values if value in kept]


def _title(maker: str, name: str, attributes: dict[str, list[str]], dice: Dice) -> tuple[str, set[str]]:
    """A title and the attributes in it; the others are on the product's pages."""
    adjective = attributes["adjectives"][:1] if dice.chance(0.6) else []
    feature = attributes["features"][:1] if dice.chance(0.45) else []
    purpose = attributes["purposes"][:1] if attributes["purposes"] and dice.chance(0.25) else []
    before = "".join(f"{words.title()} " for words in adjective)
    after = "".join(f" with {words.title()}" for words in feature) + "".join(f" for {p.title()}" for p in purpose)
    return f"{maker} {before}{name}{after}", {*adjective, *feature, *purpose}


def _reviews(kind: dict[str, Any], attributes: Sequence[str], dice: Dice) -> list[dict[str, Any]]:
    return [
        {
            "title": dice.choice(_PHRASES["review_titles"]),
            "stars": dice.weighted((5, 4, 3, 2), (5, 4, 2, 1)),
            "review": f"We have had this {kind['noun']} for {dice.between(2, 11)} months. "
            f"It is {dice.choice(('really', 'mostly', 'supposed to be'))} what the page says about "
            f"{dice.choice(attributes)}.",
        }
        for _ in range(dice.between(1, 3))
    ]


def _instruction(
    noun: str, attributes: _Lists, in_title: Collection[str], clauses: Mapping[str, str], options: _Lists, dice: Dice
) -> tuple[str, list[str], list[str]]:
    """A sentence that the product satisfies, and the attributes and option values that it asks for.

    It prefers attributes that are not in the title.

    Args:
        attributes: by group: adjectives, features, purposes.
        clauses: attribute -> its paraphrase.
    """
    grouped = [(group, words) for group, own in attributes.items() for words in own]
    order = dice.shuffled([entry for entry in grouped if entry[1] not in in_title])
    order += dice.shuffled([entry for entry in grouped if entry[1] in in_title])
    if dice.chance(0.3):
        order = dice.shuffled(order)
    drawn = order[: dice.weighted((1, 2, 3), (3, 9, 4))]
    chosen = [entry for entry in grouped if entry in drawn]
    wanted = {name: dice.choice(values) for name, values in options.items() if dice.chance(0.75)}
    opening = dice.choice(_PHRASES["openings"])
    text = opening.format(thing=_thing(noun, chosen, clauses, dice))
    for name, value in wanted.items():
        phrases = _PHRASES["options"].get(name, _PHRASES["options"]["other"])
        text += ", " + dice.choice(phrases).format(name=name, value=value)
    return text, [words for _, words in chosen], list(wanted.values())


def _agreed(clause: str, noun: str) -> str:
    """A clause whose verb agrees with its noun: "is made of oak" -> "are made of oak" for a plural."""
    return f"are {clause.removeprefix('is ')}" if clause.startswith("is ") and _is_plural(noun) else clause


def _is_plural(noun: str) -> bool:
    return noun.endswith("s") and not noun.endswith("ss")


def _with_article(phrase: str, noun: str) -> str:
    """A phrase that ends in `noun`, with "a" or "an" before it unless the noun is a plural."""
    if _is_plural(noun):
        return phrase
    return f"an {phrase}" if phrase[0] in "aeiou" or phrase.startswith("hdmi") else f"a {phrase}"


def _thing(noun: str, wanted: Sequence[tuple[str, str]], clauses: Mapping[str, str], dice: Dice) -> str:
    named: dict[str, list[str]] = {"adjectives": [], "features": [], "purposes": []}
    paraphrased = []
    for group, words in wanted:
        if dice.chance(0.4):
            paraphrased.append(_agreed(clauses[words], noun))
        else:
            named[group].append(words)
    phrase = _with_article(" ".join([*named["adjectives"], noun]), noun)
    with_ = f" with {' and '.join(named['features'])}" if named["features"] else ""
    for_ = f" for {' and '.join(named['purposes'])}" if named["purposes"] else ""
    that = f" that {' and '.join(paraphrased)}" if paraphrased else ""
    return phrase + (with_ + for_ + that if dice.chance(0.5) else that + with_ + for_)


def main(arguments: Sequence[str]) -> int:
    """Writes a generated catalogue as WebShop's three files."""
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
        "items_human_ins.json": {entry.item["asin"]: entry.instructions for entry in entries},
    }
    for name, content in files.items():
        (given.folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
