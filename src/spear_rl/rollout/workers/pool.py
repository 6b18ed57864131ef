"""A pool of worker processes that run environments, several episodes per worker.

A worker that dies or hangs is killed and replaced. Its episodes are replayed in the new worker, and the replay must
give the recorded answers.
"""

from __future__ import annotations

import logging
import math
import pickle
import select
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spear_rl.io.escaping import clipped, in_words
from spear_rl.rollout.contract import ContractError, checked_observation, checked_result
from spear_rl.rollout.env import Task
from spear_rl.rollout.workers.process import WorkerProcess
from spear_rl.rollout.workers.protocol import READY, EnvironmentFailedError
from spear_rl.rollout.workers.runner import Answer, Failure, NotRepeatableError, Record, is_plain, is_plain_result

_log = logging.getLogger(__name__)

MAX_FAULTS = {"raised": 2, "hung": 2, "died": 5}
"""An episode with this many faults at the same point fails; a worker's death may not be the episode's fault."""
MAX_STARTS = 3
"""Give up after this many workers in a row ended during their start."""
MAX_KILLED_STARTS = 100
"""The same for workers killed by a signal, e.g. for lack of memory."""
MAX_LOST_TASKS = 3
"""Give up after this many tasks hang or kill a worker at a kind of request that no task has ever answered."""
RESETS_PER_STEP = 5.0
"""Time limit of make_env with reset, in multiples of step_timeout."""
MIN_START_SECONDS = 120.0
"""Minimum seconds allowed for starting a worker and for importing an environment's modules."""
_POLL_SECONDS = 0.5
"""Between checks for workers that hang, or that ended with their pipe still open."""


class _Worker(WorkerProcess):
    """A worker process and the episodes it runs, by number."""

    def __init__(self, *, python: str | None) -> None:
        super().__init__(python=python)
        self.episodes: dict[int, _Episode] = {}


@dataclass(eq=False)
class _Episode:
    """An episode of a pool: its record, and where its environment is."""

    key: int
    record: Record
    make_env: bytes = b""
    worker: _Worker | None = None
    number: int = READY
    """Its name in its worker; a new one per environment, so that answers of an old environment are ignored."""
    num_answers: int = 0
    """Answers of the current environment; fewer than recorded during a replay."""
    faults: Counter[str] = field(default_factory=Counter)
    """Faults since its last answer, by kind."""
    is_pending: bool = True
    error: BaseException | None = None

    def enter(self, worker: _Worker, number: int) -> None:
        """Make the environment in a worker and replay the actions so far."""
        self.leave()
        self.worker, self.number, self.num_answers = worker, number, 0
        worker.episodes[number] = self
        worker.ask("load", number, self.make_env)
        worker.ask("open", number, None)
        for action in self.record.actions:
            worker.ask("step", number, action)

    def leave(self) -> None:
        if self.worker is not None:
            self.worker.ask("close", self.number, None)
            del self.worker.episodes[self.number]
            self.worker = None


