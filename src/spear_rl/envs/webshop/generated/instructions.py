"""Instructions of generated products: attributes and options in a sentence, without the product's name.

An attribute is named or paraphrased, and so it is on the product's pages: a search with the sentence as it is does not
find everything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from spear_rl.envs.shared.dice import Dice

PHRASES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text("utf-8"))
_PARAPHRASED = 0.4


def instruction_for(
    noun: str,
    attributes: Mapping[str, Sequence[str]],
    in_title: Collection[str],
    clauses: Mapping[str, str],
    options: Mapping[str, Sequence[str]],
    dice: Dice,
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
    opening = dice.choice(PHRASES["openings"])
    text = opening.format(thing=_thing(noun, chosen, clauses, dice))
    for name, value in wanted.items():
        phrases = PHRASES["options"].get(name, PHRASES["options"]["other"])
        text += ", " + dice.choice(phrases).format(name=name, value=value)
    return text, [words for _, words in chosen], list(wanted.values())


def agreed(clause: str, noun: str) -> str:
    """A clause whose verb agrees with its noun: "is made of oak" -> "are made of oak" for a plural."""
    return f"are {clause.removeprefix('is ')}" if clause.startswith("is ") and is_plural(noun) else clause


def is_plural(noun: str) -> bool:
    return noun.endswith("s") and not noun.endswith("ss")


def with_article(phrase: str, noun: str) -> str:
    """A phrase that ends in `noun`, with "a" or "an" before it unless the noun is a plural."""
    if is_plural(noun):
        return phrase
    return f"an {phrase}" if phrase[0] in "aeiou" or phrase.startswith("hdmi") else f"a {phrase}"


def _thing(noun: str, wanted: Sequence[tuple[str, str]], clauses: Mapping[str, str], dice: Dice) -> str:
    named: dict[str, list[str]] = {"adjectives": [], "features": [], "purposes": []}
    paraphrased = []
    for group, words in wanted:
        if dice.chance(_PARAPHRASED):
            paraphrased.append(agreed(clauses[words], noun))
        else:
            named[group].append(words)
    phrase = with_article(" ".join([*named["adjectives"], noun]), noun)
    with_ = f" with {' and '.join(named['features'])}" if named["features"] else ""
    for_ = f" for {' and '.join(named['purposes'])}" if named["purposes"] else ""
    that = f" that {' and '.join(paraphrased)}" if paraphrased else ""
    return phrase + (with_ + for_ + that if dice.chance(0.5) else that + with_ + for_)
