"""Environments in worker processes: many episodes a worker, and an episode survives the death of its worker.

Knows no prompts and no policy. A worker that dies or hangs is killed and replaced; its episodes are made again there
and brought to where they were, which is checked against what they answered the first time.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from spear_rl.io.escaping import clipped, in_words
from spear_rl.rollout.contract import ContractError, checked_observation, checked_result
from spear_rl.rollout.env import Task
from spear_rl.rollout.workers.bookkeeping import PooledEpisode, PooledWorker
from spear_rl.rollout.workers.process import WorkerProcess
from spear_rl.rollout.workers.protocol import EnvironmentFailedError
from spear_rl.rollout.workers.runner import Answer, Failure, NotRepeatableError, Record

_log = logging.getLogger(__name__)

MAX_FAULTS = {"raised": 2, "hung": 2, "died": 5}
"""An episode with so many faults at the same point is left out; its worker's death may not have been its own doing."""
MAX_STARTS = 3
"""So many workers in a row that end before they are up are no accident."""
MAX_KILLED_STARTS = 100
"""The same for workers that were killed: somebody is short of memory, or testing us."""
MAX_LOST_TASKS = 3
"""Give up after this many tasks hang or kill a worker at a kind of request that no task has ever answered."""
RESETS_PER_STEP = 5.0
"""Time limit of make_env with reset, in multiples of step_timeout."""
MIN_START_SECONDS = 120.0
"""Minimum seconds allowed for starting a worker and for importing an environment's modules."""
_NOTICE = 0.5
"""Seconds between looks for workers that hang, or ended without their pipe ending."""


