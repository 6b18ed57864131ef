"""The environments by name. Importing them needs no package besides Python: no torch, no optional extras."""

from spear_rl.envs import alfworld, household, lookup, sokoban, tool_math, webshop
from spear_rl.rollout.env import TasksFn

ENVIRONMENTS: dict[str, TasksFn] = {
    "alfworld": alfworld.tasks,
    "household": household.tasks,
    "lookup": lookup.tasks,
    "sokoban": sokoban.tasks,
    "tool_math": tool_math.tasks,
    "webshop": webshop.tasks,
}
"""The one place to add an environment."""
