"""A child of the fork-server, from the fork to its end. What can be made ready for all is made before the fork.

Every page a child touches is copied for it alone, which is most of what a call costs: it does as little as it can.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from spear_rl.sandbox.isolation import namespaces
from spear_rl.sandbox.isolation.backends import Isolation
from spear_rl.sandbox.protocol import BROKEN, READY, frame, write_all
from spear_rl.sandbox.server.cell import Notebook, freshen_randomness, serve, text_stream

REQUESTS, REPLIES = 3, 4
RULESET, MOVING = 100, 200
"""Where descriptors are kept, and parked while they are renumbered: beyond what a child uses."""
PIPE_BYTES = 16384
REHEARSAL = {
    "numpy": "from numpy import *\nlinalg.solve(eye(2), ones(2))",
    "sympy": "from sympy import *\nx = Symbol('x')\n"
    "solve(x**2 - 5*x + 6, x), integrate(x**2, (x, 0, 1)), simplify(sin(x)**2 + cos(x)**2)",
}


class Stage:
    """All that a child needs but its descriptors. From here on this process looks as a child should find it."""

    def __init__(self, held: Isolation, *, hidden_paths: Sequence[str]) -> None:
        self._held = held
        self._texts = text_stream(1), text_stream(2)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = self._texts  # type: ignore[misc, assignment]
        self._notebook = Notebook(max_chars=held.limits.output_chars, hidden_paths=hidden_paths)
        os.environ.clear()
        if held.backend == "namespaces":
            os.environ.update(HOME=namespaces.SCRATCH, TMPDIR=namespaces.SCRATCH)
        for name in [name for name in sys.modules if name.partition(".")[0] == "spear_rl"]:
            del sys.modules[name]

    def play(self, requests: int, replies: int, streams: list[int], *, server: int) -> NoReturn:
        """The whole life of a child; it never returns into the server's code."""
        try:
            # Opened anew: the flags of a descriptor that children share would be a channel between them.
            null = os.open(os.devnull, os.O_RDONLY)
            _take_descriptors([null, *streams, requests, replies], keep=self._held.ruleset)
            os.setsid()  # no terminal, a process group of its own, and its own share of a busy processor
            freshen_randomness()
            self._held.confine(server)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                write_all(REPLIES, frame(BROKEN, f"{type(error).__name__}: {error}".encode()[:2000]))
            os._exit(1)
        try:
            write_all(REPLIES, frame(READY))
            serve(REQUESTS, REPLIES, self._notebook, self._texts)
        finally:
            os._exit(0)


def rehearse(packages: Sequence[str]) -> None:
    """Do once what every child would otherwise do anew at its first call: the parser's tables, sympy's caches."""
    main = sys.modules["__main__"]
    notebook = Notebook(max_chars=1000, hidden_paths=())
    for cell in ("1 / 0", *(REHEARSAL[name] for name in packages if name in REHEARSAL)):
        with contextlib.redirect_stdout(io.StringIO()):
            notebook.run(cell)
    sys.modules["__main__"] = main


def run_modules(sources: Mapping[str, str]) -> None:
    """Make modules of trusted source, which the children find loaded."""
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
    """A file without a name, appended to, for what a child prints."""
    if hasattr(os, "memfd_create"):
        out = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(buffering=0) as file:
            out = os.dup(file.fileno())
    fcntl.fcntl(out, fcntl.F_SETFL, fcntl.fcntl(out, fcntl.F_GETFL) | os.O_APPEND)
    return out


def _take_descriptors(wanted: list[int], *, keep: int | None) -> None:
    """Have these as 0, 1, 2, ... and nothing else open but `keep`."""
    parked = [os.dup2(n, MOVING + place, inheritable=False) for place, n in enumerate(wanted)]
    for place, n in enumerate(parked):
        os.dup2(n, place, inheritable=False)
    first = len(wanted)
    if keep is not None:
        os.closerange(first, keep)
        first = max(first, keep + 1)
    os.closerange(first, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))
