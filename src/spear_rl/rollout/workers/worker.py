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
from queue import SimpleQueue
from typing import Any, BinaryIO

from spear_rl.rollout.contract import acted, begun, closed
from spear_rl.rollout.workers.protocol import READY, Question, answer_frame, frames

GRACE = 1.0
"""Seconds that a step under way has to end in once the input has ended."""


def main() -> None:
    """Answer questions until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the pool
    source, sink = _own_pipes()
    questions: SimpleQueue[Question | None] = SimpleQueue()
    threading.Thread(target=_read, args=(source, questions), daemon=True).start()
    envs: dict[int, Any] = {}
    me = os.getpid()
    _write(sink, answer_frame(READY, "ready"))
    while (question := questions.get()) is not None:
        number = question[1]
        try:
            frame = answer_frame(number, _answer(envs, question))
        except BaseException as error:  # Ctrl-C is ignored here, so whatever is raised is the environment's own
            envs.pop(number, None)
            frame = answer_frame(number, error)
        if os.getpid() != me:  # an environment forked: only one of the two may answer
            os._exit(0)
        _write(sink, frame)
    for env in envs.values():
        closed(env)
    _end()


def _answer(envs: dict[int, Any], question: Question) -> object:
    """What is asked for; `envs` are environments by number, or before they are opened the functions that make them."""
    kind, number, content = question
    if kind == "load":
        envs[number] = pickle.loads(content)
    elif kind == "open":
        envs[number] = envs[number]()
        return begun(envs[number])
    elif kind == "step":
        return acted(envs[number], content)
    elif kind == "call":
        return pickle.loads(content)()
    elif number in envs:
        closed(envs.pop(number))
    return None


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
