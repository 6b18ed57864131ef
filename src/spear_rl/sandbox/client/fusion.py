"""Runs code at a SandboxFusion service over HTTP. The service isolates it; this module bounds what comes back.

One-off code goes to /run_code. The service keeps no state, so an episode sends its earlier cells again to /run_jupyter,
where they run in a fresh notebook, and reads the result of the last one.
"""

import ast
import json
import re
import time
import urllib.request
from dataclasses import replace
from http.client import HTTPException
from typing import Any

from spear_rl.io.http import bounded_opener
from spear_rl.sandbox.types import Limits, Result, SandboxUnavailable

GRACE_SECONDS = 30.0
"""For the transfer and a queue at the service, on top of the code's own time limit."""
SEEDING = """
import random as _random
_random.seed({seed})
try:
    import numpy as _numpy
    _numpy.random.seed({seed})
except ImportError:
    pass
"""
TIMED_OUT = "TimeLimitExceeded"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class FusionEpisode:
    """One episode at a service, with the interface of `Episode`."""

    def __init__(self, url: str, limits: Limits, *, seed: int | None) -> None:
        self._url, self._limits = url.rstrip("/"), limits
        self._seeding = [] if seed is None else [SEEDING.format(seed=seed % (1 << 32))]
        self._earlier: list[str] = []
        self.is_alive = True

    def run(self, code: str, *, is_last: bool) -> Result:
        code = code.encode("utf-8", "replace").decode()
        started, max_chars = time.monotonic(), self._limits.output_chars
        is_one_off = is_last and not self._seeding and not self._earlier
        result = self._run_code(code) if is_one_off else self._run_notebook(code)
        if not result.timed_out:  # a cell that timed out is not sent again: the variables before it stay
            self._earlier.append(code)
        return replace(
            result,
            stdout=result.stdout[:max_chars],
            error=None if result.error is None else result.error[-max_chars:],
            truncated=len(result.stdout) > max_chars or len(result.stderr) > max_chars,
            stderr=result.stderr[:max_chars],
            seconds=time.monotonic() - started,
        )

    def close(self) -> None:
        self._earlier.clear()

    def _run_code(self, code: str) -> Result:
        limits = self._limits
        request = {"code": showing_last_value(code), "language": "python", "memory_limit_MB": limits.memory_mb}
        request |= {"run_timeout": limits.seconds, "compile_timeout": limits.seconds}
        reply = self._post("run_code", request, seconds=limits.seconds)
        ran = reply.get("run_result")
        if not isinstance(ran, dict):
            raise SandboxUnavailable(f"SandboxFusion ran nothing: {str(reply.get('message'))[:500]}")
        stdout, stderr, timed_out = _text(ran.get("stdout")), _text(ran.get("stderr")), ran.get("status") == TIMED_OUT
        if reply.get("status") == "Success":
            return Result(stdout, stderr=stderr, timed_out=timed_out)
        if timed_out:
            return self._timed_out(stdout)
        error = stderr or f"Exit code {ran.get('return_code')}."
        return Result(stdout, error, out_of_memory="MemoryError" in error)

    def _run_notebook(self, code: str) -> Result:
        cells = [*self._seeding, *self._earlier, code]
        seconds = self._limits.seconds * len(cells)
        request = {"cells": cells, "cell_timeout": self._limits.seconds, "total_timeout": seconds, "kernel": "python3"}
        reply = self._post("run_jupyter", request, seconds=seconds)
        if _is_notebook_timeout(reply):
            return self._timed_out("")
        done = reply.get("cells")
        last = done[-1] if isinstance(done, list) and len(done) == len(cells) else None
        if not isinstance(last, dict):
            raise SandboxUnavailable(f"SandboxFusion ran no notebook: {str(reply.get('message'))[:500]}")
        errors, displays = last.get("error"), last.get("display")
        error = "\n".join(map(_error_text, errors)) if isinstance(errors, list) else ""
        shown = "".join(map(_display_text, displays)) if isinstance(displays, list) else ""
        return Result(
            _text(last.get("stdout")) + shown,
            error or None,
            out_of_memory="MemoryError" in error,
            stderr=_text(last.get("stderr")),
        )

    def _timed_out(self, stdout: str) -> Result:
        return Result(stdout, f"Timed out after {self._limits.seconds:g} seconds.", timed_out=True)

    def _post(self, path: str, content: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        url, max_bytes = f"{self._url}/{path}", self._limits.file_bytes
        request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
        try:
            with bounded_opener().open(request, timeout=seconds + GRACE_SECONDS) as response:
                payload = response.read(max_bytes + 1)
            if len(payload) > max_bytes:
                raise SandboxUnavailable(f"SandboxFusion answered with more than {max_bytes} bytes")
            reply = json.loads(payload)
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise SandboxUnavailable(f"SandboxFusion at {self._url} does not answer as it should: {error}") from error
        if not isinstance(reply, dict):
            raise SandboxUnavailable("SandboxFusion answered with something else than a JSON object")
        if reply.get("status") == "SandboxError" and not _is_notebook_timeout(reply):
            raise SandboxUnavailable(f"SandboxFusion failed: {str(reply.get('message'))[:500]}")
        return reply


def showing_last_value(code: str) -> str:
    """The code with its trailing expression printed as in a notebook; line numbers stay the same.

    `x = 1; x + 1  # two` -> `x = 1; __import__('sys').displayhook((x + 1))  # two`
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the service will report it
        return code
    if not body or not isinstance(last := body[-1], ast.Expr):
        return code
    # As bytes: the parser counts columns in bytes, and for it U+2028 and the like end no line.
    lines = code.encode().splitlines(keepends=True)
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    for number, column, inserted in (
        (last.end_lineno - 1, last.end_col_offset, b"))"),
        (last.lineno - 1, last.col_offset, b"__import__('sys').displayhook(("),
    ):
        lines[number] = lines[number][:column] + inserted + lines[number][column:]
    return b"".join(lines).decode()


def _is_notebook_timeout(reply: dict[str, Any]) -> bool:
    """A notebook's time-out is reported as a failure of its driver."""
    driver = reply.get("driver")
    return isinstance(driver, dict) and driver.get("status") == TIMED_OUT


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _error_text(error: object) -> str:
    """One error of a notebook, without colours."""
    if not isinstance(error, dict):
        return str(error)
    lines = error.get("traceback")
    short = f"{_text(error.get('ename'))}: {_text(error.get('evalue'))}"
    return ESCAPES.sub("", "\n".join(map(str, lines)) if isinstance(lines, list) and lines else short)


def _display_text(display: object) -> str:
    text = display.get("text/plain") if isinstance(display, dict) else None
    return f"{text}\n" if isinstance(text, str) else ""
