"""The environments by name. Importing them needs no package besides Python: no torch, no optional extras."""

from spear_rl.envs import alfworld, household, lookup, sokoban, tool_math, webshop
from spear_rl.envs.household.plan import plans
from spear_rl.envs.shared.scenes import ScenesFn
from spear_rl.envs.sokoban.env import boards
from spear_rl.envs.tool_math.scenes import scripts
from spear_rl.envs.webshop.views import shown_pages
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

SCENES: dict[str, ScenesFn] = {
    "alfworld": plans,
    "household": plans,
    "sokoban": boards,
    "tool_math": scripts,
    "webshop": shown_pages,
}
"""How `spear view` pictures an episode, for environments that are more than their text."""
