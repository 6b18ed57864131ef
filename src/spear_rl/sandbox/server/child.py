"""A child of the fork server, from the fork to its end. Whatever all children share is prepared before the fork.

Every page that a child touches is copied, which is most of a call's cost: it does as little as possible.
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
from spear_rl.sandbox.server.cell import Notebook, seed_numpy, serve, text_stream

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
                write_all(REPLIES, frame(BROKEN, f"{type(error).__name__}: {error}".encode()[:2000]))
            os._exit(1)
        try:
            write_all(REPLIES, frame(READY))
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
