"""What an environment may return, checked in one place: in the trainer, in workers and by `spear check-env` alike.

Benign differences are converted (numpy's and torch's scalars, lists for tuples); anything else is a ContractError and
ends the run: it would fail every time, or be silently wrong. What an environment raises is another matter (`runner`).
"""

from __future__ import annotations

import re
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import iscoroutine
from typing import Any

from spear_rl.errors import UserError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.rollout.env import Environment, Observation, StepResult, Task
from spear_rl.types import Metrics

MAX_NUMBER = 1e15
"""Of a reward or measure: larger ones overflow in the 32-bit floats of a training."""
MAX_TEXT = 10_000_000
"""Characters of an observation's text, and of all its choices together; bytes of all its pictures."""
RESERVED = frozenset(
    {"success", "low", "high", "reward", "turns", "invalid_turns", "episodes", "failed_episodes", "tokens", "bonus"}
    | {"sampler_gap", "by_family", "solved", "stops", "metrics", "counts"}
)
"""Names of our own measures, which an environment's must not replace; `stop_...` are ours too."""

_Convert = Callable[[Any], Any]
_WORDS = re.compile(r"\s+")
_PNG = b"\x89PNG\r\n\x1a\n"


class ContractError(UserError):
    """An environment returned what its protocol does not allow: its author's mistake, which no retry mends."""

    def __init__(self, what: str, task_id: str = "") -> None:
        super().__init__(f"task {task_id}: {what}" if task_id else what)
        self.what, self.task_id = what, task_id

    def of(self, task_id: str) -> ContractError:
        """The same, with the task it happened in."""
        return self if self.task_id else ContractError(self.what, clipped(task_id, 200))


def with_place(error: BaseException) -> str:
    """The same and where it was raised, for the author of an environment; a user's mistake has no such place."""
    last = [] if isinstance(error, UserError) else traceback.extract_tb(error.__traceback__)[-1:]
    return in_words(error) + "".join(f" (in {frame.name}, {frame.filename}:{frame.lineno})" for frame in last)


def begun(env: Any) -> Observation:
    """The checked first observation of an environment that was just made."""
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise ContractError(f"make_env returned {shown(env)}, which has no method {method}")
    return checked_observation(env.reset(), lambda: f"{type(env).__name__}.reset")


def acted(env: Environment, action: str) -> StepResult:
    """The checked answer of an environment to an action."""
    return checked_result(env.step(action), lambda: f"{type(env).__name__}.step")


def closed(env: Environment) -> None:
    """Close an environment, whatever it raises: its episode is over, and what it earned stands."""
    try:
        env.close()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return


def checked_observation(seen: object, where: Callable[[], str]) -> Observation:
    """`seen` as a plain Observation; `where` says who returned it."""
    if type(seen) is Observation and _is_plain(seen):
        return seen
    if not isinstance(seen, Observation):
        raise ContractError(f"{where()} returned {shown(seen)}, not an Observation{_hint(seen)}")
    return Observation(**_converted(seen, _OBSERVATION, lambda: f"{where()} returned an Observation"))


def checked_result(result: object, where: Callable[[], str]) -> StepResult:
    """`result` as a plain StepResult; `where` says who returned it."""
    if type(result) is StepResult and _is_plain_result(result):
        return result
    if not isinstance(result, StepResult):
        raise ContractError(f"{where()} returned {shown(result)}, not a StepResult{_hint(result)}")
    seen = _read(result, "observation", where)
    if not isinstance(seen, Observation):
        raise ContractError(f"{where()} returned a StepResult whose observation is {shown(seen)}, not an Observation")
    observation = checked_observation(seen, where)
    return StepResult(observation, **_converted(result, _RESULT, lambda: f"{where()} returned a StepResult"))


def checked_task(task: object, where: Callable[[], str]) -> Task:
    """`task` as a plain Task."""
    if not isinstance(task, Task):
        raise ContractError(f"{where()} returned {shown(task)} in its list, not a Task")
    return Task(**_converted(task, _TASK, lambda: f"{where()} returned a Task ({shown(_read(task, 'id', where))})"))


def checked_actions(actions: object, where: Callable[[], str]) -> list[str]:
    """What `Task.demonstrate` returned, as a list of texts."""
    try:
        return list(_texts(actions))
    except Exception as error:
        raise ContractError(f"{where()} returned {shown(actions)}, not a list of texts") from error


def _is_plain_result(result: StepResult) -> bool:
    """Whether a StepResult is as its types say, so that nothing has to be converted; this is the common case."""
    try:
        return (
            type(result.observation) is Observation
            and _is_plain(result.observation)
            and type(result.reward) is float
            and -MAX_NUMBER <= result.reward <= MAX_NUMBER
            and type(result.done) is bool
            and type(result.used_tool) is bool
            and type(result.invalid) is str
            and _is_clean(result.invalid)
            and (result.success is None or type(result.success) is bool)
            and type(result.metrics) is dict
            and not result.metrics
        )
    except AttributeError:  # one that was never set; the long way says which
        return False


