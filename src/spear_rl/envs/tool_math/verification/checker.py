"""Compares untrusted answers with math-verify: one sandboxed fork per comparison.

An answer, and a reference out of somebody's data set, is as untrusted as code: sympy makes code of formulas. What stops
it, layer by layer, is in docs/security.md.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from spear_rl.envs.tool_math.verification.admissible import is_admissible
from spear_rl.errors import MissingExtraError, UserError
from spear_rl.sandbox import Interpreter, Limits, Result, SandboxUnavailable

_log = logging.getLogger(__name__)

MODULE = "answer_checker"
"""What `checker_process` is called inside the sandbox."""
MEMORY_MB = 1024
MAX_SPARES = 8
ATTEMPTS = 4


class CheckerError(UserError):
    """Answers cannot be compared here and now. Never the fault of an answer."""


class MathVerify:
    """Compares answers; safe to call from many threads, which run side by side on as many cores as there are.

    Args:
        timeout: seconds for one comparison; waiting for a core does not count.
        backend: of the sandbox.
    """

    def __init__(self, *, timeout: float = 10.0, backend: str = "auto") -> None:
        self._limits = Limits(seconds=timeout, memory_mb=MEMORY_MB, output_chars=200)
        self._backend = backend
        self._interpreter: Interpreter | None = None
        self._lock = threading.Lock()
        self._last_pid: int | None = None
        self.num_replaced = 0
        """Servers that died so far."""
        _living.add(self)

    def __call__(self, gold: str, given: str) -> bool:
        """Whether they mean the same. What is refused, crashes, or takes too long is not the right answer."""
        if not is_admissible(gold):
            _warn_of_reference(gold)
            return False
        if not is_admissible(given):
            return False
        if gold.split() == given.split():
            return bool(gold.strip())
        token = secrets.token_hex(8)
        result = self.result(f"import {MODULE}\n{MODULE}.reply({token!r}, {gold!r}, {given!r})")
        if result.error is not None:
            _log.debug("an answer was not compared (%s): %.80r", result.error.strip()[-200:], given)
        return result.error is None and result.stdout == f"{token} same\n"

    @property
    def pid(self) -> int | None:
        """Of the server, from which each comparison is forked."""
        return self._interpreter.pid if self._interpreter is not None else None

    def close(self) -> None:
        """End the server; the next question starts another."""
        with self._lock:
            interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            interpreter.close()

    def forget(self) -> None:
        """Reset after a fork: the inherited server and the lock belong to the parent."""
        self._lock, self._interpreter, self._last_pid = threading.Lock(), None, None

    def result(self, code: str) -> Result:
        """Run code in a fresh fork of the warmed server."""
        failed_with: int | None = None
        for _ in range(ATTEMPTS):
            interpreter = self._running()
            try:
                result, pid = interpreter.run(code), interpreter.pid
            except SandboxUnavailable as error:
                raise CheckerError(_refusal(error)) from error
            except RuntimeError:  # another thread closed it
                continue
            self._count(pid)
            # Did the fork die by itself, or with its server? A second one tells: a dead server would be replaced first.
            if result.error is None or result.timed_out or pid == failed_with:
                return result
            failed_with = pid
        raise CheckerError(_refusal("the server of the sandbox keeps dying"))

    def _running(self) -> Interpreter:
        with self._lock:
            if self._interpreter is None:
                cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
                try:
                    self._interpreter = Interpreter(
                        self._limits,
                        backend=self._backend,
                        packages=("math_verify",),
                        modules={MODULE: _source()},
                        max_running=cores,
                        spares=min(cores, MAX_SPARES),
                    )
                except SandboxUnavailable as error:
                    raise CheckerError(_refusal(error)) from error
                self._last_pid = self._interpreter.pid
            return self._interpreter

    def _count(self, pid: int | None) -> None:
        with self._lock:
            self.num_replaced += pid != self._last_pid
            self._last_pid = pid


@cache
def math_verify(backend: str = "auto") -> MathVerify:
    """The shared checker of this process for a backend."""
    if not has_math_verify():
        raise MissingExtraError(
            "task.options.verifier=math-verify needs its extra: pip install 'spear-rl[math]', or set it to exact"
        )
    return MathVerify(backend=backend)


def has_math_verify() -> bool:
    return find_spec("math_verify") is not None


@cache
def _source() -> str:
    return Path(__file__).with_name("checker_process.py").read_text("utf-8") + "\nprepare()\n"


@lru_cache(maxsize=1000)
def _warn_of_reference(gold: str) -> None:
    _log.warning("a reference answer is refused, so no answer to its problem is right: %.80r", gold)


def _refusal(why: object) -> str:
    return (
        f"math-verify cannot compare answers safely here: {why}. Set task.options.verifier=exact, or "
        "task.options.backend=unsafe-subprocess to go without isolation"
    )


_living: weakref.WeakSet[MathVerify] = weakref.WeakSet()


def _forget_all() -> None:
    for checker in list(_living):
        checker.forget()


os.register_at_fork(after_in_child=_forget_all)
