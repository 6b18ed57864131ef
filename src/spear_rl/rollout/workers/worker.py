"""The program of a worker process: requests on its standard input, answers on its standard output.

Needs the standard library and the environments' own packages only; never torch. It ends when its input does, so that
none outlives a killed trainer. What an environment prints goes to standard error.
"""

import os
import pickle
import signal
import sys
import threading
import time
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, BinaryIO

from spear_rl.rollout.workers.protocol import READY, Request, answer_frame, frames
from spear_rl.rollout.workers.runner import checked_reset, checked_step, close_quietly

GRACE = 1.0
"""Seconds for a running step to finish once the input has ended."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the pool
    signal.signal(signal.SIGTERM, partial(_outlive, os.getpid()))  # a scheduler sends it to every process of a job
    source, sink = _private_pipes()
    requests: SimpleQueue[Request | None] = SimpleQueue()
    threading.Thread(target=_read, args=(source, requests), daemon=True).start()
    envs: dict[int, Any] = {}
    pid = os.getpid()
    _write(sink, answer_frame(READY, "ready"))
    while (request := requests.get()) is not None:
        number = request[1]
        try:
            frame = answer_frame(number, _answer(envs, request))
        except BaseException as error:  # SIGINT is ignored, so a KeyboardInterrupt is the environment's own
            envs.pop(number, None)
            frame = answer_frame(number, error)
        if os.getpid() != pid:  # an environment forked: the child must not answer
            os._exit(0)
        _write(sink, frame)
    for env in envs.values():
        close_quietly(env)
    _end()


def _outlive(worker: int, number: int, _: FrameType | None) -> None:
    """Ignore a signal in the worker, but not in a fork of it; a program that it starts is not affected."""
    if os.getpid() != worker:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _answer(envs: dict[int, Any], request: Request) -> object:
    """The answer to a request; `envs` holds environments by number and, until they are opened, their `make_env`."""
    kind, number, content = request
    if kind == "load":
        envs[number] = pickle.loads(content)
    elif kind == "open":
        envs[number] = envs[number]()
        return checked_reset(envs[number])
    elif kind == "step":
        return checked_step(envs[number], content)
    elif kind == "call":
        return pickle.loads(content)()
    elif number in envs:
        close_quietly(envs.pop(number))
    return None


def _private_pipes() -> tuple[BinaryIO, int]:
    """The two ends of the protocol, moved away from the descriptors that environments read and print to."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    return open(source, "rb", buffering=0), sink


def _read(source: BinaryIO, requests: SimpleQueue[Any]) -> None:
    """Queue requests as they arrive, also during a step; at the end of input, end the process."""
    received = bytearray()
    while chunk := source.read(1 << 16):
        received += chunk
        for frame in frames(received):
            requests.put(pickle.loads(frame))
    requests.put(None)
    time.sleep(GRACE)
    _end()


def _write(sink: int, frame: bytes) -> None:
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(sink, rest) :]


def _end() -> None:
    """Kill this process's group, which is its own session: also whatever an environment started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