def _is_plain(seen: Observation) -> bool:
    """The same of an Observation."""
    try:
        text, choices = seen.text, seen.choices
        return (
            type(text) is str
            and _is_clean(text)
            and type(seen.state_key) is str
            and _is_clean(seen.state_key)
            and type(choices) is tuple
            and (not choices or ({*map(type, choices)} == _STR and _is_clean("".join(choices))))
            and type(seen.images) is tuple
            and not seen.images
        )
    except AttributeError:
        return False


_STR = {str}


def _is_clean(text: str) -> bool:
    """Whether a text is not too long and holds characters only: no tokenizer and no file takes a lone surrogate."""
    if len(text) > MAX_TEXT:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _converted(holder: object, table: Mapping[str, tuple[_Convert, str]], where: Callable[[], str]) -> dict[str, Any]:
    """The fields of `table`, converted; `where` begins the sentence about one that cannot be."""
    values: dict[str, Any] = {}
    for name, (convert, expected) in table.items():
        value = _read(holder, name, where)
        try:
            values[name] = convert(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            reason = str(error) if isinstance(error, _UnusableError) else f"is {shown(value)}, not {expected}"
            raise ContractError(f"{where()} whose {name} {reason}") from error
    return values


def _read(holder: object, name: str, where: Callable[[], str]) -> Any:
    try:
        return getattr(holder, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ContractError(f"{where()}, reading whose {name} raised {in_words(error)}") from error


class _UnusableError(Exception):
    """Says more about a value than that it is of another type."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    text = str.__str__(value)  # of a subclass, the text itself
    if len(text) > MAX_TEXT:
        raise _UnusableError(f"has {len(text):,} characters, more than {MAX_TEXT:,}")
    return text if _is_clean(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _name(value: Any) -> str:
    if not _text(value):
        raise ValueError
    return _text(value)


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


def _listed(value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return value


def _scalar(value: Any) -> Any:
    """What numpy's and torch's scalars hold; everything else as it is."""
    return value.item() if hasattr(type(value), "item") else value


def _number(value: Any) -> float:
    value = _scalar(value)
    if isinstance(value, bool | str | bytes):
        raise TypeError
    number = float(value)
    if not -MAX_NUMBER <= number <= MAX_NUMBER:
        raise ValueError
    return number


def _truth(value: Any) -> bool:
    value = _scalar(value)
    if not isinstance(value, bool):
        raise TypeError
    return value


def _truth_or_none(value: Any) -> bool | None:
    return None if value is None else _truth(value)


def _measures(value: Any) -> Metrics:
    if not isinstance(value, Mapping):
        raise TypeError
    measures: Metrics = {}
    for name, measure in dict(value).items():
        if not isinstance(name, str) or not name:
            raise _UnusableError(f"have the name {shown(name)}, not a text")
        if name in RESERVED or name.startswith("stop_"):
            raise _UnusableError(f"have the name {name!r}, which is one of ours: choose another")
        try:
            measures[_text(name)] = _number(measure)
        except Exception as error:
            raise _UnusableError(f"have {shown(measure)} for {name[:80]!r}, not {_FINITE}") from error
    return measures


def _format(value: Any) -> str:
    _text(value).format(action="")
    if "{action}" not in value:
        raise ValueError
    return _text(value)


def _function(value: Any) -> Any:
    if not callable(value):
        raise TypeError
    return value


def _role(value: Any) -> Any:
    if value not in ("user", "system"):
        raise ValueError
    return value


_FINITE = f"a finite number of at most {MAX_NUMBER:g}"
_OBSERVATION: dict[str, tuple[_Convert, str]] = {
    "text": (_text, "a text"),
    "state_key": (_text, "a text (empty where the state is unknown)"),
    "choices": (_texts, "a tuple of texts"),
    "images": (_images, "a tuple of PNG files as bytes"),
}
_RESULT: dict[str, tuple[_Convert, str]] = {
    "reward": (_number, _FINITE),
    "done": (_truth, "True or False"),
    "used_tool": (_truth, "True or False"),
    "invalid": (_text, "a reason in one word, or an empty text"),
    "success": (_truth_or_none, "True, False or None"),
    "metrics": (_measures, "a dict of names and numbers"),
}
_TASK: dict[str, tuple[_Convert, str]] = {
    "id": (_name, "a text with something in it"),
    "make_env": (_function, "a function"),
    "family": (_text, "a text"),
    "instructions": (_text, "a text"),
    "answer_format": (_format, "a text with {action} in it and no other braces"),
    "demonstrate": (lambda value: None if value is None else _function(value), "a function or None"),
    "instructions_role": (_role, "user or system"),
    "unfinished_reward": (_number, _FINITE),
}
assert [*_OBSERVATION] == [field.name for field in fields(Observation)]
assert ["observation", *_RESULT] == [field.name for field in fields(StepResult)]
assert [*_TASK] == [field.name for field in fields(Task)]


def shown(value: object) -> str:
    """A value in a sentence: small plain ones as they are, others by their type."""
    kind = type(value).__name__
    try:
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return reprlib.repr(value)
        if hasattr(type(value), "item") and len(repr(value)) <= 60:
            return f"{clipped(repr(value), 60)} ({kind})"
    except Exception:
        pass
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def _hint(value: object) -> str:
    if iscoroutine(value):
        value.close()
        return " (leave out `async`)"
    if isinstance(value, tuple):
        return " (Gymnasium's tuples have to be turned into one)"
    return ""
