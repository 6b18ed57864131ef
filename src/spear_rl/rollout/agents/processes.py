"""The agents' processes as the trainer sees them: start an agent, kill it, hear how it ended."""

import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from spear_rl.errors import ConfigError, UserError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.rollout.env import Task
from spear_rl.rollout.workers.process import BOOT, HOME, MAX_LOG_BYTES, TAIL_BYTES, worker_environment

_BOOT = BOOT.replace("spear_rl.rollout.workers.worker", "spear_rl.rollout.agents.launcher")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an agent ended: its reward, or why it has none, as the end of a sentence about it."""

    number: int
    reward: float | None = None
    error: str = ""


class AgentProcesses:
    """Runs the function `name`, package.module:function, once per episode, each time in a process of its own.

    A launcher imports the module once and forks, so that an agent starts in milliseconds. If the launcher dies, its
    agents have failed, and the next one to start gets a new launcher.

    Args:
        notice: called with every outcome, from another thread.
        python: interpreter of the virtual environment that the agent's packages are in.
        start_timeout: seconds to import the agent's module.
    """

    def __init__(
        self, name: str, notice: Callable[[Outcome], None], *, python: str | None = None, start_timeout: float = 300.0
    ) -> None:
        self._name, self._notice, self._python, self._start_timeout = name, notice, python, start_timeout
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def start(self) -> None:
        """Start the launcher if none is running; ConfigError if the agent cannot be imported."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        settings = json.dumps({"home": str(HOME), "path": [] if self._python else sys.path})
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as the launcher)
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        try:
            self._process = subprocess.Popen(
                [self._python or sys.executable, "-c", _BOOT, settings],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
                env=worker_environment(is_foreign=self._python is not None), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"task.python: {self._python} cannot be started: {in_words(error)}") from error
        first: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._read, args=(self._process, first), daemon=True).start()
        self._send({"agent": self._name})
        try:
            answer = first.get(timeout=self._start_timeout)
        except Empty:
            self.close()
            raise ConfigError(f"task.agent: {self._name} was not imported in {self._start_timeout:g} s") from None
        if "ready" not in answer:
            reason = answer.get("refused") or f"{self._name}: importing it ended the process{self._last_line()}"
            self.close()
            raise ConfigError(f"task.agent: {reason}")

    def run(self, number: int, task: Task, *, base_url: str, api_key: str, seed: str) -> None:
        """Start an agent; `number` is new."""
        self.start()
        try:
            content = b64encode(pickle.dumps(task)).decode()
        except Exception as error:
            raise UserError(f"task {clipped(task.id, 200)} cannot be sent to an agent: {in_words(error)}") from error
        with self._lock:
            self._running.add(number)
        self._send({"run": number, "task": content, "base_url": base_url, "api_key": api_key, "seed": seed})

    def kill(self, number: int) -> None:
        """Kill an agent and what it started; it has no outcome then."""
        with self._lock:
            self._running.discard(number)
        self._send({"kill": number})

    def close(self) -> None:
        """Kill the launcher and all agents."""
        process, self._process = self._process, None
        with self._lock:
            self._running.clear()
        if process is None:
            return
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._log.close()

    def _send(self, order: dict[str, Any]) -> None:
        process = self._process
        if process is None:
            return
        rest = memoryview(json.dumps(order).encode() + b"\n")
        with suppress(OSError):  # a dead launcher is noticed by reading
            while rest:
                rest = rest[os.write(process.stdin.fileno(), rest) :]  # type: ignore[union-attr]

    def _read(self, process: subprocess.Popen[bytes], first: SimpleQueue[dict[str, Any]]) -> None:
        """Pass on what the launcher and its agents say; at its end, fail those that it ran."""
        assert process.stdout
        with process.stdout, suppress(ValueError, OSError):
            for line in iter(lambda: _line(process), b""):
                answer = json.loads(line)
                if "number" not in answer:
                    first.put(answer)
                    continue
                ended = answer.get("ended")
                error = answer.get("error") or (f"{ended} before it returned{self._last_line()}" if ended else "")
                self._tell(Outcome(answer["number"], answer.get("reward"), error))
        first.put({})
        with self._lock:
            lost = sorted(self._running) if self._process is process else []
        for number in lost:
            self._tell(Outcome(number, error=f"lost its launcher, which died{self._last_line()}"))

    def _tell(self, outcome: Outcome) -> None:
        with self._lock:
            is_first = outcome.number in self._running
            self._running.discard(outcome.number)
        if is_first:
            self._notice(outcome)
        with suppress(OSError, ValueError):
            if os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
                os.ftruncate(self._log.fileno(), 0)

    def _last_line(self) -> str:
        """The last line that was printed, for an error message."""
        with suppress(OSError, ValueError):
            size = os.fstat(self._log.fileno()).st_size
            tail = os.pread(self._log.fileno(), TAIL_BYTES, max(size - TAIL_BYTES, 0)).decode("utf-8", "replace")
            return "".join(f"; it printed last: {clipped(line, 300)}" for line in tail.strip().splitlines()[-1:])
        return ""


def _line(process: subprocess.Popen[bytes]) -> bytes:
    return process.stdout.readline() if process.stdout else b""
