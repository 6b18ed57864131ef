"""Messages over the pipes between a pool and its workers: length-prefixed frames.

Requests are pickled: the trainer makes them, and a task's `make_env` is a picklable callable. Answers are JSON: the
trainer never unpickles what a worker wrote, and a worker may have classes that the trainer lacks.
"""

import pickle
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from json import dumps, loads  # by name: an environment may replace the module's functions
from typing import Any, Literal

from spear_rl.errors import UserError
from spear_rl.rollout.contract import ContractError, with_location
from spear_rl.rollout.env import Observation, StepResult

Kind = Literal["load", "open", "step", "call", "close"]
Request = tuple[Kind, int, Any]
"""(kind, number of the episode, content); each is answered once, in order.

load   a pickled `make_env`   -> None, once its modules are imported
open   None                   -> the first observation
step   an action              -> a step's result
call   a pickled function     -> its return value, which must fit into JSON
close  None                   -> None
"""
READY = -1
"""The number of the first answer, which has no request: the worker has started."""

MAX_FRAME = 1 << 29
"""Maximum size of a frame in bytes."""

_LENGTH = struct.Struct(">Q")


class EnvironmentFailedError(UserError, RuntimeError):
    """An environment in a worker raised, or its worker died or hung."""


class GarbledError(Exception):
    """A worker wrote something that is not an answer: an environment got hold of the pipe."""


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def frames(received: bytearray) -> Iterator[bytes]:
    """Remove the complete frames from `received`; the rest stays."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if end > MAX_FRAME:
            raise GarbledError
        if len(received) < end:
            return
        yield bytes(received[_LENGTH.size : end])
        del received[:end]


def request_frame(request: Request) -> bytes:
    return framed(pickle.dumps(request, protocol=4))


def answer_frame(number: int, answer: object) -> bytes:
    """The frame of a checked observation or step's result, an exception, or any plain value."""
    if isinstance(answer, StepResult):
        entry: list[object] = ["result", _plain(answer.observation), answer.reward, answer.done, answer.used_tool]
        entry += [answer.invalid, answer.success, answer.metrics, answer.action]
    elif isinstance(answer, Observation):
        entry = ["observation", *_plain(answer)]
    elif isinstance(answer, ContractError):
        entry = ["violation", answer.what, answer.task_id]
    elif isinstance(answer, BaseException):
        entry = ["error", with_location(answer)]
    else:
        entry = ["value", answer]
    return framed(dumps([number, *entry]).encode("ascii"))


def answer_in(frame: bytes) -> tuple[int, Any]:
    """(number of the episode, unchecked answer) of a frame; an error comes as an exception. May raise GarbledError."""
    try:
        number, kind, *parts = loads(frame)
        if kind == "result":
            seen, *others = parts
            answer: object = StepResult(_observation(*seen), *others)
        elif kind == "observation":
            answer = _observation(*parts)
        elif kind == "violation":
            answer = ContractError(*map(str, parts))
        else:
            [answer] = [EnvironmentFailedError(str(part)) if kind == "error" else part for part in parts]
    except Exception as error:
        raise GarbledError from error
    return number, answer


def _plain(observation: Observation) -> list[object]:
    images = [b64encode(image).decode() for image in observation.images]
    return [observation.text, observation.state_key, observation.choices, images, observation.task]


def _observation(text: str, state_key: str, choices: list[str], images: Sequence[str], task: str) -> Observation:
    return Observation(text, state_key, tuple(choices), tuple(map(b64decode, images)), task)
