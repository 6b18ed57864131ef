"""What an environment may return, checked in one place: in the trainer, in workers and by `spear check-env` alike.

The runner passes plain answers on at once (`workers.runner.is_plain_result`); all others come here. Benign differences
are converted (numpy and torch scalars, lists for tuples). Anything else is a ContractError, which ends the run: a retry
would fail again, or be silently wrong. Exceptions of an environment are handled by its runner.
"""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import iscoroutine
from typing import Any

from spear_rl.errors import UserError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.types import Metrics

MAX_NUMBER = 1e15
"""Of a reward or metric: larger ones overflow in 32-bit floats."""
MAX_TEXT = 10_000_000
"""Characters of an observation's text, and of all its choices together; bytes of all its images."""
RESERVED = frozenset(
    {"success", "low", "high", "reward", "turns", "invalid_turns", "episodes", "failed_episodes", "tokens", "bonus"}
    | {"sampler_gap", "by_family", "solved", "stops", "metrics", "counts", "samples"}
)
"""Names of the trainer's own metrics, which an environment must not use; nor any that starts with `stop_`."""

_PNG = b"\x89PNG\r\n\x1a\n"


class ContractError(UserError):
    """An environment returned what its protocol does not allow: a bug of its author, which no retry fixes."""

    def __init__(self, what: str, task_id: str = "") -> None:
        super().__init__(f"task {task_id}: {what}" if task_id else what)
        self.what, self.task_id = what, task_id

    def of(self, task_id: str) -> ContractError:
        """The same error with the task's id."""
        return self if self.task_id else ContractError(self.what, clipped(task_id, 200))


def with_location(error: BaseException) -> str:
    """An exception on one line with where it was raised; a UserError needs no location."""
    last = [] if isinstance(error, UserError) else traceback.extract_tb(error.__traceback__)[-1:]
    return in_words(error) + "".join(f" (in {frame.name}, {frame.filename}:{frame.lineno})" for frame in last)


def checked_observation(value: object, where: str) -> Observation:
    """`value` as a plain Observation; `where` names what returned it."""
    if not isinstance(value, Observation):
        raise ContractError(f"{where} returned {described(value)}, not an Observation{_hint(value)}")
    return Observation(**_converted(value, _OBSERVATION, f"{where} returned an Observation"))


def checked_result(value: object, where: str) -> StepResult:
    """`value` as a plain StepResult; `where` names what returned it."""
    if not isinstance(value, StepResult):
        raise ContractError(f"{where} returned {described(value)}, not a StepResult{_hint(value)}")
    values = _converted(value, _RESULT, f"{where} returned a StepResult")
    return StepResult(**values | {"observation": checked_observation(values["observation"], where)})


def checked_task(value: object, where: str) -> Task:
    """`value` as a plain Task; `where` names what returned it."""
    if not isinstance(value, Task):
        raise ContractError(f"{where} returned {described(value)} in its list, not a Task")
    task_id = _converted(value, {"id": _TASK["id"]}, f"{where} returned a Task")["id"]
    return Task(**_converted(value, _TASK, f"{where} returned a Task ({described(task_id)})"))


def checked_actions(value: object, where: str) -> list[str]:
    """The actions that `Task.demonstrate` returned, as a list of strings."""
    try:
        return list(_texts(value))
    except Exception as error:
        raise ContractError(f"{where} returned {described(value)}, not a list of texts") from error


def described(value: object) -> str:
    """A value for an error message: scalars and short texts as they are, others by their type."""
    kind = type(value).__name__
    try:
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return reprlib.repr(value)
        if hasattr(type(value), "item") and len(repr(value)) <= 60:
            return f"{clipped(repr(value), 60)} ({kind})"
    except Exception:  # the repr of an author's object may raise anything
        pass
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def _hint(value: object) -> str:
    if iscoroutine(value):
        value.close()
        return " (leave out `async`)"
    return " (Gymnasium's tuples have to be turned into one)" if isinstance(value, tuple) else ""


_Convert = Callable[[Any], Any]


