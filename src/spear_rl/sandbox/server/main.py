"""The fork server: a single-threaded program that has the packages loaded and forks a child per episode.

It is started by exec with an empty environment, so that neither it nor a child ever holds anything of the user's.
"""

import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from spear_rl.sandbox import protocol
from spear_rl.sandbox.isolation import backends, kernel, landlock, namespaces
from spear_rl.sandbox.isolation.backends import ISOLATING, UNSAFE, Isolation
from spear_rl.sandbox.server.child import RULESET, ChildTemplate, new_pipe, new_stream, run_modules, warm_up
from spear_rl.sandbox.types import Limits

PARENT_CHECK_SECONDS, REAP_SECONDS = 0.5, 0.02

STANDARD = (
    *("array", "ast", "base64", "bisect", "bz2", "calendar", "cmath", "collections", "contextlib", "copy", "csv"),
    *("ctypes", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq"),
    *("inspect", "io", "itertools", "json", "linecache", "lzma", "math", "numbers", "operator", "pathlib", "pickle"),
    *("pprint", "queue", "random", "re", "secrets", "shutil", "signal", "sqlite3", "statistics", "string", "struct"),
    *("subprocess", "tempfile", "textwrap", "threading", "time", "timeit", "traceback", "typing", "unicodedata"),
    *("unittest", "uuid", "warnings", "zlib", "zoneinfo"),
)
"""Imported beforehand: for speed, and because a shared library cannot be opened later."""

LAZY = {"numpy": ("numpy.random", "numpy.linalg", "numpy.fft", "numpy.polynomial", "numpy.ma")}
"""Submodules that every child would otherwise import at first use."""


class Server:
    """Forks, signals and reaps children at the interpreter's command."""

    def __init__(self, control: socket.socket, template: ChildTemplate, *, can_fork: bool, spares: int) -> None:
        self._control, self._template, self._can_fork, self._num_spares = control, template, can_fork, spares
        self._pids: dict[int, int] = {}
        self._spares: list[tuple[int, list[int]]] = []
        self._killed: list[int] = []
        self._last = 0
        self._parent = os.getppid()

    def serve(self) -> None:
        """Run until the interpreter closes the connection or dies (a process it forked may keep the socket open)."""
        try:
            while os.getppid() == self._parent:
                wants_spare = len(self._spares) < self._num_spares
                timeout = 0 if wants_spare else REAP_SECONDS if self._killed else PARENT_CHECK_SECONDS
                has_command = protocol.is_readable(self._control.fileno(), timeout)
                self._killed = [pid for pid in self._killed if os.waitpid(pid, os.WNOHANG) == (0, 0)]
                if has_command:
                    command = protocol.read_exactly(self._control.fileno(), protocol.COMMAND.size)
                    self._handle(*protocol.COMMAND.unpack(command))
                elif wants_spare:
                    try:
                        self._spares.append(self._fork())
                    except OSError:  # no memory or no process left: children are then forked on demand only
                        self._num_spares = 0
        except (EOFError, OSError):
            pass
        for child in list(self._pids):
            self._signal(child, signal.SIGKILL)
        for pid in [*self._pids.values(), *self._killed]:
            os.waitpid(pid, 0)

    def _handle(self, command: bytes, child: int, number: int) -> None:
        if command == protocol.TAKE:
            try:
                child, descriptors = self._spares.pop(0) if self._spares else self._fork()
            except OSError as error:
                self._control.sendall(protocol.ANSWER.pack(0, error.errno or 0))
                return
            socket.send_fds(self._control, [protocol.ANSWER.pack(child, 0)], descriptors)
            _close(descriptors)
        elif command == protocol.SIGNAL and child in self._pids:
            self._signal(child, number)
        elif command == protocol.FORGET and child in self._pids:
            self._signal(child, signal.SIGKILL)
            self._killed.append(self._pids.pop(child))
        elif command == protocol.END:
            status = 0
            if child in self._pids:
                self._signal(child, signal.SIGKILL)
                status = os.waitpid(self._pids.pop(child), 0)[1]
            self._control.sendall(protocol.ANSWER.pack(child, status))

    def _fork(self) -> tuple[int, list[int]]:
        """(number, the interpreter's four descriptors) of a new child."""
        code_in, code_out = new_pipe()
        reply_in, reply_out = new_pipe()
        streams = [new_stream("stdout"), new_stream("stderr")]
        try:
            server, pid = os.getpid(), os.fork()
        except OSError:
            _close([code_in, code_out, reply_in, reply_out, *streams])
            raise
        if pid == 0:
            self._pids, self._spares, self._killed, self._last = {}, [], [], 0  # a child must not know of others
            self._template.run(code_in, reply_out, streams, server=server)
        _close([code_in, reply_out])
        self._last += 1
        self._pids[self._last] = pid
        return self._last, [code_out, reply_in, *streams]

    def _signal(self, child: int, number: int) -> None:
        pid = self._pids[child]
        os.kill(pid, number)
        if self._can_fork:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)


