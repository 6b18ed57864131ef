"""The environments by name. Importing them needs no package besides Python: no torch, no optional extras."""

import inspect
from functools import partial

from spear_rl.envs import alfworld, household, lookup, search, sokoban, tool_math, tools, webshop
from spear_rl.envs.adapters import ADAPTERS
from spear_rl.envs.household.plan import plans
from spear_rl.envs.shared.scenes import ScenesFn
from spear_rl.envs.sokoban.env import boards
from spear_rl.envs.tool_math.scenes import scripts
from spear_rl.envs.webshop.views import shown_pages
from spear_rl.errors import ConfigError
from spear_rl.rollout.env import TasksFn
from spear_rl.rollout.tasks import loaded_tasks
from spear_rl.rollout.workers.other_venv import tasks_from_other_venv

ENVIRONMENTS: dict[str, TasksFn] = {
    "alfworld": alfworld.tasks,
    "household": household.tasks,
    "lookup": lookup.tasks,
    "search": search.tasks,
    "sokoban": sokoban.tasks,
    "tool_math": tool_math.tasks,
    "tools": tools.tasks,
    "webshop": webshop.tasks,
}
"""The one place to add an environment."""

SCENES: dict[str, ScenesFn] = {
    "alfworld": plans,
    "household": plans,
    "sokoban": boards,
    "tool_math": scripts,
    "webshop": shown_pages,
}
"""How `spear view` pictures an episode, for environments that are more than their text."""


def tasks_fn(name: str, *, python: str = "") -> TasksFn:
    """The tasks function of a name: ours, `prefix:ID` of an adapter, or a user's `package.module:function`.

    A prefix of `ADAPTERS` wins over a module of that name. With `python` it runs in that virtual environment.
    """
    prefix, _, id = name.partition(":")
    if name not in ENVIRONMENTS and ":" not in name:
        prefixes = ", ".join(f"{known}:ID" for known in ADAPTERS)
        choices = f"{', '.join(ENVIRONMENTS)}, {prefixes}, or your own as package.module:function"
        advice = f"task.env: {name} needs what to play after a colon, {name}:ID" if name in ADAPTERS else ""
        raise ConfigError(advice or f"task.env: there is no environment {name!r}; there are: {choices}")
    own = {"id": id} if prefix in ADAPTERS else {}
    if own and not id:
        raise ConfigError(f"task.env: {name} needs what to play after the colon, {prefix}:ID")
    if python:
        ours = ENVIRONMENTS.get(name)
        path = f"{ours.__module__}:tasks" if ours else ADAPTERS[prefix] if own else name
        return partial(tasks_from_other_venv, python=python, name=path, **own)
    if own:
        return partial(loaded_tasks(ADAPTERS[prefix]), **own)
    return ENVIRONMENTS[name] if name in ENVIRONMENTS else loaded_tasks(name)


def option_names(tasks: TasksFn) -> list[str] | None:
    """The options of a tasks function that a user may set; None if it takes any, or does not say."""
    try:
        parameters = inspect.signature(tasks).parameters.values()
    except (ValueError, TypeError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    bound = tasks.keywords if isinstance(tasks, partial) else {}
    return [p.name for p in parameters if p.name != "split" and p.name not in bound]
