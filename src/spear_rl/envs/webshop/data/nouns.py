"""Which words of a title are nouns, by a rule of our own: exact, the same everywhere, and without a language model.

The original asks a statistical tagger. Here a word is a noun unless it is a closed-class word, holds a digit, is on a
short list of adjectives, or ends as adjectives and adverbs do.
"""

from __future__ import annotations

import re
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")

_CLOSED = frozenset(
    """
    a about above across after all also an and any are around as at be before behind below between both but by can
    down during each every few for from has have he her him his how i if in into is it its just less like many may me
    more most much my near no nor not of off on once one only or other our out over own per plus same she so some such
    than that the their them then there these they this those through to too under up us very via was we were what
    when where which while who with within without you your
    two three four five six seven eight nine ten twelve
    """.split()  # noqa: SIM905 - read as words
)
_ADJECTIVES = frozenset(
    """
    adult assorted basic best big black blue bold bright broad brown casual clean classic clear cold colorful
    compact cool cute dark decorative deep dry durable easy elegant electric electronic extra fancy fast fine firm flat
    formal free fresh full genuine gentle golden good gray great green grey grown hard heavy high hot ideal indoor
    indoors inner large light little long loose low lower luxury matte mechanical medical medium mini modern narrow
    natural new nice old open orange organic original outdoor outdoors outer perfect personal pink plain portable
    premium pro proof pure purple quick quiet raw ready real red rich round safe sharp short simple single slim small
    smart smooth soft solid special square standard stretchy strong stylish super sweet tall thick thin tight tiny top
    tough traditional unisex universal upper vintage warm washable waterproof wet white whole wide wild wireless wooden
    yellow young
    """.split()  # noqa: SIM905 - read as words
)
_ENDINGS = ("able", "ible", "ful", "less", "ous", "ly", "ish", "est", "proof", "resistant", "free")
_NOUNS_ALL_THE_SAME = frozenset(
    """
    bible cable chest dish finish fish forest harvest polish radish rest table timetable vegetable vest
    """.split()  # noqa: SIM905 - read as words
)


@lru_cache(maxsize=65536)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title in order, lower-cased, each once; a possessive loses its ending.

    "Men's Waterproof Trail Running Shoe, Size 10" -> ("men", "trail", "running", "shoe", "size")
    """
    words = (re.split("['\u2019]", word)[0] for word in _WORD.findall(title.lower()))
    return tuple(dict.fromkeys(word for word in words if _is_noun(word)))


def _is_noun(word: str) -> bool:
    if len(word) < 2 or any(character.isdigit() for character in word) or word in _CLOSED or word in _ADJECTIVES:
        return False
    return word in _NOUNS_ALL_THE_SAME or not word.endswith(_ENDINGS)
