"""The answer in a policy's text, and whether it equals the reference. A `checker` compares what is no integer."""

import re
from collections.abc import Callable
from fractions import Fraction

Checker = Callable[[str, str], bool]
"""(reference, answer) -> whether they are equal."""

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is wrong."""

_INTEGER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?", re.ASCII)
_DECORATION = re.compile(r"\\[!,;:$ ]|\\(?:left|right|displaystyle)(?![a-zA-Z])|[$\s]|\{,\}(?=\d{3})", re.ASCII)
_UNIT = re.compile(r"\\(?:text|mathrm)\{[a-zA-Z\s.]*\}$|\^\{?\\circ\}?$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_SIGNS = re.compile(r"\^\{?\\circ\}?|\\?%|\\degree|\.$")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{?(\d+)\}?\{?(\d+)\}?|(\d+)/(\d+))", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_MAX_DIGITS = 300
_BOX_MARKS = re.compile(r"(\\{1,4}(?:boxed|fbox)\s*\{)|\\.|([{}])", re.DOTALL)
_VISIBLE = re.compile(r"\S")


def boxed_answer(text: str) -> str | None:
    r"""The content of the last closed box that is not empty, or None; escaped braces are text.

    r"so \boxed{\frac{1}{2}}"           -> r"\frac{1}{2}"
    r"\boxed{3}, no: \boxed{4"          -> "3"
    r"\boxed{\boxed{5}}", r"\boxed{ }"  -> "5", None
    """
    opened: list[tuple[int, int] | None] = []  # start of a box and of its content; None is a plain brace
    start = end = -1  # of the last closed box that is not empty
    content = None
    for mark in _BOX_MARKS.finditer(text):
        if mark.group(1):
            opened.append((mark.start(), mark.end()))
        elif mark.group(2) == "{":
            opened.append(None)
        elif mark.group(2) and opened and (box := opened.pop()) and _VISIBLE.search(text, box[1], mark.start()):
            is_around = start >= box[1]
            if not is_around or _VISIBLE.search(text, box[1], start) or _VISIBLE.search(text, end, mark.start()):
                content = slice(box[1], mark.start())
            # else it holds nothing but the last box, and so the same content
            start, end = box[0], mark.end()
    return None if content is None else text[content].strip()


def is_same_answer(gold: str, given: str, checker: Checker) -> bool:
    """Two integers are compared as numbers, anything else by the checker.

    "1,024" and "1024." are equal, so are "025" and "25"; the checker decides about "1024" and "2^{10}".
    """
    if max(len(gold), len(given)) > MAX_ANSWER_CHARACTERS:
        return False
    mine, other = as_integer(gold), as_integer(given)
    if mine is not None and other is not None:
        return mine == other
    return checker(gold, given)


def as_integer(answer: str) -> str | None:
    """The canonical spelling of an integer; None if the answer is anything else."""
    # As text: Python refuses to parse integers of many thousand digits.
    found = _INTEGER.fullmatch(_DECORATION.sub("", _UNIT.sub("", answer)).replace("\N{MINUS SIGN}", "-"))
    if found is None:
        return None
    digits = found.group(2).replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if found.group(1) == "-" and digits != "0" else digits


def integer(gold: str, given: str) -> bool:
    """Only integers count: an unevaluated formula is no answer."""
    return False


def normalised(gold: str, given: str) -> bool:
    r"""Without math-verify: the same text up to spelling, or the same fraction or decimal.

    r"\dfrac12" and "1/2" are equal, and so are "0.5" and r"\frac{1}{2}"; "x+1" and "1+x" are not.
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