def _converted(holder: object, table: Mapping[str, tuple[_Convert, str]], where: str) -> dict[str, Any]:
    """The fields of `table`, converted; `where` begins the error message about one that cannot be."""
    values: dict[str, Any] = {}
    for name, (convert, expected) in table.items():
        try:
            value = getattr(holder, name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ContractError(f"{where}, reading whose {name} raised {in_words(error)}") from error
        try:
            values[name] = convert(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            reason = str(error) if isinstance(error, _UnusableError) else f"is {described(value)}, not {expected}"
            raise ContractError(f"{where} whose {name} {reason}") from error
    return values


class _UnusableError(Exception):
    """A value of the right type that is unusable for the reason in the message."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    text = str.__str__(value)  # a subclass may override it
    if len(text) > MAX_TEXT:
        raise _UnusableError(f"has {len(text):,} characters, more than {MAX_TEXT:,}")
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # tokenizers refuse lone surrogates


def _texts(value: Any) -> tuple[str, ...]:
    texts = tuple(_text(text) for text in _listed(value))
    if sum(map(len, texts)) > MAX_TEXT:
        raise _UnusableError(f"have more than {MAX_TEXT:,} characters together")
    return texts


def _images(value: Any) -> tuple[bytes, ...]:
    if not all(isinstance(image, bytes) and image.startswith(_PNG) for image in _listed(value)):
        raise TypeError
    if sum(map(len, value)) > MAX_TEXT:
        raise _UnusableError(f"have more than {MAX_TEXT:,} bytes together")
    return tuple(value)


def _listed(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return value


def _scalar(value: Any) -> Any:
    """The Python value of a numpy or torch scalar; anything else as it is."""
    return value.item() if hasattr(type(value), "item") else value


def _number(value: Any) -> float:
    value = _scalar(value)
    if isinstance(value, bool | str | bytes):
        raise TypeError
    number = float(value)
    if not -MAX_NUMBER <= number <= MAX_NUMBER:
        raise ValueError
    return number


def _bool(value: Any) -> bool:
    value = _scalar(value)
    if not isinstance(value, bool):
        raise TypeError
    return value


def _metrics(value: Any) -> Metrics:
    if not isinstance(value, Mapping):
        raise TypeError
    metrics: Metrics = {}
    for name, number in dict(value).items():
        if not isinstance(name, str) or not name:
            raise _UnusableError(f"have the name {described(name)}, not a text")
        if name in RESERVED or name.startswith("stop_"):
            raise _UnusableError(f"have the name {name!r}, which is one of ours: choose another")
        try:
            metrics[_text(name)] = _number(number)
        except Exception as error:
            raise _UnusableError(f"have {described(number)} for {name[:80]!r}, not {_FINITE}") from error
    return metrics


def _format(value: Any) -> str:
    _text(value).format(action="")
    if "{action}" not in value:
        raise ValueError
    return _text(value)


def _require(is_allowed: Callable[[Any], object]) -> _Convert:
    """A converter that returns the allowed values as they are and raises for others."""

    def convert(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError
        return value

    return convert


def _or_none(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


_FINITE = f"a finite number of at most {MAX_NUMBER:g}"
_OBSERVATION: dict[str, tuple[_Convert, str]] = {
    "text": (_text, "a text"),
    "state_key": (_text, "a text (empty where the state is unknown)"),
    "choices": (_texts, "a tuple of texts"),
    "images": (_images, "a tuple of PNG files as bytes"),
    "task": (_text, "a text"),
}
_RESULT: dict[str, tuple[_Convert, str]] = {
    "observation": (_require(lambda value: isinstance(value, Observation)), "an Observation"),
    "reward": (_number, _FINITE),
    "done": (_bool, "True or False"),
    "used_tool": (_bool, "True or False"),
    "invalid": (_text, "a reason in one word, or an empty text"),
    "success": (_or_none(_bool), "True, False or None"),
    "metrics": (_metrics, "a dict of names and numbers"),
    "action": (_or_none(_text), "a text or None"),
}
_TASK: dict[str, tuple[_Convert, str]] = {
    "id": (lambda value: _require(bool)(_text(value)), "a text with something in it"),
    "make_env": (_require(callable), "a function"),
    "family": (_text, "a text"),
    "instructions": (_text, "a text"),
    "answer_format": (_format, "a text with {action} in it and no other braces"),
    "demonstrate": (_or_none(_require(callable)), "a function or None"),
    "instructions_role": (_require(lambda role: role in ("user", "system")), "user or system"),
    "unfinished_reward": (_number, _FINITE),
    "data": (lambda value: dict(_require(lambda data: isinstance(data, Mapping))(value)), "a dict"),
}
assert [*_OBSERVATION] == [field.name for field in fields(Observation)]
assert [*_RESULT] == [field.name for field in fields(StepResult)]
assert [*_TASK] == [field.name for field in fields(Task)]
