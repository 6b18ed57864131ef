"""What somebody would say who wants a generated product: attributes and options in a sentence, never its name.

An attribute is asked for by its name or in other words, and a page may put it in either way too: who searches with the
sentence as it is does not find everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from spear_rl.envs.shared.dice import Dice

_OPENINGS = (
    "i am looking for {thing}",
    "i need {thing}",
    "i want to buy {thing}",
    "find me {thing}",
    "can you help me find {thing}",
    "i would like {thing}",
    "please get me {thing}",
    "show me {thing}",
)
_COLOR = ("in {value}", "that comes in {value}", "with the color {value}")
_SIZE = ("in size {value}", "size {value}", "and the size should be {value}")
_OTHER = ("with {value} as the {name}", "and the {name} should be {value}", "and choose {value} for the {name}")
_PARAPHRASED = 0.4


class Wish(NamedTuple):
    """A sentence and what it asks for."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


def wish(
    noun: str,
    has: Mapping[str, Sequence[str]],
    told: Collection[str],
    clauses: Mapping[str, str],
    options: Mapping[str, Sequence[str]],
    dice: Dice,
) -> Wish:
    """A wish that the product fulfils; it prefers attributes that the title does not tell.

    Args:
        has: the product's attributes by group: adjectives, features, purposes.
        told: those in its title.
        clauses: attribute -> what it means, in other words.
    """
    grouped = [(group, words) for group, attributes in has.items() for words in attributes]
    order = dice.shuffled([entry for entry in grouped if entry[1] not in told])
    order += dice.shuffled([entry for entry in grouped if entry[1] in told])
    if dice.chance(0.3):
        order = dice.shuffled(order)
    chosen = set(order[: dice.weighted((1, 2, 3), (3, 9, 4))])
    wanted = {name: dice.choice(values) for name, values in options.items() if dice.chance(0.75)}
    text = dice.choice(_OPENINGS).format(thing=_thing(noun, [e for e in grouped if e in chosen], clauses, dice))
    for name, value in wanted.items():
        phrases = {"color": _COLOR, "size": _SIZE}.get(name, _OTHER)
        text += ", " + dice.choice(phrases).format(name=name, value=value)
    return Wish(text, tuple(entry[1] for entry in grouped if entry in chosen), tuple(wanted.values()))


def agreed(clause: str, noun: str) -> str:
    """A clause whose verb fits its noun: "is made of oak" -> "are made of oak" for several."""
    return f"are {clause.removeprefix('is ')}" if clause.startswith("is ") and is_plural(noun) else clause


def is_plural(noun: str) -> bool:
    return noun.endswith("s") and not noun.endswith("ss")


def with_article(phrase: str, noun: str) -> str:
    """A phrase that ends in `noun` with "a" or "an" before it where there is one of it."""
    if is_plural(noun):
        return phrase
    return f"an {phrase}" if phrase[0] in "aeiou" or phrase.startswith("hdmi") else f"a {phrase}"


def _thing(noun: str, asked: Sequence[tuple[str, str]], clauses: Mapping[str, str], dice: Dice) -> str:
    named: dict[str, list[str]] = {"adjectives": [], "features": [], "purposes": []}
    in_other_words = []
    for group, words in asked:
        if dice.chance(_PARAPHRASED):
            in_other_words.append(agreed(clauses[words], noun))
        else:
            named[group].append(words)
    phrase = with_article(" ".join([*named["adjectives"], noun]), noun)
    with_ = f" with {' and '.join(named['features'])}" if named["features"] else ""
    for_ = f" for {' and '.join(named['purposes'])}" if named["purposes"] else ""
    that = f" that {' and '.join(in_other_words)}" if in_other_words else ""
    return phrase + (with_ + for_ + that if dice.chance(0.5) else that + with_ + for_)
