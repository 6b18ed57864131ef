"""The agents' processes as the trainer sees them: start an agent, kill it, hear how it ended."""

import json
import os
import pickle
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
from spear_rl.rollout.workers.process import Program


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
        self._launcher: Program | None = None

    def start(self) -> None:
        """Start the launcher if none is running; ConfigError if the agent cannot be imported."""
        if self._launcher is not None and self._launcher.is_running:
            return
        self.close()
        try:
            launcher = self._launcher = Program("spear_rl.rollout.agents.launcher", python=self._python)
        except OSError as error:
            raise ConfigError(f"task.python: {self._python} cannot be started: {in_words(error)}") from error
        first: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._read, args=(launcher, first), daemon=True).start()
        self._send({"agent": self._name})
        try:
            answer = first.get(timeout=self._start_timeout)
        except Empty:
            self.close()
            raise ConfigError(f"task.agent: {self._name} was not imported in {self._start_timeout:g} s") from None
        if "ready" not in answer:
            reason = answer.get("refused") or f"{self._name}: importing it ended the process{launcher.last_line()}"
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
        launcher, self._launcher = self._launcher, None
        with self._lock:
            self._running.clear()
        if launcher is not None:
            launcher.close(patience=2.0)

    def _send(self, order: dict[str, Any]) -> None:
        if self._launcher is None:
            return
        rest = memoryview(json.dumps(order).encode() + b"\n")
        with suppress(OSError):  # a dead launcher is noticed by reading
            while rest:
                rest = rest[os.write(self._launcher.stdin.fileno(), rest) :]

    def _read(self, launcher: Program, first: SimpleQueue[dict[str, Any]]) -> None:
        """Pass on what the launcher and its agents say; at its end, fail those that it ran."""
        with launcher.stdout, suppress(ValueError, OSError):
            for line in iter(launcher.stdout.readline, b""):
                answer = json.loads(line)
                if "number" not in answer:
                    first.put(answer)
                    continue
                ended = answer.get("ended")
                error = answer.get("error") or (f"{ended} before it returned{launcher.last_line()}" if ended else "")
                self._tell(Outcome(answer["number"], answer.get("reward"), error))
                launcher.bound_log()
        first.put({})
        with self._lock:
            lost = sorted(self._running) if self._launcher is launcher else []
        for number in lost:
            self._tell(Outcome(number, error=f"lost its launcher, which died{launcher.last_line()}"))

    def _tell(self, outcome: Outcome) -> None:
        with self._lock:
            is_first = outcome.number in self._running
            self._running.discard(outcome.number)
        if is_first:
            self._notice(outcome)
