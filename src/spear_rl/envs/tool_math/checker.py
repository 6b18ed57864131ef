"""math-verify in a process of its own: it uses signals and so no threads, and a formula can keep it busy for ever.

One process answers all questions of this one. It is replaced when it dies or does not answer in time.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

from spear_rl.errors import MissingExtraError

_log = logging.getLogger(__name__)

WORKER = "spear_rl.envs.tool_math.checker_process"


class CheckerError(RuntimeError):
    """The process that checks answers cannot be started."""


class MathVerify:
    """Asks the process; safe to call from many threads.

    Args:
        timeout: seconds for one comparison.
        start_timeout: seconds the process may take to be ready.
        command: what to start instead.
    """

    def __init__(
        self, *, timeout: float = 10.0, start_timeout: float = 120.0, command: tuple[str, ...] | None = None
    ) -> None:
        self._timeout, self._start_timeout = timeout, start_timeout
        self._command = command or (sys.executable, "-m", WORKER)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        self.num_replaced = 0
        """Processes that died or hung so far."""
        _living.add(self)

    def __call__(self, gold: str, given: str) -> bool:
        """Whether they mean the same. An answer that two processes in a row die of or hang on is not the right one."""
        question = json.dumps([gold, given]).encode() + b"\n"
        with self._lock:
            for _ in range(2):
                process = self._running()
                answer = self._answer(process, question)
                if answer is not None:
                    return bool(json.loads(answer))
                self._replace(process, "died" if process.poll() is not None else "did not answer in time", given)
        return False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the process; the next question starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            _end(process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            # After a fork the process is the parent's: talking to it would mix up the answers of both.
            if self._process is not None and self._owner == os.getpid():
                self._replace(self._process, "died", "")
            self._process, self._owner = self._started(), os.getpid()
        return self._process

    def _started(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for us
        )
        if _line(process, self._start_timeout) is None:
            _end(process)
            raise CheckerError(f"the process that checks answers did not start: {' '.join(self._command)}")
        return process

    def _answer(self, process: subprocess.Popen[bytes], question: bytes) -> bytes | None:
        assert process.stdin is not None
        try:
            process.stdin.write(question)
            process.stdin.flush()
        except OSError:
            _wait(process)
            return None
        return _line(process, self._timeout)

    def _replace(self, process: subprocess.Popen[bytes], why: str, given: str) -> None:
        _log.warning("the process that checks answers %s and is replaced; the answer was %.80r", why, given)
        self.num_replaced += 1
        self._process = None
        _end(process)


@cache
def math_verify() -> MathVerify:
    """The one of this process."""
    if not has_math_verify():
        raise MissingExtraError(
            "task.options.verifier=math-verify needs its extra: pip install 'spear-rl[math]', or set it to exact"
        )
    return MathVerify()


def has_math_verify() -> bool:
    return find_spec("math_verify") is not None


def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes | None:
    """The next line of its output; None if it ends or does not come in time."""
    assert process.stdout is not None
    received, deadline = b"", time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return None
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                _wait(process)
                return None
            received += chunk
    return received


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Its pipe has ended, and so will it; that it died and did not hang must be seen."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


_living: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for checker in list(_living):
        checker.close()
