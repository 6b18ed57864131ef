"""The expert that knows where everything is: the shortest way to win a game."""

from collections.abc import Iterator
from itertools import permutations
from typing import TypeAlias

from spear_rl.envs.household.families import TaskSpec, parsed_task, type_of
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.world import World

Act: TypeAlias = tuple[str, int]
"""A command and the receptacle it happens at; the commands that walk there and open it are added later."""


def optimal_commands(game: Game, seed: int = 0) -> list[str]:
    """The fewest commands that win the game; the same for every seed."""
    if World(game).won:
        return []
    plans = sorted((_commands(game, acts) for acts in _plans(game, parsed_task(game.task))), key=len)
    for commands in plans:
        # An object may have the wanted name and still not count: some of ALFWorld's objects have no type.
        world = World(game)
        for command in commands:
            world.act(command)
        if world.won:
            return commands
    raise ValueError(f"this game cannot be won: {game.task}")


def _plans(game: Game, task: TaskSpec) -> Iterator[list[Act]]:
    targets = [(o, r) for o, r in _located(game, task.thing) if o in game.pickupable]
    places = [r for r, name in enumerate(game.receptacle_names) if type_of(name) == task.place]
    if task.family == "look_at_obj_in_light":
        lamps = [(o, r) for o, r in _located(game, task.place) if o in game.toggleable]
        for o, r in targets:
            for lamp, stand in lamps:
                yield [_take(game, o, r), (f"use {game.object_names[lamp]}", stand)]
    elif task.family == "pick_two_obj_and_place":
        for place in places:
            missing = 2 - sum(r == place for _, r in targets)
            outside = [(o, r) for o, r in targets if r != place]
            for order in permutations(outside, max(missing, 0)):
                yield [act for o, r in order for act in (_take(game, o, r), _move(game, o, place))]
    else:
        for o, r in targets:
            num_homes = sum(o in inside for inside in game.start_contents)
            for treated in _treatments(game, task, o):
                if num_homes > 1:
                    # In ALFWorld's rooms an object may be in two receptacles and stay in one when taken from the other.
                    yield [_take(game, o, r), *treated]
                for place in places:
                    yield [_take(game, o, r), *treated, _move(game, o, place)]


def _treatments(game: Game, task: TaskSpec, o: int) -> list[list[Act]]:
    treatment = task.treatment
    if treatment is None or o in game.start_flags[treatment.gains]:
        return [[]]
    doing = f"{treatment.verb} {game.object_names[o]} with"
    appliances = sorted(game.appliances[treatment.verb])
    return [[(f"{doing} {game.receptacle_names[a]}", a)] for a in appliances]


def _commands(game: Game, acts: list[Act]) -> list[str]:
    here, opened = game.start, set(game.start_opened)
    commands = []
    for command, receptacle in acts:
        name = game.receptacle_names[receptacle]
        if game.location_of[receptacle] != here:
            here = game.location_of[receptacle]
            commands.append(f"go to {name}")
        needs_open = command.startswith(("take ", "move "))
        if needs_open and receptacle in game.openable and receptacle not in opened:
            opened.add(receptacle)
            commands.append(f"open {name}")
        commands.append(command)
    return commands


def _located(game: Game, kind: str) -> list[tuple[int, int]]:
    """(object, receptacle) for every object of a type."""
    return [
        (o, r) for r, inside in enumerate(game.start_contents) for o in inside if type_of(game.object_names[o]) == kind
    ]


def _take(game: Game, o: int, r: int) -> Act:
    return f"take {game.object_names[o]} from {game.receptacle_names[r]}", r


def _move(game: Game, o: int, r: int) -> Act:
    return f"move {game.object_names[o]} to {game.receptacle_names[r]}", r
