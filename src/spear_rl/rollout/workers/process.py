"""One worker process as its pool sees it: started, spoken to without ever blocking, killed. Knows no episodes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spear_rl.io.escaping import clipped
from spear_rl.rollout.workers.protocol import (
    MAX_FRAME,
    EnvironmentFailedError,
    GarbledError,
    Question,
    answer_in,
    frames,
    question_frame,
)

HOME = Path(__file__).parents[2]
PIPE_BYTES = 1 << 20
TAIL_BYTES = 4000
MAX_LOG_BYTES = 1 << 20

# Imports this package alone from where it lies: in another virtual environment, none of the packages beside it.
BOOT = """
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
settings = json.loads(sys.argv[1])
sys.argv[1:] = []
sys.path[:0] = settings["before"]
sys.path[:] = settings["instead"] or sys.path
spec = spec_from_file_location("spear_rl", settings["home"] + "/__init__.py",
                               submodule_search_locations=[settings["home"]])
package = sys.modules["spear_rl"] = module_from_spec(spec)
spec.loader.exec_module(package)
from spear_rl.rollout.workers.worker import main
main()
"""


class WorkerProcess:
    """A worker of this interpreter, or of another virtual environment's.

    It is a program of its own (never a fork of a process that may have threads and a GPU), in a session of its own (so
    that Ctrl-C does not reach it and killing it takes along what it started). Its errors go to a file without a name.
    """

    def __init__(self, *, python: str | None = None, path: Sequence[str] = ()) -> None:
        instead = [] if python else [*path, *sys.path]
        settings = json.dumps({"home": str(HOME), "before": list(path) if python else [], "instead": instead})
        self._log: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as the worker)
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, "-c", BOOT, settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment(is_foreign=python is not None),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise EnvironmentFailedError(f"no environment worker can be started with {python}: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
            with suppress(OSError, AttributeError):  # Linux only, and within the user's limit
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._unsent, self._received = bytearray(), bytearray()
        self.is_garbled = False
        """Something wrote to its pipe that is no answer to what was asked."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> int:
        """The descriptor that becomes readable when there is an answer."""
        return self._stdout.fileno()

    @property
    def input(self) -> int:
        """The descriptor that becomes writable when there is room for what was not sent yet."""
        return self._stdin.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def put(self, question: Question) -> None:
        """Have a question ready to go out with the next `flush`."""
        self._unsent += question_frame(question)

    def flush(self) -> bool:
        """Write what the pipe takes; whether it took any."""
        num_bytes = len(self._unsent)
        with suppress(BlockingIOError, BrokenPipeError):  # its death is noticed by reading
            while self._unsent:
                del self._unsent[: os.write(self.input, self._unsent[:PIPE_BYTES])]
        return len(self._unsent) < num_bytes

    def received(self) -> tuple[list[tuple[int, Any]], bool]:
        """(the answers that have arrived, whether it is still alive); `is_garbled` if anything else has."""
        is_alive = self._process.poll() is None
        with suppress(BlockingIOError):
            while len(self._received) <= MAX_FRAME:  # who floods the pipe is found out, not waited for
                chunk = os.read(self.output, 1 << 20)
                if not chunk:
                    is_alive = False
                    break
                self._received += chunk
        self._bound_log()
        answers: list[tuple[int, Any]] = []
        try:
            for frame in frames(self._received):
                answers.append(answer_in(frame))
        except GarbledError:
            self.is_garbled = True
        return answers, is_alive

    def tail(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), TAIL_BYTES, max(size - TAIL_BYTES, 0)).decode("utf-8", "replace").strip()

    def last_words(self) -> str:
        """The last line of what it printed, for a sentence."""
        return "".join(f"; it printed last: {clipped(line, 300)}" for line in self.tail().splitlines()[-1:])

    def kill(self, *, patience: float = 0.0) -> str:
        """End it and all it started, after `patience` seconds; how it ended by itself, in words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        before = self._process.returncode
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        return "hung" if before is None else f"died of signal {-before}" if before < 0 else f"ended with code {before}"

    def end_input(self) -> None:
        """Let it end by itself."""
        with suppress(OSError):
            self._stdin.close()

    def close(self, *, patience: float) -> None:
        """Wait until it has ended, for `patience` seconds at most; then make it."""
        self.end_input()
        self.kill(patience=patience)
        self._stdout.close()
        self._log.close()

    def _bound_log(self) -> None:
        if os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)


def _environment(*, is_foreign: bool) -> dict[str, str]:
    """One thread a worker, as there is one worker a core; another interpreter gets nothing of this one's."""
    own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ
    mine = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__") if is_foreign else ()
    return {name: value for name, value in own.items() if name not in mine}
