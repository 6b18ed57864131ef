"""Whether two answers are the same number or formula. Integers are compared here, all else by a `checker`."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Checker = Callable[[str, str], bool]
"""The right answer and a given one in; whether they mean the same out."""

MAX_ANSWER_CHARACTERS = 2000
"""What is longer is no answer."""

_INTEGER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?", re.ASCII)
_DECORATION = re.compile(r"\\[!,;:$ ]|\\(?:left|right|displaystyle)(?![a-zA-Z])|[$\s]|\{,\}(?=\d{3})", re.ASCII)
_UNIT = re.compile(r"\\(?:text|mathrm)\{[a-zA-Z\s.]*\}$|\^\{?\\circ\}?$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_SIGNS = re.compile(r"\^\{?\\circ\}?|\\?%|\\degree|\.$")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{?(\d+)\}?\{?(\d+)\}?|(\d+)/(\d+))", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_MAX_DIGITS = 300


def is_same_answer(gold: str, given: str, checker: Checker) -> bool:
    """Two integers are compared as such, whatever they look like; anything else is the checker's business.

    "1,024" and "1024." are the same, so are "025" and "25"; whether "1024" and "2^{10}" are, the checker says.
    """
    if max(len(gold), len(given)) > MAX_ANSWER_CHARACTERS:
        return False
    mine, other = as_integer(gold), as_integer(given)
    if mine is not None and other is not None:
        return mine == other
    return checker(gold, given)


def as_integer(answer: str) -> str | None:
    """The integer that an answer plainly is, in one spelling; None if it is anything else."""
    # A text, since Python refuses to read numbers of many thousand digits.
    found = _INTEGER.fullmatch(_DECORATION.sub("", _UNIT.sub("", answer)).replace("\N{MINUS SIGN}", "-"))
    if found is None:
        return None
    digits = found.group(2).replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if found.group(1) == "-" and digits != "0" else digits


def integer(gold: str, given: str) -> bool:
    """Nothing but integers counts: a formula left standing is no answer where the task is to work it out."""
    return False


def normalised(gold: str, given: str) -> bool:
    r"""Without math-verify: the same text but for spelling, or the same fraction or decimal.

    r"\dfrac12" and "1/2" are the same, and so are "0.5" and r"\frac{1}{2}"; "x+1" and "1+x" are not.
    """
    mine, other = _plain(gold), _plain(given)
    return mine == other or (_number(mine) is not None and _number(mine) == _number(other))


def _plain(answer: str) -> str:
    text = _DECORATION.sub("", _WORDS.sub(r"\1", answer))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\N{MINUS SIGN}", "-")
    return re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", _SIGNS.sub("", text))


def _number(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    if found := _FRACTION.fullmatch(text):
        sign, *parts = found.groups()
        above, below = (int(part) for part in parts if part is not None)
        return Fraction(-above if sign == "-" else above, below) if below else None
    return Fraction(text) if _DECIMAL.fullmatch(text) else None
