"""Tasks whose environments live in another virtual environment, with packages that this one does not have.

In a worker of that virtual environment (`Pool(python=...)`) a task makes its real environment. In any other process it
makes one that forwards every step to such a worker.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from spear_rl.errors import ConfigError
from spear_rl.rollout.env import Environment, Observation, StepResult, Task
from spear_rl.rollout.tasks import loaded_tasks, panel_of
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.protocol import EnvironmentFailedError
from spear_rl.rollout.workers.runner import Failure

T = TypeVar("T", Observation, StepResult)
_PLAIN_FIELDS = ("id", "family", "instructions", "answer_format", "instructions_role", "unfinished_reward", "tools")


def tasks_from_other_venv(split: str, *, python: str, name: str, **options: Any) -> Sequence[Task]:
    """The panel that `name` gives in the virtual environment of `python`, which needs no package of this one."""
    panel = _Panel(os.path.abspath(python), name, split, json.dumps(options, sort_keys=True))
    try:
        described = _shared_worker(panel.python).call(partial(_described_tasks, panel))
    except EnvironmentFailedError as error:
        raise ConfigError(f"{name} gives no tasks with {panel.python}: {error}") from error
    return tuple(
        Task(
            **fields | {"tools": tuple(fields["tools"])},
            make_env=partial(_make_env, panel, fields["id"]),
            demonstrate=partial(_demonstrate, panel, fields["id"]) if has_expert else None,
        )
        for fields, has_expert in described
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    """Identifies a panel in any process."""

    python: str
    name: str
    split: str
    options: str
    """As JSON."""


def _make_env(panel: _Panel, task_id: str) -> Environment:
    return _tasks(panel)[task_id].make_env() if sys.executable == panel.python else _RemoteEnv(panel, task_id)


class _RemoteEnv:
    """Forwards to an environment in a worker of another virtual environment."""

    def __init__(self, panel: _Panel, task_id: str) -> None:
        self._task = Task(task_id, partial(_make_env, panel, task_id))
        self._pool, self._key = _shared_worker(panel.python), id(self)

    def reset(self) -> Observation:
        self._pool.open(self._key, self._task)
        return self._answer(Observation)

    def step(self, action: str) -> StepResult:
        self._pool.step(self._key, action)
        return self._answer(StepResult)

    def close(self) -> None:
        self._pool.close(self._key)

    def _answer(self, kind: type[T]) -> T:
        [(_, answer)] = self._pool.answers(1)
        if isinstance(answer, Failure):
            raise answer.error
        assert isinstance(answer, kind)
        return answer


@lru_cache(maxsize=8)
def _shared_worker(python: str) -> Pool:
    """One worker per virtual environment for requests outside of any pool; it ends with this process."""
    return Pool(num_workers=1, python=python)


@lru_cache(maxsize=8)
def _tasks(panel: _Panel) -> dict[str, Task]:
    tasks = panel_of(loaded_tasks(panel.name), panel.split, **json.loads(panel.options))
    return {task.id: task for task in tasks}


def _described_tasks(panel: _Panel) -> list[tuple[dict[str, Any], bool]]:
    """(plain fields, whether it has an expert) of every task."""
    tasks = _tasks(panel).values()
    return [({name: getattr(task, name) for name in _PLAIN_FIELDS}, task.demonstrate is not None) for task in tasks]


def _demonstrate(panel: _Panel, task_id: str, seed: int) -> list[str]:
    if sys.executable != panel.python:
        actions = _shared_worker(panel.python).call(partial(_demonstrate, panel, task_id, seed))
        return [str(action) for action in actions]
    demonstrate = _tasks(panel)[task_id].demonstrate
    return demonstrate(seed) if demonstrate else []
