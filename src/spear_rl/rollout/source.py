"""Tasks by name: `package.module:function`."""

from __future__ import annotations

from spear_rl.names import loaded
from spear_rl.rollout.env import TasksFn


def loaded_tasks(name: str) -> TasksFn:
    """The function that `name` names; modules are also looked for in the current folder."""
    return loaded(name, kind="environment", example="my_game:tasks")  # type: ignore[no-any-return]
