"""Demonstrations: a game and a seed in, the commands of one episode out."""

from __future__ import annotations

import re
from collections.abc import Callable

from spear_rl.envs.household.experts.optimal import shortest_commands
from spear_rl.envs.household.experts.search import Searcher
from spear_rl.envs.household.generation.sentences import stated_errand
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.wording import NOTHING_HAPPENS
from spear_rl.envs.household.rules.world import World
from spear_rl.envs.shared.dice import Dice

_ARRIVED = re.compile(r"You arrive at ([\w ]{1,100})\.")

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
    """As the search, but hasty: it often reaches for the wanted thing where it is not, sometimes walks for nothing, and
    four times in ten only looks around and leaves.

    Who imitates it has seen mistakes and how to go on after them, and has much to improve on.
    """
    world, searcher, dice = World(game), Searcher(seed), Dice("clumsy", seed)
    if dice.chance(0.4):
        return _looking_around(world, dice)
    wanted = stated_errand(game.task.removeprefix("Your task is to: ")).thing
    names = [name for name in game.object_names if name.rsplit(" ", 1)[0] == wanted]
    observation = world.intro()
    commands: list[str] = []
    while not world.won:
        possible = world.commands()
        command = searcher.next_command(observation, possible)
        here = _ARRIVED.match(observation)
        grab = f"take {dice.choice(names)} from {here.group(1)}" if here else ""
        is_searching = command.startswith(("go to ", "open "))
        if grab and grab not in possible and is_searching and dice.chance(0.5):
            command = grab
        elif dice.chance(0.1):
            command = dice.choice([c for c in possible if c.startswith("go to ")])
        commands.append(command)
        observation = world.act(command) if command in possible else NOTHING_HAPPENS
    return commands


def _looking_around(world: World, dice: Dice, *, length: int = 4) -> list[str]:
    commands: list[str] = []
    for _ in range(length):
        idle = [c for c in world.commands() if c.startswith(("go to ", "examine ", "look", "inventory"))]
        commands.append(dice.choice(idle))
        world.act(commands[-1])
    return commands


EXPERTS: dict[str, Expert] = {"search": searched_commands, "optimal": optimal_commands}
"""Those who always win."""

DEMONSTRATORS: dict[str, Expert] = EXPERTS | {"clumsy": clumsy_commands}
"""Whom a policy may learn from."""
