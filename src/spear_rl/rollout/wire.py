"""What goes over the pipes between a pool and its workers: length-prefixed frames. Knows no processes.

Questions are pickled: the trainer made them, and a task's `make_env` is a picklable callable. Answers are JSON: the
trainer never unpickles what a worker wrote, and a worker may have classes and number types that the trainer lacks.
"""

from __future__ import annotations

import json
import pickle
import struct
import traceback
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from spear_rl.errors import UserError
from spear_rl.rollout.env import Observation, StepResult

Kind = Literal["open", "step", "call", "close"]
Question = tuple[Kind, int, Any]
"""(kind, number of the episode, what it is about): each but `close` is answered once, in the order they were asked.

open   a pickled `make_env`   -> the first observation
step   an action              -> a step's result
call   a pickled function     -> what it returns, which JSON must be able to hold
close  None                   -> nothing
"""
READY = -1
"""The number of the one answer that nobody asked for: the worker is up."""

_LENGTH = struct.Struct(">Q")


class EnvironmentFailedError(RuntimeError):
    """An environment in a worker raised, or its worker died or hung."""


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def frames(received: bytearray) -> Iterator[bytes]:
    """Take the complete frames out of what was received; the rest stays."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        yield bytes(received[_LENGTH.size : end])
        del received[:end]


def question_frame(question: Question) -> bytes:
    return framed(pickle.dumps(question, protocol=4))


def answer_frame(number: int, answer: object) -> bytes:
    """An observation, a step's result, an exception, or any plain value."""
    if isinstance(answer, StepResult):
        entry: list[object] = ["result", _plain(answer.observation), float(answer.reward), bool(answer.done)]
        success = None if answer.success is None else bool(answer.success)
        entry += [bool(answer.used_tool), str(answer.invalid or ""), success]
        entry.append({str(name): float(value) for name, value in answer.metrics.items()})
    elif isinstance(answer, Observation):
        entry = ["observation", *_plain(answer)]
    elif isinstance(answer, UserError):
        entry = ["error", str(answer)]
    elif isinstance(answer, BaseException):
        last = traceback.extract_tb(answer.__traceback__)[-1:]
        place = "".join(f" (in {frame.name}, {frame.filename}:{frame.lineno})" for frame in last)
        entry = ["error", f"{type(answer).__name__}: {answer}{place}"]
    else:
        entry = ["value", answer]
    return framed(json.dumps([number, *entry]).encode("ascii"))


def answer_in(frame: bytes) -> tuple[int, Any]:
    """(episode's number, answer) of a frame; what a worker's environment raised comes as an EnvironmentFailedError."""
    number, kind, *parts = json.loads(frame)
    if kind == "result":
        seen, *others = parts
        return number, StepResult(_observation(*seen), *others)
    if kind == "observation":
        return number, _observation(*parts)
    return number, EnvironmentFailedError(parts[0]) if kind == "error" else parts[0]


def _plain(observation: Observation) -> list[object]:
    if not isinstance(observation, Observation):
        raise TypeError(f"an environment answered with {type(observation).__name__} where an Observation was due")
    plain: list[object] = [str(observation.text), str(observation.state_key), list(map(str, observation.choices))]
    return plain if not observation.images else [*plain, [b64encode(image).decode() for image in observation.images]]


def _observation(text: str, state_key: str, choices: list[str], images: Sequence[str] = ()) -> Observation:
    return Observation(text, state_key, tuple(choices), tuple(map(b64decode, images)))
