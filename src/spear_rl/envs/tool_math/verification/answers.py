"""The answer in a policy's text, and whether it equals the reference. A `checker` compares what is no integer."""

import re
from collections.abc import Callable
from fractions import Fraction

from spear_rl.envs.tool_math.verification.integers import (
    MAX_ANSWER_CHARACTERS,
    as_integer,
    is_integer_reference,
    is_name,
)

Checker = Callable[[str, str], bool]
"""(reference, answer) -> whether they are equal."""

_DECORATION = re.compile(r"\\[!,;:$ ]|\\(?:left|right|displaystyle)(?![a-zA-Z])|[$\s]|\{,\}(?=\d{3})", re.ASCII)
_GAP = re.compile(
    r"(?<=\d)(?:[\s,]|\\[,;: ])*(?:\s|\\[;: ])(?:[\s,]|\\[,;: ])*(?=\d)|(?<=\d)\\,(?=\d)(?!\d{3}(?!\d))", re.ASCII
)
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_SIGNS = re.compile(r"\^\{?\\circ\}?|\\?%|\\degree|\.$")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{?(\d+)\}?\{?(\d+)\}?|(\d+)/(\d+))", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_NO_NUMBER = re.compile(
    r"[=<>_,;:~!?|\"']|\d\s+\d|\\[,;: ]|\\(?:text|m?box|math|phantom|l?dots|[lg]eq?|neq?|not)|(?<![\\a-zA-Z])[a-zA-Z]",
    re.ASCII,
)
_INEXACT = re.compile(r"\\(?:neq?|not|approx|sim|simeq|cong|lnot|neg)(?![a-zA-Z])|[≠≈]|!=")
_ORDER = re.compile(r"[<>≤≥]|\\(?:[lg]eq?|[lg]eqslant|[lg]t)(?![a-zA-Z])")
_RANGE = re.compile(r"[<>≤≥(\[|]|\\(?:[lg]eq?|[lg]eqslant|[lg]t|cup|infty)(?![a-zA-Z])")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_ALTERNATIVES = re.compile(r"[,;]|\\text\{ ?(?:or|and) ?\}")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(\d+)", re.ASCII)
_INDEX = re.compile(r"_\{[^{}]*\}")
_TIMES = re.compile(r"\\(?:cdot|times)(?![a-zA-Z])")
_NEUTRAL = re.compile(r"[+-]0(?![\d.])|(?<![\d.])0\+|[*/^]1(?![\d.])|(?<![\d.])1\*")
_BRACKETS = re.compile(r"\\[{}]|[(){}\[\]]")
_DELIMITER = re.compile(r"(?<!\\)\$\$?|\\[\[\]()]")
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
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


def is_same_answer(gold: str, given: str, checker: Checker, question: str = "") -> bool:
    """Two integers are compared as numbers, anything else by the checker, unless its form alone makes it wrong.

    "1,024" and "1024." are equal, so are "025" and "25"; the checker decides about "1024" and "2^{10}".
    """
    if max(len(gold), len(given)) > MAX_ANSWER_CHARACTERS:
        return False
    mine, other = as_integer(gold), as_integer(given, question)
    if mine is not None and other is not None:
        return mine == other
    if is_integer_reference(gold) and _NO_NUMBER.search(given):
        return False
    if _is_another_claim(gold, given, question) or is_copied(gold, given, question):
        return False
    name, equals, value = given.partition("=")
    is_named = bool(equals) and "=" not in gold + value and _is_asked(name, question)
    return checker(gold, value.strip() if is_named else given)


def is_copied(gold: str, given: str, question: str) -> bool:
    r"""Whether the answer stands in the question as it is, and the reference is spelled otherwise.

    To "Write $\frac{6}{8}$ in lowest terms" r"\frac{6}{8}" is no answer, though it equals r"\frac{3}{4}".
    """
    answer, formulas = _core(_last_side(given)), _formulas(question)
    if not answer or answer in (_core(gold), _core(_last_side(gold))):
        return False
    return any(_holds(formula, answer) for formula in formulas)


def _is_another_claim(gold: str, given: str, question: str) -> bool:
    """A statement where the reference is a value (41 = 42, > 42), or a number in another base."""
    if _INEXACT.search(given) and not _INEXACT.search(gold):
        return True
    if _ORDER.search(given) and not _RANGE.search(gold):
        return True
    if not set(_BASE.findall(given)) <= set(_BASE.findall(gold)):
        return True
    if "=" in gold:
        return False
    equations = [part.split("=") for part in _ALTERNATIVES.split(_INDEX.sub("", given)) if "=" in part]
    return any(len(sides) > 2 or not any(_is_asked(side, question) for side in sides) for sides in equations)


def _is_asked(side: str, question: str) -> bool:
    r"""Whether a side of an equation is a name, or a formula with a letter that the question has (\cos A)."""
    return is_name(side, question) or bool(_LETTER.search(side) and _core(side) in _formulas(question))


def _last_side(text: str) -> str:
    return re.split(r"=|\\in(?![a-zA-Z])", text)[-1]


def _core(text: str) -> str:
    """The text without spacing, brackets and neutral terms: what is left of a formula that is copied with ornaments."""
    text = _TIMES.sub("*", _plain(text.strip(" \n\t.,;:?")))
    return _BRACKETS.sub("", _NEUTRAL.sub("", _BRACKETS.sub("", text)))


def _formulas(question: str) -> list[str]:
    """The parts of a question that are no words, as `_core` spells them."""
    parts = _DELIMITER.split(question)
    return [_core(piece) for n, part in enumerate(parts) for piece in ([part] if n % 2 else _PROSE.split(part))]


def _holds(formula: str, answer: str) -> bool:
    """Whether the answer is a part of the formula, from one end of a number or name to another."""
    start = formula.find(answer)
    while start >= 0:
        before, after = formula[max(start - 1, 0) : start], formula[start + len(answer) :][:1]
        is_cut = (before.isalnum() and answer[0].isalnum()) or (before in ("\\", ".") and before)
        if not is_cut and not (after.isalnum() and answer[-1].isalnum()) and after not in ("^", "_", "."):
            return True
        start = formula.find(answer, start + 1)
    return False


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
    text = _DECORATION.sub("", _GAP.sub("~", _WORDS.sub(r"\1", answer)))
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
