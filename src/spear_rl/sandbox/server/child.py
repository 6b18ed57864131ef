"""A child of the fork server: isolates itself after the fork, then runs code like the cells of a notebook.

Untrusted code can reach and change all of this; nothing outside trusts it. Every page that a child touches is copied,
which is most of a call's cost, so whatever all children share is prepared before the fork.
"""

import ast
import builtins
import contextlib
import errno
import fcntl
import io
import linecache
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, NoReturn, TextIO

from spear_rl.sandbox import protocol
from spear_rl.sandbox.isolation import namespaces
from spear_rl.sandbox.isolation.backends import Isolation
from spear_rl.sandbox.protocol import frame, read_exactly, write_all

RESERVE = 1 << 20
"""Memory kept free for reporting that there is none left."""
REQUESTS, REPLIES = 3, 4
RULESET, MOVING = 100, 200
"""Descriptor numbers beyond those a child uses: for the Landlock ruleset, and while descriptors are renumbered."""
PIPE_BYTES = 16384
WARM_UP = {
    "numpy": "from numpy import *\nlinalg.solve(eye(2), ones(2))",
    "sympy": "from sympy import *\nx = Symbol('x')\n"
    "solve(x**2 - 5*x + 6, x), integrate(x**2, (x, 0, 1)), simplify(sin(x)**2 + cos(x)**2)",
}


class ChildTemplate:
    """What all children share but their descriptors. Turns this process into what a child should start from."""

    def __init__(self, isolation: Isolation, *, hidden_paths: Sequence[str]) -> None:
        self._isolation = isolation
        self._streams = text_stream(1), text_stream(2)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = self._streams  # type: ignore[misc, assignment]
        self._notebook = Notebook(max_chars=isolation.limits.output_chars, hidden_paths=hidden_paths)
        os.environ.clear()
        if isolation.backend == "namespaces":
            os.environ.update(HOME=namespaces.SCRATCH, TMPDIR=namespaces.SCRATCH)
        for name in [name for name in sys.modules if name.partition(".")[0] == "spear_rl"]:
            del sys.modules[name]

    def run(self, requests: int, replies: int, streams: list[int], *, server: int) -> NoReturn:
        """Isolate this forked process and serve requests; never returns into the server's code."""
        try:
            # Opened anew: the flags of a descriptor that children share would be a channel between them.
            null = os.open(os.devnull, os.O_RDONLY)
            _renumber_descriptors([null, *streams, requests, replies], keep=self._isolation.ruleset)
            os.setsid()  # no terminal, its own process group, its own share of a busy processor
            seed_numpy(int.from_bytes(os.urandom(4), "big"))  # `random` reseeds itself after a fork
            self._isolation.confine(server)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                write_all(REPLIES, frame(protocol.BROKEN, f"{type(error).__name__}: {error}".encode()[:2000]))
            os._exit(1)
        try:
            write_all(REPLIES, frame(protocol.READY))
            serve(REQUESTS, REPLIES, self._notebook, self._streams)
        finally:
            os._exit(0)


def warm_up(packages: Sequence[str]) -> None:
    """Do once what every child would otherwise do at its first call: fill the caches of the parser and of sympy."""
    main = sys.modules["__main__"]
    notebook = Notebook(max_chars=1000, hidden_paths=())
    for cell in ("1 / 0", *(WARM_UP[name] for name in packages if name in WARM_UP)):
        with contextlib.redirect_stdout(io.StringIO()):
            notebook.run(cell)
    sys.modules["__main__"] = main


def run_modules(sources: Mapping[str, str]) -> None:
    """Import modules from trusted source; children inherit them."""
    for name, source in sources.items():
        module = sys.modules[name] = ModuleType(name)
        exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)


def new_pipe() -> tuple[int, int]:
    """A small pipe: pages of pipes count against the user, and every open session holds two."""
    reader, writer = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


def new_stream(name: str) -> int:
    """An anonymous file in append mode, for a child's output."""
    if hasattr(os, "memfd_create"):
        out = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(buffering=0) as file:
            out = os.dup(file.fileno())
    fcntl.fcntl(out, fcntl.F_SETFL, fcntl.fcntl(out, fcntl.F_GETFL) | os.O_APPEND)
    return out


def _renumber_descriptors(wanted: list[int], *, keep: int | None) -> None:
    """Make these 0, 1, 2, ... and close all others but `keep`."""
    parked = [os.dup2(descriptor, MOVING + number, inheritable=False) for number, descriptor in enumerate(wanted)]
    for number, descriptor in enumerate(parked):
        os.dup2(descriptor, number, inheritable=False)
    first = len(wanted)
    if keep is not None:
        os.closerange(first, keep)
        first = max(first, keep + 1)
    os.closerange(first, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))


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
            return (
                (protocol.DONE, "")
                if stop.code in (None, 0)
                else (protocol.RAISED, self._shortened(f"SystemExit: {stop.code}"))
            )
        except BaseException as error:
            del reserve
            return protocol.OUT_OF_MEMORY if isinstance(error, MemoryError) else protocol.RAISED, self._traceback(error)
        return protocol.DONE, ""

    def _execute(self, source: str, name: str) -> None:
        lines = io.StringIO(source, newline="").readlines()  # as the parser counts them: U+2028 ends no line
        linecache.cache[name] = (len(source), None, lines, name)
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
        kind, length = protocol.HEADER.unpack(read_exactly(requests, protocol.HEADER.size))
        payload = read_exactly(requests, length)
        if kind == protocol.SEED:
            random.seed(int(payload))
            seed_numpy(int(payload) % (1 << 32))
        elif kind == protocol.CELL:
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
