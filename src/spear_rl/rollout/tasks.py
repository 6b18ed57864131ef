"""Tasks by name, `package.module:function`, and what such a function returns. Says what is wrong with either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, overload

from spear_rl.errors import UserError
from spear_rl.io.escaping import in_words
from spear_rl.io.files import same_folder
from spear_rl.rollout.contract import ContractError, checked_task, shown
from spear_rl.rollout.env import Task, TasksFn
from spear_rl.settings.names import loaded


def loaded_tasks(name: str) -> TasksFn:
    """The function that `name` ("package.module:function") names; modules are also looked for in the current folder."""
    return loaded(name, kind="environment", example="my_game:tasks")  # type: ignore[no-any-return]


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
