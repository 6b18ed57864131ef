"""Who runs the environments: this process, or others (`pool`). An episode is named by a key; questions get answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from spear_rl.errors import UserError
from spear_rl.rollout.contract import ContractError, acted, begun, checked_actions, closed, with_place
from spear_rl.rollout.env import Environment, Observation, StepResult, Task


@dataclass(frozen=True, slots=True)
class Failure:
    """What comes instead of an answer when the machinery broke, also when it was tried again."""

    error: BaseException


Answer = Observation | StepResult | Failure
"""Observations and results are as `contract` says."""


class EnvRunner(Protocol):
    """Many episodes at once: one question each at a time, answers as they come."""

    def open(self, key: int, task: Task) -> None:
        """Start an episode of `task`; answered by its first Observation."""
        ...

    def step(self, key: int, action: str) -> None:
        """Act in an episode; answered by a StepResult."""
        ...

    def answers(self, at_least: int) -> list[tuple[int, Answer]]:
        """Wait for `at_least` answers (at most as many as are due) and give all there are."""
        ...

    def close(self, key: int) -> None:
        """The episode is over, or given up; an answer that is still due will not come."""
        ...

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function of an environment's author returns where the environments run; plain values only."""
        ...

    def __len__(self) -> int:
        """How many answers are due."""
        ...


def demonstrated(task: Task, seed: int, envs: EnvRunner) -> list[str]:
    """The checked actions of one expert episode."""
    if task.demonstrate is None:
        raise UserError(f"task {task.id} has no expert to demonstrate it: use an environment with demonstrations")
    try:
        actions = envs.call(partial(task.demonstrate, seed))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"demonstrate of {task.id} raised {with_place(error)}") from error
    try:
        return checked_actions(actions, lambda: f"demonstrate({seed})")
    except ContractError as error:
        raise error.of(task.id) from error


class NotRepeatableError(RuntimeError):
    """A replayed episode went another way: what the policy did so far cannot be brought back."""


@dataclass
class Record:
    """What an episode said and heard: enough to bring a fresh environment to the same point."""

    task: Task
    actions: list[str] = field(default_factory=list)
    heard: list[Observation | StepResult] = field(default_factory=list)
    """One answer to the reset and one to each action that was answered."""

    def check(self, number: int, answer: Observation | StepResult) -> None:
        """Answer `number` of a replay must be what it was."""
        if answer != self.heard[number]:
            raise NotRepeatableError(
                f"{self.task.id} did not repeat itself at answer {number} of a replay: it is not deterministic"
            )


class InProcess:
    """Environments in this process, each question answered as it is asked.

    An environment that raises (also SystemExit) is made again and brought to the same point once; if it raises again,
    the answer is a Failure. What returns something else than it should ends the run, and so does Ctrl-C.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._envs: dict[int, Environment] = {}
        self._ready: list[tuple[int, Answer]] = []

    def open(self, key: int, task: Task) -> None:
        self._records[key] = Record(task)
        self._ready.append((key, self._answer(key)))

    def step(self, key: int, action: str) -> None:
        self._records[key].actions.append(action)
        self._ready.append((key, self._answer(key)))

    def answers(self, at_least: int) -> list[tuple[int, Answer]]:
        ready, self._ready = self._ready, []
        return ready

    def close(self, key: int) -> None:
        self._records.pop(key, None)
        self._ready = [(other, answer) for other, answer in self._ready if other != key]
        self._discard(key)

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def __len__(self) -> int:
        return len(self._ready)

    def _answer(self, key: int) -> Answer:
        record = self._records[key]
        error: BaseException
        for _ in range(2):
            try:
                answer = self._asked(key, record)
                record.heard.append(answer)
                return answer
            except KeyboardInterrupt:
                raise
            except ContractError as raised:
                raise raised.of(record.task.id) from raised
            except BaseException as raised:
                error = raised
                self._discard(key)
        return Failure(error)

    def _asked(self, key: int, record: Record) -> Observation | StepResult:
        """The answer to the newest question, from the environment at hand or from a fresh one."""
        if key not in self._envs:
            env = self._envs[key] = record.task.make_env()
            answer: Observation | StepResult = begun(env)
            for number, action in enumerate(record.actions):
                record.check(number, answer)
                answer = acted(env, action)
            return answer
        return acted(self._envs[key], record.actions[-1])

    def _discard(self, key: int) -> None:
        env = self._envs.pop(key, None)
        if env is not None:
            closed(env)