class Pool:
    """Runs environments in up to `num_workers` processes; use it in a `with`, or `shut` it.

    Args:
        num_workers: one a core if left out; each is started when there is an episode for it.
        python: the interpreter of another virtual environment, whose packages the environments then see; it needs
            Python 3.11 and nothing of ours. This interpreter, with its path, if left out.
        path: more folders to import from.
        step_timeout: seconds one step may take before its worker counts as hung, and closing an environment too.
        reset_timeout: seconds that making and resetting an environment may take, and a demonstration; five times
            `step_timeout` if left out. Starting a worker and importing modules there may take two minutes in any case.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        python: str | None = None,
        path: Sequence[str] = (),
        step_timeout: float = 60.0,
        reset_timeout: float | None = None,
    ) -> None:
        self._num_workers = num_workers or _num_cores()
        self._python, self._path = python, tuple(path)
        reset_timeout = RESETS_PER_STEP * step_timeout if reset_timeout is None else reset_timeout
        self._limits = dict.fromkeys(("start", "load"), max(reset_timeout, MIN_START_SECONDS))
        self._limits |= dict.fromkeys(("open", "call"), reset_timeout)
        self._limits |= {"step": step_timeout, "close": step_timeout, "nothing": math.inf}
        self._workers: list[PooledWorker] = []
        self._episodes: dict[int, PooledEpisode] = {}
        self._ready: list[tuple[int, Answer]] = []
        self._calls: dict[int, bytes] = {}
        self._values: dict[int, Any] = {}
        self._answered: Counter[str] = Counter()
        self._lost: dict[str, set[str]] = {}
        """Kind of question -> tasks that hung or ended a worker at it."""
        self._next_number = 0
        self._num_failed_starts = 0
        self.num_replaced = 0
        """Workers that died or hung so far."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def shut(self) -> None:
        """End every worker and forget every episode."""
        workers, self._workers, self._episodes, self._ready = self._workers, [], {}, []
        for worker in workers:
            worker.process.end_input()
        deadline = time.monotonic() + 2.0
        for worker in workers:
            worker.process.close(patience=max(deadline - time.monotonic(), 0.0))

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def open(self, key: int, task: Task) -> None:
        episode = self._episodes[key] = PooledEpisode(key, Record(task))
        try:
            episode.make_env = pickle.dumps(task.make_env, protocol=4)
        except Exception as error:  # pickle raises whatever an object's own reduction raises
            reason = f"make_env of {task.id} does not pickle, so no worker can make it: {in_words(error)}"
            self._fail(episode, EnvironmentFailedError(reason))
            return
        episode.enter(self._worker_with_room(), self._new_number())

    def step(self, key: int, action: str) -> None:
        episode = self._episodes[key]
        episode.record.actions.append(action)
        episode.is_due = True
        if episode.worker is None:
            self._fail(episode, episode.error or EnvironmentFailedError("it has no worker"))
        else:
            episode.worker.ask("step", episode.number, action)

    def answers(self, at_least: int) -> list[tuple[int, Answer]]:
        at_least = min(at_least, len(self))
        self._pump(wait=False)
        while len(self._ready) < at_least:
            self._pump(wait=True)
        ready, self._ready = self._ready, []
        return ready

    def close(self, key: int) -> None:
        episode = self._episodes.pop(key, None)
        if episode is not None:
            episode.leave()
            self._ready = [(other, answer) for other, answer in self._ready if other != key]

    def __len__(self) -> int:
        return len(self._ready) + sum(episode.is_due for episode in self._episodes.values())

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns in a worker, or, if it does not pickle, in this process; plain values only."""
        try:
            pickled = pickle.dumps(function, protocol=4)
        except Exception:  # as for make_env
            return function()
        number = self._new_number()
        self._calls[number] = pickled
        self._worker_with_room().ask("call", number, pickled)
        while number not in self._values:
            self._pump(wait=True)
        value = self._values.pop(number)
        if isinstance(value, BaseException):
            raise value
        return value

    def _worker_with_room(self) -> PooledWorker:
        """The one with the fewest episodes; a new one while all have some."""
        if len(self._workers) < self._num_workers and all(worker.episodes for worker in self._workers):
            self._workers.append(self._new_worker())
            return self._workers[-1]
        return min(self._workers, key=lambda worker: len(worker.episodes))

    def _new_worker(self) -> PooledWorker:
        return PooledWorker(WorkerProcess(python=self._python, path=self._path))

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _fail(self, episode: PooledEpisode, error: BaseException) -> None:
        episode.leave()
        episode.error = error
        if episode.is_due:
            episode.is_due = False
            self._ready.append((episode.key, Failure(error)))

    def _pump(self, *, wait: bool) -> None:
        """Take in what has arrived; then look for workers that ended or have worked on one thing for too long."""
        poll = select.poll()
        for worker in self._workers:
            worker.flush()
            poll.register(worker.process.output, select.POLLIN)
            if worker.process.has_unsent:
                poll.register(worker.process.input, select.POLLOUT)
        poll.poll(_NOTICE * 1000 if wait else 0)
        for worker in list(self._workers):
            answered, is_alive = worker.received()
            for kind, number, answer in answered:
                self._take(worker, kind, number, answer)
            if worker.process.is_garbled:
                worker.process.kill()
                self._replace(worker, "wrote what is no answer")
            elif not is_alive:
                self._replace(worker, worker.process.kill(patience=_NOTICE))
            elif worker.seconds_at_work > self._limits[worker.work[1]]:
                self._replace(worker, worker.process.kill())

    def _take(self, worker: PooledWorker, kind: str, number: int, answer: Any) -> None:
        self._answered[kind] += not isinstance(answer, BaseException)
        episode = worker.episodes.get(number)
        if kind == "start":
            self._num_failed_starts = 0
        elif kind == "call":
            self._calls.pop(number, None)
            self._values[number] = answer
        elif episode is None:
            pass  # it was closed, or is being made again under another number
        elif isinstance(answer, ContractError):
            raise answer.of(episode.record.task.id)
        elif isinstance(answer, BaseException):
            self._retry(episode, "raised", answer, worker)
        elif kind != "load":
            self._hear(episode, kind, answer)

    def _hear(self, episode: PooledEpisode, kind: str, answer: Any) -> None:
        """An answer, checked once more: an environment may have written it past the worker."""
        try:
            check = checked_observation if kind == "open" else checked_result
            answer = check(answer, lambda: f"the environment's {'reset' if kind == 'open' else kind}")
        except ContractError as error:
            raise error.of(episode.record.task.id) from error
        if episode.is_replaying:
            try:
                episode.repeat(answer)
            except NotRepeatableError as error:
                self._fail(episode, error)
        else:
            episode.hear(answer)
            self._ready.append((episode.key, answer))

    def _retry(self, episode: PooledEpisode, fault: str, error: BaseException, worker: PooledWorker) -> None:
        """Play the episode again in a worker, unless it had that fault too often."""
        episode.faults[fault] += 1
        if episode.faults[fault] < MAX_FAULTS[fault]:
            episode.enter(worker, self._new_number())
        else:
            self._fail(episode, error)

    def _replace(self, worker: PooledWorker, ended: str) -> None:
        """A new worker with all episodes of one that died or hung; the one that was being worked on comes last."""
        number, kind = worker.work
        culprit = worker.episodes.pop(number, None)
        error = self._error(worker, ended, kind, culprit)
        self._num_failed_starts += kind == "start"
        if self._num_failed_starts >= (MAX_KILLED_STARTS if "signal" in ended else MAX_STARTS):
            self.shut()
            raise error
        worker.process.close(patience=0.0)
        fresh = self._workers[self._workers.index(worker)] = self._new_worker()
        lost = self._lost.setdefault(kind, set())
        if culprit is not None and ended != "died of signal 9":  # which may be anybody's doing
            lost.add(culprit.record.task.id)
        if len(lost) >= MAX_LOST_TASKS and not self._answered[kind]:
            self.shut()
            raise error
        # Siblings of what hung come last: others should not wait for all of them to hang, too.
        for neighbour in sorted(worker.episodes.values(), key=lambda episode: episode.record.task.id in lost):
            neighbour.worker = None
            neighbour.enter(fresh, self._new_number())
        for asked, what in worker.asked:
            if what == "call" and asked != number:
                fresh.ask("call", asked, self._calls[asked])
        if kind == "call":
            self._values[number] = error
        if culprit is not None:
            culprit.worker = None
            self._retry(culprit, "hung" if ended == "hung" else "died", error, fresh)

    def _error(
        self, worker: PooledWorker, ended: str, kind: str, culprit: PooledEpisode | None
    ) -> EnvironmentFailedError:
        """What happened to a worker; the first time it is a warning."""
        doing = {"open": "reset", "call": "demonstrate", "load": "import"}.get(kind, kind)
        what = f"{doing} of {clipped(culprit.record.task.id, 200)}" if culprit else doing
        what += f", which took more than {self._limits[kind]:g} s" if ended == "hung" else ""
        error = EnvironmentFailedError(f"an environment worker {ended} during {what}{worker.process.last_words()}")
        _log.log(logging.DEBUG if self.num_replaced else logging.WARNING, "%s; it is replaced", error)
        _log.debug("its output ended with:\n%s", worker.process.tail())
        self.num_replaced += 1
        return error


def _num_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
