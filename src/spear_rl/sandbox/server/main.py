"""The fork-server: a small program without threads that has the packages loaded and forks a child for every episode.

It is exec'ed with an empty environment, so that neither it nor a child ever held anything of the user's.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from spear_rl.sandbox.isolation import backends as isolation
from spear_rl.sandbox.isolation import kernel, landlock, namespaces
from spear_rl.sandbox.isolation.backends import ISOLATING, UNSAFE, Isolation
from spear_rl.sandbox.isolation.readable import preloaded
from spear_rl.sandbox.limits import Limits
from spear_rl.sandbox.protocol import (
    ANSWER,
    COMMAND,
    END,
    FORGET,
    READY,
    SIGNAL,
    TAKE,
    frame,
    is_readable,
    read_exactly,
)
from spear_rl.sandbox.server.child import RULESET, Stage, new_pipe, new_stream, rehearse, run_modules

WATCH_SECONDS, BURIAL_SECONDS = 0.5, 0.02


class Server:
    """Forks children, signals them and buries them, as the interpreter commands."""

    def __init__(self, control: socket.socket, stage: Stage, *, can_multiply: bool, spares: int) -> None:
        self._control, self._stage, self._can_multiply, self._num_spares = control, stage, can_multiply, spares
        self._pids: dict[int, int] = {}
        self._spares: list[tuple[int, list[int]]] = []
        self._dying: list[int] = []
        self._last = 0
        self._parent = os.getppid()

    def serve(self) -> None:
        """Until the interpreter closes its end or dies (someone it forked may keep the end open)."""
        try:
            while os.getppid() == self._parent:
                patience = 0 if self._wants_spare() else BURIAL_SECONDS if self._dying else WATCH_SECONDS
                has_command = is_readable(self._control.fileno(), patience)
                self._dying = [pid for pid in self._dying if os.waitpid(pid, os.WNOHANG) == (0, 0)]
                if has_command:
                    self._obey(*COMMAND.unpack(read_exactly(self._control.fileno(), COMMAND.size)))
                elif self._wants_spare():
                    try:
                        self._spares.append(self._forked())
                    except OSError:  # no memory or no process left: from now on only what is asked for
                        self._num_spares = 0
        except (EOFError, OSError):
            pass
        for child in list(self._pids):
            self._signal(child, signal.SIGKILL)
        for pid in [*self._pids.values(), *self._dying]:
            os.waitpid(pid, 0)

    def _wants_spare(self) -> bool:
        return len(self._spares) < self._num_spares

    def _obey(self, command: bytes, child: int, number: int) -> None:
        if command == TAKE:
            try:
                child, theirs = self._spares.pop(0) if self._spares else self._forked()
            except OSError as error:
                self._control.sendall(ANSWER.pack(0, error.errno or 0))
                return
            socket.send_fds(self._control, [ANSWER.pack(child, 0)], theirs)
            _close(theirs)
        elif command == SIGNAL and child in self._pids:
            self._signal(child, number)
        elif command == FORGET and child in self._pids:
            self._signal(child, signal.SIGKILL)
            self._dying.append(self._pids.pop(child))
        elif command == END:
            self._control.sendall(ANSWER.pack(child, self._end(child)))

    def _forked(self) -> tuple[int, list[int]]:
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
            self._pids, self._spares, self._dying, self._last = {}, [], [], 0  # what a child need not know of others
            self._stage.play(code_in, reply_out, streams, server=server)
        _close([code_in, reply_out])
        self._last += 1
        self._pids[self._last] = pid
        return self._last, [code_out, reply_in, *streams]

    def _signal(self, child: int, number: int) -> None:
        pid = self._pids[child]
        os.kill(pid, number)
        if self._can_multiply:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def _end(self, child: int) -> int:
        """Kill and bury a child; its wait status."""
        if child not in self._pids:
            return 0
        self._signal(child, signal.SIGKILL)
        return os.waitpid(self._pids.pop(child), 0)[1]


def main(settings: dict[str, Any], control: socket.socket) -> None:
    """Decide how to isolate, load the packages, say so, serve."""
    limits, oom = Limits(**settings["limits"]), isolation.prefer_for_oom_kill()
    standard: list[str] = settings["standard"]
    uid = isolation.spare_uid() if settings["backend"] != UNSAFE else None
    backend, reasons = _chosen(settings["backend"], uid)
    if backend is None:
        _say(control, {"reasons": reasons})
        return
    packages, missing = preloaded(settings["packages"])
    run_modules(settings["modules"])
    sys.path[:] = [path for path in standard if os.path.exists(path)]
    sys.path_importer_cache.clear()
    rehearse(settings["packages"])
    if backend != UNSAFE:
        kernel.privatise_shared_memory()
    ruleset, reads_as_root, base_bytes = None, False, _address_space()
    if backend == "landlock":
        rules = landlock.ruleset(isolation.shown_rules(standard, packages, in_jail=False))
        ruleset = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, RULESET)
        reads_as_root = uid is not None and isolation.needs_root_to_read([*sys.path, *packages], uid)
    elif backend == "namespaces":
        namespaces.enter(standard, packages, uid=uid)
        reads_as_root = uid is not None and isolation.needs_root_to_read([*sys.path, *packages], None)
    number = landlock.version() if backend != UNSAFE else 0
    in_jail = backend == "namespaces"
    shown = isolation.shown_rules(sys.path, packages, in_jail=True) if in_jail and number else ()
    calls = b"" if backend == UNSAFE else isolation.filter_for(backend)
    held = Isolation(backend, limits, shown, ruleset, uid, reads_as_root, base_bytes, calls)
    user = "no root" if uid is None else f"root becomes user {uid}" + (", reads as root" if reads_as_root else "")
    about = {"backend": backend, "landlock": number, "user": user, "oom_score_adj": oom}
    _say(control, about | {"missing": missing, "reasons": reasons})
    prefixes = {os.path.dirname(path) for path in [*standard, *packages]} - {"/"}
    spares = int(settings["spares"])
    settings.clear()  # a child can read this memory, and need not know the trainer's import path
    stage = Stage(held, hidden_paths=sorted({*prefixes, *standard}))
    gc.collect()
    gc.freeze()
    Server(control, stage, can_multiply=backend == UNSAFE, spares=spares).serve()


def _chosen(asked: str, uid: int | None) -> tuple[str | None, dict[str, str]]:
    """(the backend to use, why others cannot be)."""
    if asked == UNSAFE:
        return UNSAFE, {}
    reasons: dict[str, str] = {}
    for backend in ISOLATING if asked == "auto" else (asked,):
        why = isolation.unusable(backend, uid)
        if why is None:
            return backend, reasons
        reasons[backend] = why
    return None, reasons


def _say(control: socket.socket, what: dict[str, Any]) -> None:
    control.sendall(frame(READY, json.dumps(what).encode()))


def _address_space() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 1 << 30


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
