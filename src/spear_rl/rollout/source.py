"""Tasks by name, `package.module:function`, and what such a function returns. Says what is wrong with either."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any, overload

from spear_rl.errors import ConfigError, UserError
from spear_rl.rollout.contract import ContractError, checked_task, in_words, shown
from spear_rl.rollout.env import Task, TasksFn
from spear_rl.rollout.runner import same_folder


def loaded_tasks(name: str) -> TasksFn:
    """The function that `name` ("package.module:function") names; modules are also looked for in the current folder."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"{name!r} names no environment: write package.module:function, e.g. my_game:tasks")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with same_folder():
            module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{name}: there is no module {error.name}, neither installed nor in this folder"
            ) from error
        raise ConfigError(f"{name}: importing {module_name} needs {error.name}, which is not installed") from error
    except BaseException as error:  # also SystemExit, which would end the run as if all were well
        raise ConfigError(f"{name}: importing {module_name} raised {in_words(error)}") from error
    if not hasattr(module, function_name):
        raise ConfigError(f"{name}: the module {module_name} has no {function_name}")
    function = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(f"{name}: {function_name} is no function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def panel_of(tasks: TasksFn, split: str, **options: Any) -> Sequence[Task]:
    """The checked panel of a split.

    A list or tuple is checked at once and copied, so that it cannot grow. Another sequence may make its tasks as they
    are looked at; each is checked then.
    """
    with same_folder():
        panel = tasks(split, **options)
        if not isinstance(panel, Sequence) or isinstance(panel, str | bytes):
            raise ContractError(f"tasks({split!r}) returned {shown(panel)}, not a list of tasks")
        if not isinstance(panel, list | tuple):
            return _Lazy(panel, split)
        checked = tuple(checked_task(task, lambda: f"tasks({split!r})") for task in panel)
    for task_id, count in Counter(task.id for task in checked).items():
        if count > 1:
            raise ContractError(f"tasks({split!r}) returned the task id {shown(task_id)} {count} times")
    return checked


class _Lazy(Sequence[Task]):
    """A sequence that makes its tasks as they are looked at, each checked."""

    def __init__(self, tasks: Sequence[Task], split: str) -> None:
        self._tasks, self._split, self._length = tasks, split, len(tasks)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Task]: ...
    def __getitem__(self, place: int | slice) -> Task | Sequence[Task]:
        if isinstance(place, slice):
            return tuple(self[number] for number in range(*place.indices(self._length)))
        place = range(self._length)[place]
        try:
            task = self._tasks[place]
        except UserError:
            raise
        except Exception as error:
            raise ContractError(f"tasks({self._split!r})[{place}] raised {in_words(error)}") from error
        return checked_task(task, lambda: f"tasks({self._split!r})")
