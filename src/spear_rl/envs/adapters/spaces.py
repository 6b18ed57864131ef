"""Gymnasium's spaces in words: observations as text, actions from text. Known by class name, without the package."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_NUMBERS = 64
"""Of a Box or MultiDiscrete that is shown as numbers."""
MAX_CHOICES = 1000
"""Of a discrete action space that is listed."""

_NUMBER = re.compile(r"-?\d+")
_COLOURED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_BRACKETS = {"34": ("(", ")"), "35": ("{", "}"), "42": ("<", ">")}
"""Colour code -> the brackets that stand for it in text; every other colour is shown as []."""

Words = Callable[[Any], str]


def observation_fault(space: Any) -> str:
    """Why observations of a space cannot be written as a short text; empty if they can."""
    kind = type(space).__name__
    if kind in ("Discrete", "Text"):
        return ""
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        size = _size(space)
        return "" if size <= MAX_NUMBERS else f"{kind} of {size:,} numbers, of which at most {MAX_NUMBERS} fit a text"
    if kind in ("Dict", "Tuple"):
        return next(filter(None, map(observation_fault, _parts(space).values())), "")
    return f"{kind}, whose size is not bounded or whose values have no short text"


def observed(space: Any, value: Any) -> str:
    """An observation as text: numbers with two decimals, parts of a Dict by name."""
    kind = type(space).__name__
    if kind in ("Dict", "Tuple"):
        parts = _parts(space)
        values = value if isinstance(value, Mapping) else dict(zip(parts, value, strict=True))
        shown = [(name, observed(part, values[name])) for name, part in parts.items()]
        return ", ".join(f"{name} {text}" if kind == "Dict" else text for name, text in shown)
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        return " ".join(_number(entry) for entry in value.reshape(-1).tolist())
    return str(value)


def action_fault(space: Any) -> str:
    """Why actions of a space cannot be said; empty if they can."""
    kind = type(space).__name__
    if kind == "Discrete":
        return (
            "" if space.n <= MAX_CHOICES else f"Discrete with {space.n:,} actions, of which {MAX_CHOICES} can be listed"
        )
    if kind in ("MultiDiscrete", "MultiBinary"):
        return "" if _size(space) <= MAX_NUMBERS else f"{kind} of {_size(space):,} numbers"
    return "" if kind == "Text" else f"{kind}, which has no words"


def choices(space: Any, names: Sequence[str]) -> tuple[str, ...]:
    """What can be said in a discrete action space, by name or by number; empty for others."""
    if type(space).__name__ != "Discrete":
        return ()
    return tuple(names) or tuple(str(int(space.start) + number) for number in range(int(space.n)))


def action_of(space: Any, names: Sequence[str], said: str) -> Any:
    """The action that is said; None if it is none of the space."""
    kind = type(space).__name__
    if kind == "Text":
        return said if space.contains(said) else None
    if kind == "Discrete":
        words = [word.lower() for word in choices(space, names)]
        return int(space.start) + words.index(said.lower()) if said.lower() in words else None
    numbers = [int(number) for number in _NUMBER.findall(said[:1000]) if len(number) < 10]
    if len(numbers) != _size(space):
        return None
    import numpy

    action = numpy.array(numbers, dtype=space.dtype).reshape(space.shape)
    return action if space.contains(action) else None


def plain_picture(text: str) -> str:
    """A rendered text without terminal codes: coloured characters stand in brackets."""

    def bracketed(found: re.Match[str]) -> str:
        codes = found[1].split(";")
        left, right = next((_BRACKETS[code] for code in codes if code in _BRACKETS), ("[", "]"))
        return f"{left}{found[2]}{right}"

    return _ESCAPE.sub("", _COLOURED.sub(bracketed, text)).strip("\n")


def _parts(space: Any) -> dict[Any, Any]:
    inner = space.spaces
    return dict(inner) if isinstance(inner, Mapping) else dict(enumerate(inner))


def _size(space: Any) -> int:
    size = 1
    for length in space.shape:
        size *= int(length)
    return size


def _number(value: float) -> str:
    return str(value) if isinstance(value, int | bool) else f"{value:.2f}".replace("-0.00", "0.00")
