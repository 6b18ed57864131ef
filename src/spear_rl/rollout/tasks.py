"""Tasks by name: of a function, `package.module:function`, whose panel is checked, or of a file of JSON lines."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from spear_rl.errors import ConfigError, UserError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.io.files import same_folder
from spear_rl.io.jsonl import numbered_lines
from spear_rl.rollout.contract import ContractError, checked_task, described
from spear_rl.rollout.env import Environment, Task, TasksFn
from spear_rl.settings.names import loaded


def loaded_tasks(name: str) -> TasksFn:
    """The function that `name` ("package.module:function") names; modules are also looked for in the current folder."""
    found: TasksFn = loaded(name, kind="environment", example="my_game:tasks")
    if hasattr(found, "reset") and hasattr(found, "step"):
        module, _, own = name.partition(":")
        what = "an environment" if not hasattr(found, "metadata") else "a Gymnasium environment"
        advice = f"write a function that lists tasks, def tasks(split), and name it: {module}:tasks"
        raise ConfigError(f"{name}: {own} is {what}, not its tasks: {advice} (docs/new_environment.md)")
    return found


def panel_of(tasks: TasksFn, split: str, **options: Any) -> Sequence[Task]:
    """The checked panel of a split; a lazy sequence's tasks are checked when they are read."""
    with same_folder():
        panel = tasks(split, **options)
        if not isinstance(panel, Sequence) or isinstance(panel, str | bytes):
            raise ContractError(f"tasks({split!r}) returned {described(panel)}, not a list of tasks")
        if not isinstance(panel, list | tuple):
            return _LazyPanel(panel, split)
        checked = tuple(checked_task(task, f"tasks({split!r})") for task in panel)
    for task_id, count in Counter(task.id for task in checked).items():
        if count > 1:
            raise ContractError(f"tasks({split!r}) returned the task id {described(task_id)} {count} times")
    return checked


def tasks_in_file(path: str, split: str) -> tuple[Task, ...]:
    """The tasks of a split in a file for agents: one JSON object per line, which the agent gets as `task.data`.

    `split` is train where a line does not say; `id`, by default the number of the line, and `family` are optional.
    """
    tasks, ids = [], dict[str, int]()
    for number, data in numbered_lines(path, key="task.env"):
        if not isinstance(data, dict):
            raise ConfigError(f"task.env: {path}, line {number} is no JSON object")
        own = str(data.get("id", f"line {number}"))
        if own in ids:
            raise ConfigError(f"task.env: {path}, line {number} has the id of line {ids[own]}: {clipped(own, 100)}")
        ids[own] = number
        if data.get("split", "train") == split:
            tasks.append(Task(own, partial(_without_environment, path), str(data.get("family", "")), data=data))
    return tuple(tasks)


def _without_environment(path: str) -> Environment:
    raise ConfigError(f"task.env: {path} has tasks for an agent: set task.agent=package.module:function")


class _LazyPanel(Sequence[Task]):
    """A sequence whose tasks are made, and checked, when they are read."""

    def __init__(self, tasks: Sequence[Task], split: str) -> None:
        self._tasks, self._split, self._length = tasks, split, len(tasks)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(self._length)))
        index = range(self._length)[index]
        try:
            task = self._tasks[index]
        except UserError:
            raise
        except Exception as error:
            raise ContractError(f"tasks({self._split!r})[{index}] raised {in_words(error)}") from error
        return checked_task(task, f"tasks({self._split!r})")
