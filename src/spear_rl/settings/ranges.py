"""Limits of a value, in the annotation of a field or a parameter. Standard library only.

    temperature: Annotated[float, Range(0.001, 100)] = 1.0
    stop: Annotated[list[str], Length(0, 64, "entries")] = field(default_factory=list)
    level: Annotated[str, OneOf(LEVELS)] = "easy"

`checked` checks a value against its annotation, `described` puts the limits into words.
"""

import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Annotated, Any, Literal, ParamSpec, Protocol, TypeVar

from spear_rl.errors import ConfigError, OptionError

P = ParamSpec("P")
R = TypeVar("R")


class Limit(Protocol):
    """`str` says what is allowed, `fault` what is wrong with a value (empty if nothing)."""

    def __str__(self) -> str: ...
    def fault(self, value: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; a round bracket in `ends` excludes that end. nan is in no range."""

    low: float
    high: float
    ends: str = "[]"
    unit: str = ""
    zero: str = ""
    """The meaning of 0, if it is allowed outside the range."""

    def __str__(self) -> str:
        low = f"{_number(self.low)} or more" if self.ends[0] == "[" else f"above {_number(self.low)}"
        if math.isinf(self.high):
            return f"{low}{self.unit and f' {self.unit}'}"
        high = f"at most {_number(self.high)}" if self.ends[1] == "]" else f"below {_number(self.high)}"
        between = f", or 0 for {self.zero}, and " if self.zero else " and "
        return f"{low}{between}{high}{self.unit and f' {self.unit}'}"

    def fault(self, value: Any) -> str:
        is_inside = self.low <= value <= self.high and not (
            (value == self.low and self.ends[0] == "(") or (value == self.high and self.ends[1] == ")")
        )
        return "" if is_inside or (self.zero and value == 0) else f"must be {self} (it is {shown(value)})"


@dataclass(frozen=True, slots=True)
class Length:
    """Number of characters of a text or entries of a list."""

    low: int
    high: int
    unit: str

    def __str__(self) -> str:
        return f"{self.low:,} to {self.high:,} {self.unit}"

    def fault(self, value: Any) -> str:
        if self.low <= len(value) <= self.high:
            return ""
        if not value:
            return "must not be empty"
        return f"must have {self} (it has {len(value):,})"


@dataclass(frozen=True, slots=True)
class FilePath:
    """A path that a file system can hold."""

    may_be_empty: bool = False

    def __str__(self) -> str:
        return "a path of at most 4,095 bytes, 255 between two slashes, and 255 slashes"

    def fault(self, value: Any) -> str:
        if not value and not self.may_be_empty:
            return "must not be empty"
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
            return f"must be a path without control characters (it is {shown(value)})"
        longest = max(len(part.encode()) for part in value.split("/"))
        fits = longest <= 255 and len(value.encode()) <= 4095 and value.count("/") <= 255
        return "" if fits else f"must be {self} (it is {shown(value)})"


Steps = Range(0, 10_000_000, unit="steps")
Seed = Range(0, 2**31 - 1)
Share = Range(0, 1)
Weight = Range(0, 1000)
NonNegative = Range(0, math.inf, "[)")
Turns = Range(1, 10_000, unit="turns")
Name = Annotated[str, Length(1, 256, "characters")]
Words = Annotated[list[Name], Length(0, 64, "entries")]


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some names that are known at run time."""

    names: Iterable[str]
    what: str
    """What the names are names of."""
    helps: Mapping[str, str] = field(default_factory=dict)
    """Name -> its meaning, for the message."""

    def __str__(self) -> str:
        return f"one of: {self._listed()}"

    def fault(self, value: Any) -> str:
        return "" if value in self.names else f": unknown {self.what} {shown(value)}: there is {self._listed()}"

    def _listed(self) -> str:
        return ", ".join(f"{name} ({self.helps[name]})" if name in self.helps else name for name in self.names)


def checked(value: Any, hint: Any, key: str, helps: Callable[[], dict[str, str]] = dict) -> Any:
    """The value, converted to the type of `hint` and within its limits; else an error that begins with `key`.

    Args:
        helps: gives a line of help for each choice of a Literal, for the error message.
    """
    base, limits = _parts(hint)
    origin, arguments = typing.get_origin(base), typing.get_args(base)
    if base is Any:  # keywords that are passed on
        return value
    if origin in (typing.Union, types.UnionType):
        words = [word for a in arguments if typing.get_origin(a) is Literal for word in typing.get_args(a)]
        if isinstance(value, str) and value in words:
            return value
        if type(None) in arguments and (value is None or value == "none"):
            return None
        kind = _parts(arguments[0])[0]
        if words and not isinstance(value, int | float if kind is float else kind):
            raise ConfigError(f"{key} takes {described(hint)}; got {shown(value)}")
        lists = [a for a in arguments if typing.get_origin(_parts(a)[0]) in (list, Sequence)]
        is_list = bool(lists) and isinstance(value, Sequence) and not isinstance(value, str)
        if lists and isinstance(value, str):
            raise ConfigError(f"{key} takes a number, or a list of numbers, e.g. {key}=[1, 2]; got {shown(value)}")
        value = checked(value, lists[0] if is_list else next(a for a in arguments if a is not type(None)), key)
    elif origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            known = helps() or dict.fromkeys(arguments, "")
            names = ", ".join(f"{name} ({text})" if text else name for name, text in known.items())
            near = nearest(shown(value), arguments)
            raise ConfigError(f"{key} cannot be {shown(value)}{near}; it is one of: {names}")
    elif origin in (list, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f'{key} takes a list, e.g. {key}=["a"]; got {shown(value)}')
        value = [checked(entry, arguments[0], key) for entry in value]
    else:
        value = _typed(value, base, key)
    for limit in limits:
        if fault := limit.fault(value):
            raise ConfigError(f"{key}{'' if fault[0] == ':' else ' '}{fault}")
    return value


def described(hint: Any) -> str:
    """The limits of an annotation in words; empty where there are none."""
    base, limits = _parts(hint)
    words = [str(limit) for limit in limits]
    if typing.get_args(base)[:1] == (bool,) and type(None) not in typing.get_args(base):
        return f"true, false or {' or '.join(typing.get_args(typing.get_args(base)[1]))}"
    for inner in typing.get_args(base) if typing.get_origin(base) in (typing.Union, types.UnionType) else ():
        if typing.get_origin(inner) is Literal:
            words += [f"or {word}" for word in typing.get_args(inner)]
        else:
            words += [described(inner)] if inner is not type(None) else ["or unset"]
    return ", ".join(filter(None, words))


def has_checked_options(function: Callable[P, R]) -> Callable[P, R]:
    """Check every argument of an environment's `tasks` function against its annotation."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = typing.get_type_hints(function, include_extras=True)
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            try:
                given.arguments[name] = checked(value, hints[name], name)
            except ConfigError as error:
                raise OptionError(str(error)) from error
        return function(*given.args, **given.kwargs)

    return checking


def check_fields(record: object) -> None:
    """Refuse a value of a dataclass that is none of its Literal's words or outside of its limits."""
    kind: Any = type(record)
    for name, hint in _limited_fields(kind).items():
        check_option(name, getattr(record, name), hint)


def check_option(name: str, value: Any, hint: Any) -> None:
    """Refuse an argument that its annotation does not allow; scalars of numpy and torch are numbers too."""
    try:
        checked(value.item() if hasattr(value, "item") else value, hint, name)
    except ConfigError as error:
        raise OptionError(str(error)) from error


@functools.cache
def _limited_fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if _is_limited(hint)}


