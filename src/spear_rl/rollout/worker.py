"""A process that plays environments for a pool: questions on its standard input, answers on its standard output.

Standard library and the environments' own packages only; never torch. It ends when its input does, so that none is left
behind by a trainer that was killed, and what an environment prints goes to standard error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, BinaryIO

from spear_rl.rollout.env import Environment, Observation, StepResult
from spear_rl.rollout.wire import READY, Question, answer_frame, frames

GRACE = 1.0
"""Seconds that a step under way has to end in once the input has ended."""


def main() -> None:
    """Answer questions until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the pool
    source, sink = _own_pipes()
    questions: SimpleQueue[Question | None] = SimpleQueue()
    threading.Thread(target=_read, args=(source, questions), daemon=True).start()
    envs: dict[int, Environment] = {}
    _write(sink, answer_frame(READY, "ready"))
    while (question := questions.get()) is not None:
        kind, number, _ = question
        try:
            frame = answer_frame(number, _answer(envs, question))
        except Exception as error:
            envs.pop(number, None)
            frame = answer_frame(number, error)
        if kind != "close":
            _write(sink, frame)
    for number in list(envs):
        _answer(envs, ("close", number, None))
    _end()


def _answer(envs: dict[int, Environment], question: Question) -> object:
    kind, number, content = question
    if kind == "open":
        env = envs[number] = pickle.loads(content)()
        return _typed(env.reset(), Observation)
    if kind == "step":
        return _typed(envs[number].step(content), StepResult)
    if kind == "call":
        return pickle.loads(content)()
    with suppress(Exception):  # the episode is over; what it earned stands
        envs.pop(number).close()
    return None


def _typed(answer: object, expected: type) -> object:
    if not isinstance(answer, expected):
        raise TypeError(f"an environment answered with {type(answer).__name__} where {expected.__name__} was due")
    return answer


def _own_pipes() -> tuple[BinaryIO, int]:
    """The two ends of the protocol, out of reach of whatever reads or prints in here."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    return open(source, "rb", buffering=0), sink


def _read(source: BinaryIO, questions: SimpleQueue[Any]) -> None:
    """Pass questions on as they come, also while a step is under way; at the end of input, end the process."""
    received = bytearray()
    while chunk := source.read(1 << 16):
        received += chunk
        for frame in frames(received):
            questions.put(pickle.loads(frame))
    questions.put(None)
    time.sleep(GRACE)
    _end()


def _write(sink: int, frame: bytes) -> None:
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(sink, rest) :]


def _end() -> None:
    """End this process and, as it leads a session of its own, whatever an environment started in it."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
