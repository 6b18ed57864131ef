"""Inside the sandbox: runs code in one namespace, like the cells of a notebook.

The code can reach and change all of this; nothing outside trusts it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import errno
import io
import linecache
import random
import signal
import sys
import traceback
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any, TextIO

from spear_rl.sandbox.protocol import CELL, DONE, HEADER, OUT_OF_MEMORY, RAISED, SEED, frame, read_exactly, write_all

RESERVE = 1 << 20
"""Memory kept free for reporting that there is none left."""


class Notebook:
    """The state of one episode."""

    def __init__(self, *, max_chars: int, hidden_paths: Sequence[str]) -> None:
        self._max_chars, self._num_cells = max_chars, 0
        self._hidden = sorted(hidden_paths, key=len, reverse=True)
        self._main = sys.modules["__main__"] = ModuleType("__main__")
        self._main.__dict__["__builtins__"] = builtins
        for name in ("exit", "quit"):
            setattr(builtins, name, sys.exit)

    def run(self, source: str) -> tuple[bytes, str]:
        """(how it ended, error text)."""
        self._num_cells += 1
        reserve = bytearray(RESERVE)
        try:
            self._execute(source, f"<cell {self._num_cells}>")
        except SystemExit as stop:
            return (DONE, "") if stop.code in (None, 0) else (RAISED, self._shortened(f"SystemExit: {stop.code}"))
        except BaseException as error:
            del reserve
            return OUT_OF_MEMORY if isinstance(error, MemoryError) else RAISED, self._traceback(error)
        return DONE, ""

    def _execute(self, source: str, name: str) -> None:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source, name)
        shown: CodeType | None = None
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body.pop()
            shown = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        exec(compile(tree, name, "exec", dont_inherit=True), self._main.__dict__)
        if shown is not None:
            value = eval(shown, self._main.__dict__)
            if value is not None:
                self._main.__dict__["_"] = value
                print(repr(value))

    def _traceback(self, error: BaseException) -> str:
        """A traceback of the code's own lines."""
        try:
            summary = traceback.TracebackException.from_exception(error)
            _keep_own_frames(summary, set())
            text = "".join(summary.format())
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                text += "(too much output, or too large a file)\n"
            traceback.clear_frames(error.__traceback__)
        except BaseException:  # an exception's methods are untrusted, and there may be no memory
            text = type(error).__name__
        return self._shortened(text)

    def _shortened(self, text: str) -> str:
        """The text without the host's paths and within the limit; the end of a traceback says most."""
        for path in self._hidden:
            text = text.replace(path, "<python>")
        if len(text) > self._max_chars:
            tail = self._max_chars * 2 // 3
            text = text[: self._max_chars - tail - 5] + "\n...\n" + text[len(text) - tail :]
        return text[-self._max_chars :]


def text_stream(descriptor: int) -> TextIO:
    """Line-buffered, so that output before a time-out is kept."""
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "replace", line_buffering=True)


def serve(requests: int, replies: int, notebook: Notebook, streams: tuple[TextIO, TextIO]) -> None:
    broken = []  # kept alive: a discarded stream would write its buffer
    while True:
        kind, length = HEADER.unpack(read_exactly(requests, HEADER.size))
        payload = read_exactly(requests, length)
        if kind == SEED:
            random.seed(int(payload))
            seed_numpy(int(payload) % (1 << 32))
        elif kind == CELL:
            sys.stdout, sys.stderr = streams
            ending, text = notebook.run(payload.decode("utf-8", "surrogatepass"))
            if sys.stdout is not streams[0]:
                with contextlib.suppress(BaseException):
                    sys.stdout.flush()
            try:
                for stream in streams:
                    stream.flush()
            except (OSError, ValueError):  # full or closed
                broken.append(streams)
                streams = text_stream(1), text_stream(2)
            # A timer that the code left running must not fire between two cells.
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)
            write_all(replies, frame(ending, text.encode("utf-8", "replace")))


def seed_numpy(seed: int) -> None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _keep_own_frames(summary: traceback.TracebackException | None, seen: set[int]) -> None:
    if summary is None or id(summary) in seen:
        return
    seen.add(id(summary))
    own = [frame for frame in summary.stack if frame.filename.startswith("<cell ")]
    summary.stack = traceback.StackSummary.from_list(own)
    for other in (summary.__cause__, summary.__context__, *(getattr(summary, "exceptions", None) or ())):
        _keep_own_frames(other, seen)
