"""Experts that demonstrate: a game and a seed in, the commands of one episode out."""

from collections.abc import Callable

from spear_rl.envs.household.experts.optimal import optimal_commands
from spear_rl.envs.household.experts.search import clumsy_commands, idle_commands, searched_commands
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.shared.dice import Dice

Expert = Callable[[Game, int], list[str]]

EXPERTS: dict[str, Expert] = {"search": searched_commands, "optimal": optimal_commands}
"""Win every game."""


def lazy_commands(game: Game, seed: int = 0) -> list[str]:
    """As optimal in half of the episodes; in the others looks around and gives up. Short episodes without mistakes
    teach a small model the commands soon; what is left to learn is to use them."""
    dice = Dice("lazy", seed)
    return idle_commands(game, dice) if dice.chance(0.5) else optimal_commands(game, seed)


DEMONSTRATORS: dict[str, Expert] = EXPERTS | {"clumsy": clumsy_commands, "lazy": lazy_commands}
"""All that a policy may learn from."""
