r"""A lexical check of answers, before math-verify parses them.

In a formula, the argument of a command such as \text or \hat becomes the name of a symbol. A name here is words,
numbers and a little punctuation; nothing that could be a piece of a program.
"""

from __future__ import annotations

import re
from unicodedata import category

MAX_CHARACTERS = 2000
MAX_NESTING = 50

_NAMING = re.compile(
    r"\\(?:text\w*|[mhf]box|math[a-z]+|operatorname\*?|variable|bm|boldsymbol|emph|textnormal|underline|underbrace"
    r"|over\w+|wide\w+|hat|bar|vec|tilde|dot|ddot|acute|grave|check|breve|[a-z]{2,3}shape|bf|rm|it|sf|tt)\s*\{",
    re.ASCII,
)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|[ ,!;:%$&{}])", re.ASCII)
_LABEL = re.compile(r"\([^\W_]{1,4}\)")
_NAME = re.compile(r"(?:[^\W_]'(?=[^\W_])|[^\W_]|_(?!_)|[\s.,:/%$&°^{}+-])*")
_FORBIDDEN = re.compile(r"__|[`@\x00-\x08\x0b-\x1f\x7f]")


def is_admissible(text: str) -> bool:
    """Whether a text can be an answer. Takes time in proportion to its length, which is bounded."""
    return (
        len(text) <= MAX_CHARACTERS
        and _FORBIDDEN.search(text) is None
        and all(character.isprintable() or category(character) == "Zs" or character in "\n\t\r" for character in text)
        and _nesting(text) <= MAX_NESTING
        and all(_is_name(_argument(text, found.end())) for found in _NAMING.finditer(text))
    )


def _is_name(argument: str) -> bool:
    return _NAME.fullmatch(_LABEL.sub("", _COMMAND.sub(" ", argument))) is not None


def _argument(text: str, start: int) -> str:
    """Up to the brace that closes it, or to the end."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place]
    return text[start:]


def _nesting(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest
