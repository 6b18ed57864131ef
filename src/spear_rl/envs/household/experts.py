"""Demonstrations: a game and a seed in, the commands of one won episode out."""

from __future__ import annotations

from collections.abc import Callable

from spear_rl.envs.household.dice import Dice
from spear_rl.envs.household.game import Game
from spear_rl.envs.household.optimal import shortest_commands
from spear_rl.envs.household.search import Searcher
from spear_rl.envs.household.wording import NOTHING_HAPPENS
from spear_rl.envs.household.world import World

Expert = Callable[[Game, int], list[str]]


def optimal_commands(game: Game, seed: int = 0) -> list[str]:
    """The shortest way to win; the same for every seed."""
    return shortest_commands(game)


def searched_commands(game: Game, seed: int = 0) -> list[str]:
    """How somebody who has to look for things wins; another seed looks in another order."""
    world, searcher = World(game), Searcher(seed)
    observation = world.intro()
    commands: list[str] = []
    # Every receptacle is walked to and opened at most once in a search; a delivery takes a few commands more.
    for _ in range(6 * len(game.receptacle_names) + 20):
        if world.won:
            return commands
        command = searcher.next_command(observation, world.commands())
        commands.append(command)
        observation = world.act(command)
    if world.won:
        return commands
    raise ValueError(f"the searching expert does not win this game: {game.task}")


def clumsy_commands(game: Game, seed: int = 0) -> list[str]:
    """As the search, but it strays: a third of its commands are walks for nothing, and a few do not work at all.

    Who imitates it knows every skill and what follows a mistake, but has a lot of time to save.
    """
    world, searcher, dice = World(game), Searcher(seed), Dice("clumsy", seed)
    observation = world.intro()
    commands: list[str] = []
    while not world.won:
        possible = world.commands()
        command = searcher.next_command(observation, possible)
        if dice.chance(0.3):
            command = dice.choice([c for c in possible if c.startswith(("go to ", "examine ", "look", "inventory"))])
        elif dice.chance(0.1):
            slip = f"take {dice.choice(game.object_names)} from {dice.choice(game.receptacle_names)}"
            command = command if slip in possible else slip
        commands.append(command)
        observation = world.act(command) if command in possible else NOTHING_HAPPENS
    return commands


EXPERTS: dict[str, Expert] = {"search": searched_commands, "optimal": optimal_commands, "clumsy": clumsy_commands}
