"""What a pool keeps of an episode and of a worker: who plays where, what was asked, and since when."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from spear_rl.rollout.env import Observation, StepResult
from spear_rl.rollout.workers.process import WorkerProcess
from spear_rl.rollout.workers.protocol import READY, Kind
from spear_rl.rollout.workers.runner import Record


@dataclass(eq=False)
class PooledWorker:
    """A worker, the episodes it plays, and the questions it has yet to answer; the first is being worked on."""

    process: WorkerProcess
    episodes: dict[int, PooledEpisode] = field(default_factory=dict)
    asked: deque[tuple[int, str]] = field(default_factory=lambda: deque([(READY, "start")]))
    _since: float = field(default_factory=time.monotonic)
    _is_waiting: bool = False
    """The first question may not have reached it in full."""

    @property
    def work(self) -> tuple[int, str]:
        """(number of the episode, kind of question) that is being worked on."""
        return self.asked[0] if self.asked else (READY, "nothing")

    @property
    def seconds_at_work(self) -> float:
        """Since it can have begun; never more than it really is, however long nobody looked."""
        return time.monotonic() - self._since

    def ask(self, kind: Kind, number: int, content: object) -> None:
        """Put a question; it goes out with the next `flush`."""
        self._is_waiting |= not self.asked
        self.asked.append((number, kind))
        self.process.put((kind, number, content))

    def flush(self) -> None:
        if self.process.has_unsent:
            if self.process.flush() and self._is_waiting:
                self._since = time.monotonic()
            self._is_waiting = self.process.has_unsent

    def received(self) -> tuple[list[tuple[str, int, Any]], bool]:
        """((kind, number, answer) of the questions answered since, whether the worker is still alive)."""
        answers, is_alive = self.process.received()
        if answers:
            self._since = time.monotonic()
        taken: list[tuple[str, int, Any]] = []
        for number, answer in answers:
            if self.work[0] != number or not self.asked:
                self.process.is_garbled = True
                break
            taken.append((self.asked.popleft()[1], number, answer))
        return taken, is_alive


@dataclass(eq=False)
class PooledEpisode:
    """An episode of a pool: what it said and heard, and where its environment is."""

    key: int
    record: Record
    make_env: bytes = b""
    worker: PooledWorker | None = None
    number: int = READY
    """Its name in its worker: a new one each time its environment is made, so that late answers mean nothing."""
    num_heard: int = 0
    """Answers of the environment at hand; fewer than the record has while it is replayed."""
    faults: Counter[str] = field(default_factory=Counter)
    """What went wrong, and how often, since it last had an answer."""
    is_due: bool = True
    error: BaseException | None = None

    @property
    def is_replaying(self) -> bool:
        return self.num_heard < len(self.record.heard)

    def enter(self, worker: PooledWorker, number: int) -> None:
        """Have the environment made in a worker and told all that was said so far."""
        self.leave()
        self.worker, self.number, self.num_heard = worker, number, 0
        worker.episodes[number] = self
        worker.ask("load", number, self.make_env)
        worker.ask("open", number, None)
        for action in self.record.actions:
            worker.ask("step", number, action)

    def leave(self) -> None:
        """Have the environment thrown away."""
        if self.worker is not None:
            self.worker.ask("close", self.number, None)
            del self.worker.episodes[self.number]
            self.worker = None

    def repeat(self, answer: Observation | StepResult) -> None:
        """An answer of a replay: it must be what it was."""
        self.record.check(self.num_heard, answer)
        self.num_heard += 1

    def hear(self, answer: Observation | StepResult) -> None:
        """The answer that is due."""
        self.record.heard.append(answer)
        self.num_heard += 1
        self.faults.clear()
        self.is_due = False
