"""A process of ours as its parent sees it, and a worker as its pool does: requests and answers that never block."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from spear_rl.io.escaping import clipped
from spear_rl.rollout.workers import protocol
from spear_rl.rollout.workers.protocol import READY, EnvironmentFailedError, GarbledError, Kind

HOME = Path(__file__).parents[2]
PIPE_BYTES = 1 << 20
TAIL_BYTES = 4000
MAX_LOG_BYTES = 1 << 20

# Imports this package alone from its folder: in another virtual environment, none of the packages beside it.
_BOOT = """
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
settings = json.loads(sys.argv[1])
sys.argv[1:] = []
sys.path[:] = settings["path"] or sys.path
spec = spec_from_file_location("spear_rl", settings["home"] + "/__init__.py",
                               submodule_search_locations=[settings["home"]])
package = sys.modules["spear_rl"] = module_from_spec(spec)
spec.loader.exec_module(package)
from {module} import main
main()
"""


class Program:
    """`main` of a module of ours as a program, of this interpreter or of another virtual environment's.

    It is a new program (never a fork of a process that may have threads and a GPU) in a session of its own, so that
    Ctrl-C does not reach it and killing it also kills its children. Its standard error goes to an unnamed file.
    """

    def __init__(self, module: str, *, python: str | None) -> None:
        settings = json.dumps({"home": str(HOME), "path": [] if python else sys.path})
        self._log: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as the program)
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        self._process = subprocess.Popen(
            [python or sys.executable, "-c", _BOOT.format(module=module), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=worker_environment(is_foreign=python is not None),
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid, self.stdin, self.stdout = self._process.pid, self._process.stdin, self._process.stdout

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def bound_log(self) -> None:
        """Empty the log if it is too long."""
        with suppress(OSError, ValueError):  # closed
            if os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
                os.ftruncate(self._log.fileno(), 0)

    def log_tail(self) -> str:
        with suppress(OSError, ValueError):  # closed
            size = os.fstat(self._log.fileno()).st_size
            tail = os.pread(self._log.fileno(), TAIL_BYTES, max(size - TAIL_BYTES, 0))
            return tail.decode("utf-8", "replace").strip()
        return ""

    def last_line(self) -> str:
        """The last line that it printed, for an error message."""
        return "".join(f"; it printed last: {clipped(line, 300)}" for line in self.log_tail().splitlines()[-1:])

    def kill(self, *, patience: float = 0.0) -> str:
        """Kill it and its children after `patience` seconds; returns how it ended by itself, or "hung"."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        before = self._process.returncode
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        return "hung" if before is None else f"died of signal {-before}" if before < 0 else f"ended with code {before}"

    def end_input(self) -> None:
        """Close its standard input, upon which it ends."""
        with suppress(OSError):
            self.stdin.close()

    def close(self, *, patience: float) -> None:
        """Close its input, wait up to `patience` seconds and kill it."""
        self.end_input()
        self.kill(patience=patience)
        self._log.close()


class WorkerProcess(Program):
    """A worker, to which requests are sent and from which answers are received without blocking."""

    def __init__(self, *, python: str | None = None) -> None:
        try:
            super().__init__("spear_rl.rollout.workers.worker", python=python)
        except OSError as error:
            raise EnvironmentFailedError(f"no environment worker can be started with {python}: {error}") from error
        self.input, self.output = self.stdin.fileno(), self.stdout.fileno()
        for pipe in (self.input, self.output):
            os.set_blocking(pipe, False)
            with suppress(OSError, AttributeError):  # Linux only, and within the user's limit
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.pending: deque[tuple[int, str]] = deque([(READY, "start")])
        """(number of the episode, kind) of the unanswered requests; the worker is busy with the first."""
        self._busy_since = time.monotonic()
        self._is_delivering = False
        """The first pending request may not have been sent in full."""
        self._unsent, self._received = bytearray(), bytearray()
        self.is_garbled = False
        """It wrote something that is not the answer to its first pending request."""

    @property
    def current(self) -> tuple[int, str]:
        """(number of the episode, kind) of the request that it is busy with."""
        return self.pending[0] if self.pending else (READY, "nothing")

    @property
    def busy_seconds(self) -> float:
        """A lower bound of the time spent on the current request, however rarely the pool looks."""
        return time.monotonic() - self._busy_since

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def ask(self, kind: Kind, number: int, content: object) -> None:
        """Queue a request; the next `flush` sends it."""
        self._is_delivering |= not self.pending
        self.pending.append((number, kind))
        self._unsent += protocol.request_frame((kind, number, content))

    def flush(self) -> None:
        num_unsent = len(self._unsent)
        if not num_unsent:
            return
        with suppress(BlockingIOError, BrokenPipeError):  # a dead worker is noticed by reading
            while self._unsent:
                del self._unsent[: os.write(self.input, self._unsent[:PIPE_BYTES])]
        if len(self._unsent) < num_unsent and self._is_delivering:
            self._busy_since = time.monotonic()
        self._is_delivering = self.has_unsent

    def received(self) -> tuple[list[tuple[str, int, Any]], bool]:
        """((kind, number, answer) of the requests answered since the last call, whether the worker is alive)."""
        is_alive = self.is_running
        with suppress(BlockingIOError):
            while len(self._received) <= protocol.MAX_FRAME:  # a flooded pipe is an error, and not read for ever
                chunk = os.read(self.output, 1 << 20)
                if not chunk:
                    is_alive = False
                    break
                self._received += chunk
        self.bound_log()
        answers: list[tuple[str, int, Any]] = []
        try:
            for frame in protocol.frames(self._received):
                number, answer = protocol.answer_in(frame)
                self._busy_since = time.monotonic()
                if not self.pending or number != self.pending[0][0]:
                    raise GarbledError
                answers.append((self.pending.popleft()[1], number, answer))
        except GarbledError:
            self.is_garbled = True
        return answers, is_alive

    def close(self, *, patience: float) -> None:
        super().close(patience=patience)
        self.stdout.close()


def worker_environment(*, is_foreign: bool) -> dict[str, str]:
    """One thread per worker, as there is one worker per core; another interpreter gets no Python settings of ours."""
    variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__") if is_foreign else ()
    return {name: value for name, value in variables.items() if name not in dropped}
