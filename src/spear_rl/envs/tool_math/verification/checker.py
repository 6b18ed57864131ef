"""Compares untrusted answers with math-verify: one sandboxed fork per comparison.

An answer, and a reference from a data set, is as untrusted as code: sympy makes code of formulas. docs/security.md
describes the layers of defence.
"""

import logging
import os
import re
import secrets
import threading
import weakref
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from unicodedata import category

from spear_rl.envs.tool_math.verification.integers import MAX_ANSWER_CHARACTERS
from spear_rl.errors import MissingExtraError, UserError
from spear_rl.sandbox import Interpreter, Limits, Result, SandboxUnavailable

_log = logging.getLogger(__name__)

MODULE = "answer_checker"
"""The name of `checker_process` inside the sandbox."""
MEMORY_MB = 1024
MAX_SPARES = 8
ATTEMPTS = 4
MAX_NESTING = 50

_NAMING = re.compile(
    r"\\(?:text\w*|[mhf]box|math[a-z]+|operatorname\*?|variable|bm|boldsymbol|emph|textnormal|underline|underbrace"
    r"|over\w+|wide\w+|hat|bar|vec|tilde|dot|ddot|acute|grave|check|breve|[a-z]{2,3}shape|bf|rm|it|sf|tt)\s*\{",
    re.ASCII,
)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|[ ,!;:%$&{}])", re.ASCII)
_LABEL = re.compile(r"\([^\W_]{1,4}\)")
_NAME = re.compile(r"(?:[^\W_]'(?=[^\W_])|[^\W_]|_(?!_)|[\s.,:/%$&°^{}+-])*")
_FORBIDDEN = re.compile(r"__|[`@\x00-\x08\x0b-\x1f\x7f]")


class CheckerError(UserError):
    """Answers cannot be compared on this machine. Never caused by an answer."""


class MathVerify:
    """Compares answers. Thread-safe; one comparison per core at a time.

    Args:
        timeout: seconds per comparison, without the time spent queueing.
        backend: of the sandbox.
    """

    def __init__(self, *, timeout: float = 10.0, backend: str = "auto") -> None:
        self._limits = Limits(seconds=timeout, memory_mb=MEMORY_MB, output_chars=200)
        self._backend = backend
        self._lock = threading.Lock()
        self._interpreter: Interpreter | None = None
        self._last_pid: int | None = None
        self.num_replaced = 0
        """Servers that died so far."""
        _instances.add(self)

    def __call__(self, gold: str, given: str) -> bool:
        """Whether the answers are equal. One that is refused, crashes or times out is wrong."""
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
        """Of the server that forks the comparisons."""
        return self._interpreter.pid if self._interpreter is not None else None

    def close(self) -> None:
        """End the server; the next comparison starts another."""
        with self._lock:
            interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            interpreter.close()

    def forget(self) -> None:
        """Reset after a fork: the inherited server and lock belong to the parent."""
        self._lock, self._interpreter, self._last_pid = threading.Lock(), None, None

    def result(self, code: str) -> Result:
        """Run code in a fresh fork of the server."""
        failed_with: int | None = None
        for _ in range(ATTEMPTS):
            try:
                interpreter = self._running()
                result, pid = interpreter.run(code), interpreter.pid
            except SandboxUnavailable as error:
                raise CheckerError(_refusal(error)) from error
            except RuntimeError:  # another thread closed it
                continue
            with self._lock:
                self.num_replaced += pid != self._last_pid
                self._last_pid = pid
            # A fork may have died with its server: the second attempt is made by a live or a new server.
            if result.error is None or result.timed_out or pid == failed_with:
                return result
            failed_with = pid
        raise CheckerError(_refusal("the server of the sandbox keeps dying"))

    def _running(self) -> Interpreter:
        with self._lock:
            if self._interpreter is None:
                cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
                self._interpreter = Interpreter(
                    self._limits,
                    backend=self._backend,
                    packages=("math_verify",),
                    modules={MODULE: _source()},
                    max_running=cores,
                    spares=min(cores, MAX_SPARES),
                )
                self._last_pid = self._interpreter.pid
            return self._interpreter


def is_admissible(text: str) -> bool:
    r"""A lexical check before math-verify parses an answer, linear in its length.

    math-verify makes a symbol's name of the argument of \text, \hat and the like: only words, numbers and a little
    punctuation are allowed there, nothing that could be a piece of a program.
    """
    return (
        len(text) <= MAX_ANSWER_CHARACTERS
        and _FORBIDDEN.search(text) is None
        and all(c.isprintable() or category(c) == "Zs" or c in "\n\t\r" for c in text)
        and max(accumulate(((c in "({[") - (c in ")}]") for c in text), initial=0)) <= MAX_NESTING
        and all(_has_name_at(text, found.end()) for found in _NAMING.finditer(text))
    )


def _has_name_at(text: str, start: int) -> bool:
    """Whether the text from `start` to the closing brace, or to the end, is a name."""
    depths = accumulate(((c == "{") - (c == "}") for c in text[start:]), initial=1)
    end = next((start + length - 1 for length, depth in enumerate(depths) if depth == 0), len(text))
    return _NAME.fullmatch(_LABEL.sub("", _COMMAND.sub(" ", text[start:end]))) is not None


@cache
def math_verify(backend: str = "auto") -> MathVerify:
    """The checker of this process for a backend."""
    if not has_math_verify():
        raise MissingExtraError(
            "task.options.verifier=math-verify needs its extra: pip install 'spear-rl[math]', or set it to exact"
        )
    return MathVerify(backend=backend)


def has_math_verify() -> bool:
    return find_spec("math_verify") is not None


@cache
def _source() -> str:
    """`checker_process` and a call of `prepare` with typical answers, which fill caches before the first fork."""
    folder = Path(__file__).parent
    typical = [tuple(line.split("\t")) for line in (folder / "typical_answers.tsv").read_text("utf-8").splitlines()]
    return f"{(folder / 'checker_process.py').read_text('utf-8')}\nprepare({typical!r})\n"


@lru_cache(maxsize=1000)
def _warn_of_reference(gold: str) -> None:
    _log.warning("a reference answer is refused, so no answer to its problem is right: %.80r", gold)


def _refusal(why: object) -> str:
    return (
        f"math-verify cannot compare answers safely here: {why}. Set task.options.verifier=exact, or "
        "task.options.backend=unsafe-subprocess to go without isolation"
    )


_instances: weakref.WeakSet[MathVerify] = weakref.WeakSet()


def _forget_servers() -> None:
    for checker in list(_instances):
        checker.forget()


os.register_at_fork(after_in_child=_forget_servers)
