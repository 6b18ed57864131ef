"""The fork server as the interpreter sees it: starts it, asks it for children, has them signalled and reaped."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spear_rl.sandbox import protocol
from spear_rl.sandbox.isolation import cgroup
from spear_rl.sandbox.isolation.backends import UNSAFE
from spear_rl.sandbox.types import MIB, Limits, SandboxUnavailable

PACKAGE = Path(__file__).parents[2]
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
CLOSE_SECONDS = 5.0
SERVER_BYTES = 1 << 30
"""The server's own share of the cgroup's memory limit."""

# One thread: a process with more cannot be forked safely, and a child may not start any. The fixed hash seed makes the
# order of sets, and so the output of sympy, the same everywhere.
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
}

# Imports spear_rl from its own directory; sys.path serves to load the packages and is then reduced.
BOOT = """
import json, socket, sys
from importlib.util import module_from_spec, spec_from_file_location
control = socket.socket(fileno=int(sys.argv[1]))
size = int.from_bytes(control.recv(5, socket.MSG_WAITALL)[1:], "big")
settings = json.loads(control.recv(size, socket.MSG_WAITALL))
settings["standard"] = list(sys.path)
del sys.argv[1:], sys.orig_argv[1:]
sys.path += settings["path"]
spec = spec_from_file_location("spear_rl", settings["package"] + "/__init__.py",
                               submodule_search_locations=[settings["package"]])
package = sys.modules["spear_rl"] = module_from_spec(spec)
spec.loader.exec_module(package)
from spear_rl.sandbox.server.main import main
main(settings, control)
"""

log = logging.getLogger("spear_rl.sandbox")


class ServerGoneError(Exception):
    """The fork server died; another can be started."""


class NoProcessError(SandboxUnavailable):
    """No further child: too many processes, too many open files, or no memory."""


class ForkServer:
    """A running server. All methods are thread-safe."""

    def __init__(self, limits: Limits, *, max_children: int, **settings: Any) -> None:
        """`settings`: backend, packages, modules and spares of `Interpreter`."""
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._control, server_end = socket.socketpair()
        path = [path for path in sys.path if os.path.isdir(path)]
        settings |= {"limits": asdict(limits), "path": path, "package": str(PACKAGE)}
        self._errors: Any = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-c", BOOT, str(server_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise SandboxUnavailable(f"the interpreter's server cannot be started: {error}") from error
        finally:
            server_end.close()
        memory_bytes = SERVER_BYTES + max_children * (limits.memory_mb * MIB + 3 * limits.file_bytes)
        group_limits = cgroup.limits_for(memory_bytes=memory_bytes, max_processes=max_children + 16)
        self._group = cgroup.group_of(self._process.pid, group_limits)  # before the server gets its settings
        self.about = self._handshake(settings) | {"cgroup": self._group.about}
        if "backend" not in self.about:
            self.close()
            why = "; ".join(f"{backend}: {reason}" for backend, reason in self.about["reasons"].items())
            raise SandboxUnavailable(
                f"this machine cannot isolate untrusted code ({why}). Run where it can, use backend='sandbox-fusion', "
                f"or set backend={UNSAFE!r} to run it with nothing but a time and a memory limit"
            )
        for missing in self.about["missing"]:
            log.warning("the sandbox runs without %s", missing)
        self.backend, self.pid = str(self.about["backend"]), self._process.pid

    def take(self) -> tuple[int, list[int]]:
        """(number of a fresh child, descriptors: code, reply, stdout, stderr)."""
        with self._lock:
            self._send(protocol.TAKE, is_answered=True)
            size, num, flags = protocol.ANSWER.size, protocol.NUM_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            try:
                answer, descriptors, _, _ = socket.recv_fds(self._control, size, num, flags)
            except OSError as error:
                raise ServerGoneError(str(error)) from error
            if len(answer) != size:
                raise ServerGoneError("it closed the connection")
        child, number = protocol.ANSWER.unpack(answer)
        if len(descriptors) != num:
            for descriptor in descriptors:
                os.close(descriptor)
            self.forget(child)
            why = os.strerror(number) if number else "this process has too many open files"
            raise NoProcessError(f"no new interpreter process: {why}")
        return child, descriptors

    def signal(self, child: int, number: int) -> None:
        with self._lock, suppress(ServerGoneError):
            self._send(protocol.SIGNAL, child, number)

    def end(self, child: int) -> int:
        """Kill and reap a child; its wait status (0 if the server is gone, and with it the child)."""
        with self._lock, suppress(ServerGoneError):
            self._send(protocol.END, child, is_answered=True)
            with suppress(EOFError, OSError):
                answer = protocol.read_exactly(self._control.fileno(), protocol.ANSWER.size)
                return int(protocol.ANSWER.unpack(answer)[1])
        return 0

    def forget(self, child: int) -> None:
        """Kill a child without waiting for it."""
        with self._lock, suppress(ServerGoneError):
            self._send(protocol.FORGET, child)

    def close(self) -> None:
        """End the server and all its children."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._control.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._group.remove()
        self._errors.close()

    def _send(self, command: bytes, child: int = 0, number: int = 0, *, is_answered: bool = False) -> None:
        try:
            self._control.sendall(protocol.COMMAND.pack(command, child, number))
        except OSError as error:
            raise ServerGoneError(str(error)) from error
        if is_answered and not protocol.is_readable(self._control.fileno(), ANSWER_SECONDS):
            self._process.kill()
            raise ServerGoneError("it does not answer")

    def _handshake(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Send the settings and return the server's description of itself, once it is ready."""
        try:
            self._control.sendall(protocol.frame(protocol.READY, json.dumps(settings).encode()))
            if not protocol.is_readable(self._control.fileno(), START_SECONDS):
                raise EOFError
            _, length = protocol.HEADER.unpack(protocol.read_exactly(self._control.fileno(), protocol.HEADER.size))
            about: dict[str, Any] = json.loads(protocol.read_exactly(self._control.fileno(), length))
            return about
        except (EOFError, OSError) as error:
            self._process.kill()
            self._process.wait()
            self._group.remove()
            self._control.close()
            self._errors.seek(0)
            text = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"the interpreter's server did not start: {text or error}") from error
