"""Experts that demonstrate: a game and a seed in, the commands of one episode out."""

from collections.abc import Callable

from spear_rl.envs.household.experts.optimal import optimal_commands
from spear_rl.envs.household.experts.search import clumsy_commands, searched_commands
from spear_rl.envs.household.rules.game import Game

Expert = Callable[[Game, int], list[str]]

EXPERTS: dict[str, Expert] = {"search": searched_commands, "optimal": optimal_commands}
"""Win every game."""

DEMONSTRATORS: dict[str, Expert] = EXPERTS | {"clumsy": clumsy_commands}
"""All that a policy may learn from."""