class Pool:
    """Runs environments in up to `num_workers` processes; use it in a `with` statement, or call `shut`.

    Args:
        num_workers: each is started when there is an episode for it.
        python: the interpreter of another virtual environment, whose packages the environments then see; it needs
            Python 3.11 and nothing of ours. By default this interpreter, with its `sys.path`.
        step_timeout: seconds for one step, or for closing an environment, after which its worker counts as hung.
        reset_timeout: seconds for making and resetting an environment, and for a demonstration; five times
            `step_timeout` by default. Starting a worker and importing modules may take two minutes in any case.
    """

    def __init__(
        self,
        *,
        num_workers: int = 1,
        python: str | None = None,
        step_timeout: float = 60.0,
        reset_timeout: float | None = None,
    ) -> None:
        self._num_workers, self._python = num_workers, python
        reset_timeout = RESETS_PER_STEP * step_timeout if reset_timeout is None else reset_timeout
        self._limits = dict.fromkeys(("start", "load"), max(reset_timeout, MIN_START_SECONDS))
        self._limits |= dict.fromkeys(("open", "call"), reset_timeout)
        self._limits |= {"step": step_timeout, "close": step_timeout, "nothing": math.inf}
        self._workers: list[_Worker] = []
        self._episodes: dict[int, _Episode] = {}
        self._ready: list[tuple[int, Answer]] = []
        self._calls: dict[int, bytes] = {}
        self._values: dict[int, Any] = {}
        self._num_answered: Counter[str] = Counter()
        self._lost_tasks: dict[str, set[str]] = {}
        """Kind of request -> tasks that hung or killed a worker at it."""
        self._last_number = 0
        self._num_failed_starts = 0
        self.num_replaced = 0
        """Workers that died or hung so far."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def shut(self) -> None:
        """End every worker and drop every episode."""
        workers, self._workers, self._episodes, self._ready = self._workers, [], {}, []
        for worker in workers:
            worker.end_input()
        deadline = time.monotonic() + 2.0
        for worker in workers:
            worker.close(patience=max(deadline - time.monotonic(), 0.0))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def open(self, key: int, task: Task) -> None:
        episode = self._episodes[key] = _Episode(key, Record(task))
        try:
            episode.make_env = pickle.dumps(task.make_env, protocol=4)
        except Exception as error:  # pickle raises whatever an object's own reduction raises
            reason = f"make_env of {task.id} does not pickle, so no worker can make it: {in_words(error)}"
            self._fail(episode, EnvironmentFailedError(reason))
            return
        episode.enter(self._least_busy_worker(), self._new_number())

    def step(self, key: int, action: str) -> None:
        episode = self._episodes[key]
        episode.record.actions.append(action)
        episode.is_pending = True
        if episode.worker is None:
            self._fail(episode, episode.error or EnvironmentFailedError("it has no worker"))
        else:
            episode.worker.ask("step", episode.number, action)

    def answers(self, at_least: int) -> list[tuple[int, Answer]]:
        at_least = min(at_least, len(self))
        self._exchange(wait=False)
        while len(self._ready) < at_least:
            self._exchange(wait=True)
        ready, self._ready = self._ready, []
        return ready

    def close(self, key: int) -> None:
        episode = self._episodes.pop(key, None)
        if episode is not None:
            episode.leave()
            self._ready = [(other, answer) for other, answer in self._ready if other != key]

    def __len__(self) -> int:
        return len(self._ready) + sum(episode.is_pending for episode in self._episodes.values())

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in a worker or, if it does not pickle, in this process; it returns plain values."""
        try:
            pickled = pickle.dumps(function, protocol=4)
        except Exception:  # as for make_env
            return function()
        number = self._new_number()
        self._calls[number] = pickled
        self._least_busy_worker().ask("call", number, pickled)
        while number not in self._values:
            self._exchange(wait=True)
        value = self._values.pop(number)
        if isinstance(value, BaseException):
            raise value
        return value

    def _least_busy_worker(self) -> _Worker:
        """The worker with the fewest episodes; a new one while all have some."""
        if len(self._workers) < self._num_workers and all(worker.episodes for worker in self._workers):
            self._workers.append(_Worker(python=self._python))
            return self._workers[-1]
        return min(self._workers, key=lambda worker: len(worker.episodes))

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _fail(self, episode: _Episode, error: BaseException) -> None:
        episode.leave()
        episode.error = error
        if episode.is_pending:
            episode.is_pending = False
            self._ready.append((episode.key, Failure(error)))

    def _exchange(self, *, wait: bool) -> None:
        """Send requests, receive answers, and replace workers that ended or exceeded a time limit."""
        poll = select.poll()
        for worker in self._workers:
            worker.flush()
            poll.register(worker.output, select.POLLIN)
            if worker.has_unsent:
                poll.register(worker.input, select.POLLOUT)
        poll.poll(_POLL_SECONDS * 1000 if wait else 0)
        for worker in list(self._workers):
            answers, is_alive = worker.received()
            for kind, number, answer in answers:
                self._handle(worker, kind, number, answer)
            if worker.is_garbled:
                worker.kill()
                self._replace(worker, "wrote what is no answer")
            elif not is_alive:
                self._replace(worker, worker.kill(patience=_POLL_SECONDS))
            elif worker.busy_seconds > self._limits[worker.current[1]]:
                self._replace(worker, worker.kill())

    def _handle(self, worker: _Worker, kind: str, number: int, answer: Any) -> None:
        self._num_answered[kind] += not isinstance(answer, BaseException)
        episode = worker.episodes.get(number)
        if kind == "start":
            self._num_failed_starts = 0
        elif kind == "call":
            self._calls.pop(number, None)
            self._values[number] = answer
        elif episode is None:
            pass  # it was closed, or is being replayed under another number
        elif isinstance(answer, ContractError):
            raise answer.of(episode.record.task.id)
        elif isinstance(answer, BaseException):
            self._retry(episode, "raised", answer, worker)
        elif kind != "load":
            self._add_answer(episode, kind, answer)

    def _add_answer(self, episode: _Episode, kind: str, answer: Any) -> None:
        """Check an answer again, as an environment may have written it to the pipe itself; then record or compare."""
        record, number = episode.record, episode.num_answers
        try:
            if kind == "open":
                answer = answer if is_plain(answer) else checked_observation(answer, "the environment's reset")
            else:
                answer = answer if is_plain_result(answer) else checked_result(answer, f"the environment's {kind}")
        except ContractError as error:
            raise error.of(record.task.id) from error
        if number < len(record.answers):
            try:
                record.check(number, answer)
            except NotRepeatableError as error:
                self._fail(episode, error)
                return
        else:
            record.answers.append(answer)
            episode.faults.clear()
            episode.is_pending = False
            self._ready.append((episode.key, answer))
        episode.num_answers += 1

    def _retry(self, episode: _Episode, fault: str, error: BaseException, worker: _Worker) -> None:
        """Replay the episode in a worker, unless it had that fault too often."""
        episode.faults[fault] += 1
        if episode.faults[fault] < MAX_FAULTS[fault]:
            episode.enter(worker, self._new_number())
        else:
            self._fail(episode, error)

    def _replace(self, worker: _Worker, ended: str) -> None:
        """Replace a worker that died or hung, and replay its episodes; the one it was busy with comes last."""
        number, kind = worker.current
        culprit = worker.episodes.pop(number, None)
        error = self._error(worker, ended, kind, culprit)
        self._num_failed_starts += kind == "start"
        if self._num_failed_starts >= (MAX_KILLED_STARTS if "signal" in ended else MAX_STARTS):
            self.shut()
            raise error
        worker.close(patience=0.0)
        fresh = self._workers[self._workers.index(worker)] = _Worker(python=self._python)
        lost = self._lost_tasks.setdefault(kind, set())
        if culprit is not None and ended != "died of signal 9":  # anybody may have sent that one
            lost.add(culprit.record.task.id)
        if len(lost) >= MAX_LOST_TASKS and not self._num_answered[kind]:
            self.shut()
            raise error
        # Tasks that were lost before come last: other episodes should not wait for them to hang again.
        for neighbour in sorted(worker.episodes.values(), key=lambda episode: episode.record.task.id in lost):
            neighbour.worker = None
            neighbour.enter(fresh, self._new_number())
        for pending, pending_kind in worker.pending:
            if pending_kind == "call" and pending != number:
                fresh.ask("call", pending, self._calls[pending])
        if kind == "call":
            self._values[number] = error
        if culprit is not None:
            culprit.worker = None
            self._retry(culprit, "hung" if ended == "hung" else "died", error, fresh)

    def _error(self, worker: _Worker, ended: str, kind: str, culprit: _Episode | None) -> EnvironmentFailedError:
        """Describes how a worker ended; the first time it is also logged as a warning."""
        during = {"open": "reset", "call": "demonstrate", "load": "import"}.get(kind, kind)
        during += f" of {clipped(culprit.record.task.id, 200)}" if culprit else ""
        during += f", which took more than {self._limits[kind]:g} s" if ended == "hung" else ""
        error = EnvironmentFailedError(f"an environment worker {ended} during {during}{worker.last_line()}")
        _log.log(logging.DEBUG if self.num_replaced else logging.WARNING, "%s; it is replaced", error)
        _log.debug("its output ended with:\n%s", worker.log_tail())
        self.num_replaced += 1
        return error
