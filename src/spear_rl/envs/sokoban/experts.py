"""Demonstrations: a level and a seed in, the moves of one episode out."""

from __future__ import annotations

from collections.abc import Callable

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.sokoban.rules import DIRECTIONS, Level, is_solved, moved
from spear_rl.envs.sokoban.solver import solution

Expert = Callable[[Level, int], list[str]]

QUICK_WEIGHT = 5.0


def optimal_moves(level: Level, seed: int = 0) -> list[str]:
    """A solution with the fewest moves; the same for every seed."""
    return _named(_solved(level))


def quick_moves(level: Level, seed: int = 0) -> list[str]:
    """A solution that is found a hundred times as fast and is at most five times as long; hardly ever much longer."""
    return _named(_solved(level, weight=QUICK_WEIGHT))


def hasty_moves(level: Level, seed: int = 0, *, errs: float = 0.1) -> list[str]:
    """Knows the way, but one move in ten goes anywhere. Leaves when a box is where it cannot come back from.

    Who imitates it has seen walls walked into, other mistakes, and how to go on after them.
    """
    dice, state = Dice("hasty", seed), level.start
    moves: list[str] = []
    plan = _solved(level)
    while not is_solved(level.room, state):
        if dice.chance(errs):
            direction = dice.below(4)
            plan = [] if direction != plan[0] else plan[1:]
        else:
            direction, plan = plan[0], plan[1:]
        state, _ = moved(level.room, state, direction)
        moves.append(DIRECTIONS[direction])
        if not plan and not is_solved(level.room, state):
            found = solution(Level(level.room, state))
            if found is None:
                return moves
            plan = found
    return moves


def clumsy_moves(level: Level, seed: int = 0) -> list[str]:
    """The hasty one with three moves in ten that go anywhere: who imitates it has met most mistakes, and makes them."""
    return hasty_moves(level, seed, errs=0.3)


def _solved(level: Level, *, weight: float = 1.0) -> list[int]:
    found = solution(level, weight=weight)
    if found is None:
        raise ValueError("this level cannot be solved")
    return found


def _named(directions: list[int]) -> list[str]:
    return [DIRECTIONS[direction] for direction in directions]


EXPERTS: dict[str, Expert] = {"optimal": optimal_moves, "quick": quick_moves}
"""Those who always solve it."""

DEMONSTRATORS: dict[str, Expert] = EXPERTS | {"hasty": hasty_moves, "clumsy": clumsy_moves}
"""Whom a policy may learn from."""