def _is_limited(hint: Any) -> bool:
    base, limits = _parts(hint)
    origin = typing.get_origin(base)
    if origin in (typing.Union, types.UnionType):
        return any(map(_is_limited, typing.get_args(base)))
    return bool(limits) or origin is Literal


def require_known(option: str, value: str, names: Iterable[str], *, what: str) -> None:
    """Refuse a name that is none of `names`, which depend on other options."""
    if fault := OneOf(names, what).fault(value):
        raise OptionError(f"{option}{fault}")


def nearest(word: str, known: Iterable[str]) -> str:
    """A question with the most similar known word, or nothing."""
    word = word[:200].strip("'")
    close = difflib.get_close_matches(word, list(known), cutoff=0.5)
    close.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters are the likeliest slip
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: Any, *, most: int = 80) -> str:
    """A value for an error message: on one line, shortened if long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of about {value.bit_length() * 30103 // 100_000:,} digits"
    try:
        text = repr(str(value) if isinstance(value, date | time) else value)
        text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates
    except (ValueError, RecursionError):  # a number too long to print, or nested too deeply
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _parts(hint: Any) -> tuple[Any, tuple[Limit, ...]]:
    """An annotation's type and limits."""
    return (hint.__origin__, hint.__metadata__) if typing.get_origin(hint) is Annotated else (hint, ())


def _typed(value: Any, kind: type, key: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    hint = ""
    if kind is float and is_number:
        try:
            value = float(value)
        except OverflowError:
            value = float("inf")
    elif kind is str and is_number and isinstance(value, int):
        value = shown(value)
    elif kind is str and isinstance(value, date | time | datetime):
        value = value.isoformat()
    elif kind is str and isinstance(value, float | bool):
        hint = f": write it in quotes, {key}='\"...\"'"
    elif kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        hint = f": write {int(value)}"
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        wanted = names.get(kind, f"a {kind.__name__}")
        raise ConfigError(f"{key} takes {wanted}; got {shown(value)}{hint}")
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(f"{key} takes a text in UTF-8; got {shown(value)}")
        if "\0" in value:
            raise ConfigError(f"{key} takes a text without NUL characters; got {shown(value)}")
    return value


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