def main(settings: dict[str, Any], control: socket.socket) -> None:
    """Choose a backend, load the packages, report both, serve."""
    oom_score = backends.prefer_for_oom_kill()
    uid = backends.unused_uid() if settings["backend"] != UNSAFE else None
    backend, reasons = _chosen_backend(settings["backend"], uid)
    if backend is None:
        control.sendall(protocol.frame(protocol.READY, json.dumps({"reasons": reasons}).encode()))
        return
    standard: list[str] = settings["standard"]
    packages, missing = _preloaded(settings["packages"])
    run_modules(settings["modules"])
    sys.path[:] = [path for path in standard if os.path.exists(path)]
    sys.path_importer_cache.clear()
    warm_up(settings["packages"])
    isolation = _prepared_isolation(backend, Limits(**settings["limits"]), standard, packages, uid)
    user = "no root" if uid is None else f"root becomes user {uid}" + ", reads as root" * isolation.reads_as_root
    version = landlock.version() if backend != UNSAFE else 0
    about = {"backend": backend, "landlock": version, "user": user, "oom_score_adj": oom_score}
    about |= {"missing": missing, "reasons": reasons}
    control.sendall(protocol.frame(protocol.READY, json.dumps(about).encode()))
    prefixes = {os.path.dirname(path) for path in [*standard, *packages]} - {"/"}
    spares = int(settings["spares"])
    settings.clear()  # a child can read this memory and must not see the trainer's import path
    template = ChildTemplate(isolation, hidden_paths=sorted({*prefixes, *standard}))
    gc.collect()
    gc.freeze()
    Server(control, template, can_fork=backend == UNSAFE, spares=spares).serve()


def _preloaded(packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Import the packages: (their directories and files, packages that are not installed)."""
    missing = []
    for name in STANDARD:
        with contextlib.suppress(ImportError):  # a Python built without it
            import_module(name)
    standard = set(sys.modules)
    for name in packages:
        try:
            for each in (name, *LAZY.get(name, ())):
                import_module(each)
        except ModuleNotFoundError as error:
            missing.append(f"{name} ({error})")
    loaded = {name.partition(".")[0] for name in set(sys.modules) - standard} - sys.stdlib_module_names
    return sorted({path for name in loaded for path in _module_paths(name)}), missing


def _module_paths(name: str) -> Iterator[str]:
    """The location of a loaded top-level module, and of the shared libraries that wheels install beside it."""
    module = sys.modules.get(name)
    file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
    for path in [*folders] if folders is not None else [file] if file else []:
        if os.path.exists(path):
            yield os.path.abspath(path)
            libraries = Path(path).parent / f"{name}.libs"
            if libraries.is_dir():
                yield os.path.abspath(libraries)


def _prepared_isolation(
    backend: str, limits: Limits, standard: list[str], packages: list[str], uid: int | None
) -> Isolation:
    """Isolate this process as far as the children share it; the rest is for each child to do."""
    if backend != UNSAFE:
        kernel.privatise_shared_memory()
    ruleset, reads_as_root, base_bytes = None, False, _address_space()
    if backend == "landlock":
        rules = landlock.ruleset(backends.landlock_rules(standard, packages, in_jail=False))
        ruleset = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, RULESET)
        reads_as_root = uid is not None and backends.needs_root_to_read([*sys.path, *packages], uid)
    elif backend == "namespaces":
        namespaces.enter(standard, packages, uid=uid)
        reads_as_root = uid is not None and backends.needs_root_to_read([*sys.path, *packages], None)
    has_rules = backend == "namespaces" and landlock.version()
    jail_rules = backends.landlock_rules(sys.path, packages, in_jail=True) if has_rules else ()
    calls = b"" if backend == UNSAFE else backends.filter_for(backend)
    return Isolation(backend, limits, jail_rules, ruleset, uid, reads_as_root, base_bytes, calls)


def _chosen_backend(requested: str, uid: int | None) -> tuple[str | None, dict[str, str]]:
    """(the backend to use, why stronger ones do not work)."""
    if requested == UNSAFE:
        return UNSAFE, {}
    reasons: dict[str, str] = {}
    for backend in ISOLATING if requested == "auto" else (requested,):
        why = backends.why_unusable(backend, uid)
        if why is None:
            return backend, reasons
        reasons[backend] = why
    return None, reasons


def _address_space() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 1 << 30


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
