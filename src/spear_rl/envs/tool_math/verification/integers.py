r"""Integers as policies and data sets write them: `1,234`, `\text{42}`, `x = 42`, `42 \text{ cm}^2`, `\$42`.

Anything else is not an integer: `41=42`, `4 2`, `42_5`, `> 42`, `42!`, `42 \text{ million}`.
Nothing is evaluated.
"""

import re

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is wrong."""

_UNITS = frozenset(
    re.findall(
        "[a-z]+",
        """
        mm cm dm m km in inch inche ft foot feet yd yard mi mile meter metre millimeter centimeter centimetre kilometer
        kilometre sq square cu cubic unit mg g kg gram kilogram lb pound oz ounce ton tonne ml l liter litre milliliter
        gallon quart pint cup m s sec second min minute h hr hour day week month year mph kph degree radian rad deg
        celsiu fahrenheit kelvin percent cent dollar usd euro eur rupee yen penny pennie dime nickel n newton j joule
        w watt v volt hz hertz pa pascal mol mole per way time point people person
        """,
    )
)
"""Without a plural's s."""
_ASKED = re.compile(r"(?:how many|number of)((?: [a-z]+){1,4})")
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|omega|phi|varphi|psi|rho|sigma|tau|Delta|Omega)"
)
_NAME = re.compile(
    rf"(?:[A-Za-z]|{_GREEK})(?: ?_ ?(?:[A-Za-z0-9]|\{{[A-Za-z0-9, ]*\}}))?"  # x, x_1, \theta
    r"|[fghFGHP] ?\( ?-?\w+(?: ?, ?-?\w+)* ?\)"  # f(3)
    r"|[A-Z]{2,4}|\[ ?[A-Z]{3,6} ?\]|m? ?\\(?:angle|measuredangle) ?[A-Z]{1,3}"  # AB, [ABC], \angle ABC
    r'|"(?!(?i:[^"]*\b(?:not|no|never)\b))[A-Za-z ]+"',  # \text{Area}
    re.ASCII,
)
_LETTERS = re.compile(r"[A-Za-z](?: ?[+-]? ?[A-Za-z])*")
_TEXT = re.compile(
    r"\\(?:text(?:bf|rm|it|normal)?|math(?:rm|bf|it|sf)|mbox|hbox|boldsymbol|bm|underline|fbox|boxed)\s*\{([^{}]*)\}"
)
_GROUPED = re.compile(
    r"(?<![\d.,])[1-9]\d{0,2}(?:\{?(?:,\\!|\\!,|\\?,)\}?(?:\\!)?\d{3})+(?!\d)|"
    r"(?<![\d.,])[1-9]\d{0,2}(?:,\\! \d{3})+(?!\d)",
    re.ASCII,
)
_SEPARATORS = re.compile(r"[^\d]")
_INVISIBLE = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\$|\\[()\[\]]")
_SPACING = re.compile(r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|~")
_BRACKETS = re.compile(r'[(){}"]|,$')
_WORD = r"[A-Za-z]+\.?(?:\^?\{?[23]\}?)?"
_WORDS = rf"{_WORD}(?:[ /-]+{_WORD})*"
_NUMBER = re.compile(
    r'(?:\\\$|"\\\$"|[€£¥])? ?([+-]?) ?(?:\\\$|[€£¥])? ?("?)(\d+)(?:\.0*)?\2(?:_\{10\})?'
    rf' ?(?:\^ ?\{{? ?\\circ ?\}}?(?: ?"?[CF]"?)?|°(?: ?"?[CF]"?)?|\\degree|"?\\?%"?'
    rf'|"(?P<text> ?(?:{_WORDS}|\.)? ?)"(?: ?\^ ?\{{?[23]\}}?|[²³])?|(?P<bare>{_WORDS}))? ?[.,]?',
    re.ASCII,
)


def as_integer(answer: str, question: str = "") -> str | None:
    """The canonical spelling of an integer; None if the answer is anything else.

    Args:
        question: "How many apples ..." allows "42 apples"; common units are always allowed.
    """
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return None
    spaced = _spaced(answer)
    text = _unwrapped(spaced)
    left, equals, right = (part.strip() for part in text.partition("="))
    if equals:
        if not left or is_name(left, question):
            text = right
        elif is_name(right, question):
            text = left
        else:
            return None
    text = _unwrapped(text)
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    words, bare = found["text"], found["bare"]
    if bare and len(bare.rstrip(".")) < 2 and '"' not in spaced:
        return None  # 42 m is a product, 42 \text{ m} a length
    if not _are_units(words or bare or "", question):
        return None
    # As text: Python refuses to parse integers of many thousand digits.
    digits = found[3].lstrip("0") or "0"
    return f"-{digits}" if found[1] == "-" and digits != "0" else digits


def is_integer_reference(gold: str) -> bool:
    r"""Whether only an integer answers the problem; 10\% may also be answered by 1/10."""
    return as_integer(gold) is not None and "%" not in gold


def is_name(text: str, question: str) -> bool:
    """What an answer may be the value of: a variable, or letters that the question joins (m + n)."""
    text = _spaced(text)
    if _NAME.fullmatch(text):
        return True
    return bool(_LETTERS.fullmatch(text)) and f"${text.replace(' ', '')}$" in question.replace(" ", "")


def _spaced(text: str) -> str:
    """Numbers without separators, single spaces, and texts in quotes."""
    text = _INVISIBLE.sub("", text).replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-")
    text = _GROUPED.sub(lambda found: _SEPARATORS.sub("", found.group()), text)
    return " ".join(_SPACING.sub(" ", _TEXT.sub(r' "\1" ', text)).split())


def _unwrapped(text: str) -> str:
    """The content of brackets or quotes around the whole text."""
    for _ in range(4):
        if text[:1] + text[-1:] in ("{}", "()", '""') and not _BRACKETS.search(text[1:-1]):
            text = text[1:-1].strip()
    return text


def _are_units(words: str, question: str) -> bool:
    names = {name.rstrip("s") or "s" for name in re.findall(r"[a-z]+", words.lower())}
    known = set(_UNITS)
    if not names <= known and question:
        for found in _ASKED.finditer(" ".join(question[:20_000].lower().split())):
            known |= {name.rstrip("s") for name in found[1].split()}
    return names <= known
