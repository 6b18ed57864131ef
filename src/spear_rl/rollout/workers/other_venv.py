"""Tasks whose environments live in another virtual environment, with packages that this one must not have.

Such a task is a task like any other. In a worker of that virtual environment (`Pool(python=...)`) its environments are
the real ones; in any other process they are played through one such worker, a step at a time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from spear_rl.errors import ConfigError
from spear_rl.rollout.env import Environment, Observation, StepResult, Task
from spear_rl.rollout.tasks import loaded_tasks, panel_of
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.protocol import EnvironmentFailedError
from spear_rl.rollout.workers.runner import Answer, Failure


def tasks_elsewhere(split: str, *, python: str, name: str, path: Sequence[str] = (), **options: Any) -> Sequence[Task]:
    """The panel that `name` gives in the virtual environment of `python`, which needs no package of this one."""
    python = os.path.abspath(python)
    panel = _Panel(python, tuple(path), name, split, json.dumps(options, sort_keys=True))
    try:
        described = _colleague(python, panel.path).call(partial(_described, panel))
    except EnvironmentFailedError as error:
        raise ConfigError(f"{name} gives no tasks with {python}: {error}") from error
    return tuple(
        Task(
            id=task_id,
            make_env=partial(environment, panel, task_id),
            family=family,
            instructions=instructions,
            answer_format=answer_format,
            demonstrate=partial(_demonstrated, panel, task_id) if has_expert else None,
            instructions_role=role,
            unfinished_reward=unfinished,
        )
        for task_id, family, instructions, answer_format, has_expert, role, unfinished in described
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    """Everything it takes to find a panel again in another process."""

    python: str
    path: tuple[str, ...]
    name: str
    split: str
    options: str
    """As JSON."""


def environment(panel: _Panel, task_id: str) -> Environment:
    """An environment of a task from elsewhere: the real one where it lives, one that asks there anywhere else."""
    if sys.executable == panel.python:
        return _tasks(panel)[task_id].make_env()
    return _Remote(panel, task_id)


class _Remote:
    """An environment that lives in a worker of another virtual environment."""

    def __init__(self, panel: _Panel, task_id: str) -> None:
        self._task = Task(task_id, partial(environment, panel, task_id))
        self._pool, self._key = _colleague(panel.python, panel.path), id(self)

    def reset(self) -> Observation:
        self._pool.open(self._key, self._task)
        return self._answer()  # type: ignore[return-value]

    def step(self, action: str) -> StepResult:
        self._pool.step(self._key, action)
        return self._answer()  # type: ignore[return-value]

    def close(self) -> None:
        self._pool.close(self._key)

    def _answer(self) -> Answer:
        [(_, answer)] = self._pool.answers(1)
        if isinstance(answer, Failure):
            raise answer.error
        return answer


@lru_cache(maxsize=8)
def _colleague(python: str, path: tuple[str, ...]) -> Pool:
    """The one worker of a virtual environment that answers what is asked outside of any pool; it ends with us."""
    return Pool(num_workers=1, python=python, path=path)


@lru_cache(maxsize=8)
def _tasks(panel: _Panel) -> dict[str, Task]:
    tasks = panel_of(loaded_tasks(panel.name), panel.split, **json.loads(panel.options))
    return {task.id: task for task in tasks}


def _described(panel: _Panel) -> list[tuple[str, str, str, str, bool, str, float]]:
    return [
        (
            *(task.id, task.family, task.instructions, task.answer_format, task.demonstrate is not None),
            *(task.instructions_role, task.unfinished_reward),
        )
        for task in _tasks(panel).values()
    ]


def _demonstrated(panel: _Panel, task_id: str, seed: int) -> list[str]:
    if sys.executable != panel.python:
        actions = _colleague(panel.python, panel.path).call(partial(_demonstrated, panel, task_id, seed))
        return [str(action) for action in actions]
    demonstrate = _tasks(panel)[task_id].demonstrate
    return demonstrate(seed) if demonstrate else []
