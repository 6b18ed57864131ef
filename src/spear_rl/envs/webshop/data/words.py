"""How texts are compared: colours, nouns, fuzzy ratios, and the word lists of words.toml."""

import re
import tomllib
from functools import lru_cache
from pathlib import Path

from spear_rl.envs.webshop.data.optional import package

_LISTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
COLORS = tuple(_LISTS["colors"].split())
STOP_WORDS = frozenset(_LISTS["stop_words"].split())
FILLER_WORDS = frozenset(_LISTS["filler_words"].split())
_OTHER_CLASSES = frozenset((_LISTS["closed_class_words"] + _LISTS["adjectives"]).split())
_ADJECTIVE_ENDINGS = tuple(_LISTS["adjective_endings"].split())
_NOUNS = frozenset(_LISTS["nouns"].split())
_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")
_LATIN_1 = dict.fromkeys(range(128, 256))
_MATCH = 85  # two texts match if their token_set_ratio is above this


def color_of(value: str) -> str:
    """The first of COLORS that is part of the value, or the value itself: "dark blue" -> "blue", "small" -> "small"."""
    return next((color for color in COLORS if color in value), value)


def ratio(one: str, other: str) -> float:
    """The token_set_ratio of two normalised texts, from 0 to 100."""
    return float(package("rapidfuzz.fuzz").token_set_ratio(normalised(one), normalised(other)))


def lowered(text: str) -> str:
    """In lower case, with single spaces."""
    return " ".join(text.lower().split())


def is_match(one: str, other: str) -> bool:
    return ratio(one, other) > _MATCH


def is_rounded_match(one: str, other: str) -> bool:
    """As the original's thefuzz compares: without the characters U+0080 to U+00FF, and with the ratio rounded."""
    return round(ratio(one.translate(_LATIN_1), other.translate(_LATIN_1))) > _MATCH


def normalised(text: str) -> str:
    """Lower case, with a space for everything that is neither letter nor digit."""
    return str(package("rapidfuzz.utils").default_process(text))


def nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title in order, each once."""
    return tuple(dict.fromkeys(all_nouns(title)))


@lru_cache(maxsize=65536)
def all_nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title in order, lower-cased, repeated ones included; a possessive loses its ending.

    The original uses a statistical tagger. This is a fixed rule, the same on every machine: a word is a noun unless it
    is a closed-class word, contains a digit, is a listed adjective, or has an ending of adjectives and adverbs.

    "Men's Waterproof Trail Running Shoe, Size 10" -> ("men", "trail", "running", "shoe", "size")
    """
    words = (re.split("['\u2019]", word)[0] for word in _WORD.findall(title.lower()))
    return tuple(word for word in words if _is_noun(word))


def _is_noun(word: str) -> bool:
    if len(word) < 2 or any(character.isdigit() for character in word) or word in _OTHER_CLASSES:
        return False
    return word in _NOUNS or not word.endswith(_ADJECTIVE_ENDINGS)
