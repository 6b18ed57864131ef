"""Hands code to a SandboxFusion service over HTTP. What isolates it is the service; this only bounds what comes back.

One-off code goes to /run_code. The service keeps no state, so an episode sends its earlier cells again to /run_jupyter
and reads the last one's result: they run again each time, in a fresh notebook.
"""

from __future__ import annotations

import ast
import json
import re
import time
import urllib.request
from http.client import HTTPException
from typing import Any

from spear_rl.io.http import bounded_opener
from spear_rl.sandbox.limits import Limits
from spear_rl.sandbox.result import Result
from spear_rl.sandbox.unavailable import SandboxUnavailable

GRACE_SECONDS = 30.0
"""For the way there and back and a queue at the service, on top of the code's own time."""
SEEDING = """
import random as _random
_random.seed({seed})
try:
    import numpy as _numpy
    _numpy.random.seed({seed})
except ImportError:
    pass
"""
TOO_LATE = "TimeLimitExceeded"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class FusionCells:
    """One episode at a service, seen as the interpreter sees any other."""

    def __init__(self, url: str, limits: Limits, *, seed: int | None) -> None:
        self._url, self._limits = url.rstrip("/"), limits
        self._first = [] if seed is None else [SEEDING.format(seed=seed % (1 << 32))]
        self._earlier: list[str] = []
        self.is_alive = True

    def run(self, code: str, *, is_last: bool) -> Result:
        """Run code; the only one of its episode if it is also the last."""
        code = code.encode("utf-8", "replace").decode()
        started = time.monotonic()
        answer = self._in_notebook(code) if self._first or self._earlier or not is_last else self._alone(code)
        if not answer.timed_out:  # such a cell is left out of what is run again: the variables from before it stay
            self._earlier.append(code)
        return self._bounded(answer, time.monotonic() - started)

    def close(self) -> None:
        self._earlier.clear()

    def _alone(self, code: str) -> Result:
        limits = self._limits
        reply = self._post(
            "run_code",
            {
                "code": showing_last_value(code),
                "language": "python",
                "run_timeout": limits.seconds,
                "compile_timeout": limits.seconds,
                "memory_limit_MB": limits.memory_mb,
            },
            seconds=limits.seconds,
        )
        ran = _record(reply.get("run_result"))
        if ran is None:
            raise SandboxUnavailable(f"SandboxFusion ran nothing: {str(reply.get('message'))[:500]}")
        timed_out = ran.get("status") == TOO_LATE
        stderr = _text(ran.get("stderr"))
        is_fine = reply.get("status") == "Success"
        error = None if is_fine else self._late() if timed_out else stderr or f"Exit code {ran.get('return_code')}."
        return Result(
            _text(ran.get("stdout")),
            error,
            timed_out=timed_out,
            out_of_memory="MemoryError" in (error or ""),
            stderr=stderr if is_fine else "",
        )

    def _in_notebook(self, code: str) -> Result:
        limits = self._limits
        cells = [*self._first, *self._earlier, code]
        seconds = limits.seconds * len(cells)
        reply = self._post(
            "run_jupyter",
            {"cells": cells, "cell_timeout": limits.seconds, "total_timeout": seconds, "kernel": "python3"},
            seconds=seconds,
        )
        if (_record(reply.get("driver")) or {}).get("status") == TOO_LATE:
            return Result("", self._late(), timed_out=True)
        done = reply.get("cells")
        last = _record(done[-1]) if isinstance(done, list) and len(done) == len(cells) else None
        if last is None:
            raise SandboxUnavailable(f"SandboxFusion ran no notebook: {str(reply.get('message'))[:500]}")
        errors, displays = last.get("error"), last.get("display")
        told = "\n".join(_told(error) for error in errors) if isinstance(errors, list) else ""
        shown = "".join(_plain(display) for display in displays) if isinstance(displays, list) else ""
        return Result(
            _text(last.get("stdout")) + shown,
            told or None,
            out_of_memory="MemoryError" in told,
            stderr=_text(last.get("stderr")),
        )

    def _late(self) -> str:
        return f"Timed out after {self._limits.seconds:g} seconds."

    def _bounded(self, answer: Result, seconds: float) -> Result:
        most = self._limits.output_chars
        return Result(
            stdout=answer.stdout[:most],
            error=None if answer.error is None else answer.error[-most:],
            timed_out=answer.timed_out,
            out_of_memory=answer.out_of_memory,
            truncated=len(answer.stdout) > most or len(answer.stderr) > most,
            stderr=answer.stderr[:most],
            seconds=seconds,
        )

    def _post(self, path: str, question: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._url}/{path}", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        most = self._limits.file_bytes
        try:
            with bounded_opener().open(request, timeout=seconds + GRACE_SECONDS) as response:
                payload = response.read(most + 1)
            if len(payload) > most:
                raise SandboxUnavailable(f"SandboxFusion answered with more than {most} bytes")
            reply = json.loads(payload)
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise SandboxUnavailable(f"SandboxFusion at {self._url} does not answer as it should: {error}") from error
        if not isinstance(reply, dict):
            raise SandboxUnavailable("SandboxFusion answered with something else than a record")
        is_late = (_record(reply.get("driver")) or {}).get(
            "status"
        ) == TOO_LATE  # a notebook's time-out comes as a failure
        if reply.get("status") == "SandboxError" and not is_late:
            raise SandboxUnavailable(f"SandboxFusion failed: {str(reply.get('message'))[:500]}")
        return reply


def showing_last_value(code: str) -> str:
    """The code with its trailing expression printed as in a notebook, and every line where it was.

    `x = 1; x + 1  # two` -> `x = 1; __import__('sys').displayhook((x + 1))  # two`
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the service will say so
        return code
    if not body or not isinstance(last := body[-1], ast.Expr):
        return code
    lines = [line.encode() for line in code.splitlines(keepends=True)]  # the parser counts columns in bytes
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    end, start = last.end_lineno - 1, last.lineno - 1
    lines[end] = lines[end][: last.end_col_offset] + b"))" + lines[end][last.end_col_offset :]
    lines[start] = (
        lines[start][: last.col_offset] + b"__import__('sys').displayhook((" + lines[start][last.col_offset :]
    )
    return b"".join(lines).decode()


def _record(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _told(error: object) -> str:
    """One error of a notebook, without colours."""
    if not isinstance(error, dict):
        return str(error)
    lines = error.get("traceback")
    short = f"{_text(error.get('ename'))}: {_text(error.get('evalue'))}"
    return ESCAPES.sub("", "\n".join(map(str, lines)) if isinstance(lines, list) and lines else short)


def _plain(display: object) -> str:
    """What a notebook would show of a value, as text."""
    text = (_record(display) or {}).get("text/plain")
    return f"{text}\n" if isinstance(text, str) else ""
