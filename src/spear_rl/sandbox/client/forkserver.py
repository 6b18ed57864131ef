"""The interpreter's side of the fork-server: starting it, asking it for children, having them signalled and buried."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spear_rl.sandbox.isolation import cgroup
from spear_rl.sandbox.isolation.backends import UNSAFE
from spear_rl.sandbox.limits import MIB, Limits
from spear_rl.sandbox.protocol import (
    ANSWER,
    COMMAND,
    END,
    FORGET,
    HEADER,
    NUM_DESCRIPTORS,
    READY,
    SIGNAL,
    TAKE,
    frame,
    is_readable,
    read_exactly,
)  # fmt: skip
from spear_rl.sandbox.unavailable import SandboxUnavailable

HOME = Path(__file__).parents[2]
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
PATIENCE = 5.0
SERVER_BYTES = 1 << 30
"""Room for the server itself with its packages in the bound on all memory."""

# One thread: a process with more cannot be forked safely, and a child may not start any. The fixed hash seed makes the
# order of a set, and with it what sympy prints, the same everywhere.
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
}

# Imports this package alone from where it lies; the search path serves to load the packages and is then cut down.
BOOT = """
import json, socket, sys
from importlib.util import module_from_spec, spec_from_file_location
control = socket.socket(fileno=int(sys.argv[1]))
size = int.from_bytes(control.recv(5, socket.MSG_WAITALL)[1:], "big")
settings = json.loads(control.recv(size, socket.MSG_WAITALL))
settings["standard"] = list(sys.path)
del sys.argv[1:], sys.orig_argv[1:]
sys.path += settings["path"]
spec = spec_from_file_location("spear_rl", settings["home"] + "/__init__.py",
                               submodule_search_locations=[settings["home"]])
package = sys.modules["spear_rl"] = module_from_spec(spec)
spec.loader.exec_module(package)
from spear_rl.sandbox.server.main import main
main(settings, control)
"""

log = logging.getLogger("spear_rl.sandbox")


class ServerGoneError(Exception):
    """The fork-server died; another can be started."""


class NoProcessError(SandboxUnavailable):
    """The machine or this process has no room for another child: too many processes, open files, or no memory."""


class ForkServer:
    """A running server. All methods may be called from any thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        backend: str,
        packages: Sequence[str],
        modules: Mapping[str, str],
        spares: int,
        max_children: int = 4096,
    ) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        settings = {
            "limits": asdict(limits), "backend": backend, "packages": list(packages), "spares": spares,
            "modules": dict(modules), "path": [path for path in sys.path if os.path.isdir(path)], "home": str(HOME),
        }  # fmt: skip
        self._errors: Any = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-c", BOOT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise SandboxUnavailable(f"no interpreter can be started: {error}") from error
        finally:
            theirs.close()
        room = limits.memory_mb * MIB + 3 * limits.file_bytes
        bounds = cgroup.limits_for(memory_bytes=SERVER_BYTES + max_children * room, max_processes=max_children + 16)
        self._group = cgroup.group_of(self._process.pid, bounds)  # it waits for its settings meanwhile
        self.about = self._introduction(settings) | {"cgroup": self._group.about}
        if "backend" not in self.about:
            self.close()
            raise SandboxUnavailable(_refusal(self.about["reasons"]))
        for missing in self.about["missing"]:
            log.warning("the sandbox runs without %s", missing)

    @property
    def backend(self) -> str:
        return str(self.about["backend"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self) -> tuple[int, list[int]]:
        """(number of a fresh child, descriptors: code, reply, stdout, stderr)."""
        with self._lock:
            self._send(TAKE, 0, 0)
            self._await()
            try:
                flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                answer, descriptors, _, _ = socket.recv_fds(self._control, ANSWER.size, NUM_DESCRIPTORS, flags)
            except OSError as error:
                raise ServerGoneError(str(error)) from error
            if len(answer) != ANSWER.size:
                raise ServerGoneError("it closed its end")
        child, number = ANSWER.unpack(answer)
        if len(descriptors) != NUM_DESCRIPTORS:
            for descriptor in descriptors:
                os.close(descriptor)
            self.forget(child)
            why = os.strerror(number) if number else "this process has too many open files"
            raise NoProcessError(f"no new interpreter process: {why}")
        return child, descriptors

    def signal(self, child: int, number: int) -> None:
        with self._lock, suppress(ServerGoneError):
            self._send(SIGNAL, child, number)

    def end(self, child: int) -> int:
        """Make sure that a child is gone; its wait status (0 if the server is gone too, and with it the child)."""
        with self._lock, suppress(ServerGoneError):
            self._send(END, child, 0)
            self._await()
            with suppress(EOFError, OSError):
                return int(ANSWER.unpack(read_exactly(self._control.fileno(), ANSWER.size))[1])
        return 0

    def forget(self, child: int) -> None:
        """Have a child killed, without waiting for it."""
        with self._lock, suppress(ServerGoneError):
            self._send(FORGET, child, 0)

    def close(self) -> None:
        """End the server and all its children."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._control.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._group.remove()
        self._errors.close()

    def _send(self, command: bytes, child: int, number: int) -> None:
        try:
            self._control.sendall(COMMAND.pack(command, child, number))
        except OSError as error:
            raise ServerGoneError(str(error)) from error

    def _await(self) -> None:
        if not is_readable(self._control.fileno(), ANSWER_SECONDS):
            self._process.kill()
            raise ServerGoneError("it does not answer")

    def _introduction(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What the server says of itself once it has its settings and is ready."""
        try:
            self._control.sendall(frame(READY, json.dumps(settings).encode()))
            if not is_readable(self._control.fileno(), START_SECONDS):
                raise EOFError
            _, length = HEADER.unpack(read_exactly(self._control.fileno(), HEADER.size))
            about: dict[str, Any] = json.loads(read_exactly(self._control.fileno(), length))
            return about
        except (EOFError, OSError) as error:
            self._process.kill()
            self._process.wait()
            self._group.remove()
            self._control.close()
            self._errors.seek(0)
            text = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"the interpreter's server did not start: {text or error}") from error


def _refusal(reasons: dict[str, str]) -> str:
    why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    return (
        f"this machine cannot isolate untrusted code ({why}). Run where it can, use backend='sandbox-fusion', or say "
        f"backend={UNSAFE!r} to run it with nothing but a time and a memory limit"
    )
