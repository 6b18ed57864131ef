"""Experts that demonstrate: a level and a seed in, the moves of one episode out."""

from __future__ import annotations

from collections.abc import Callable

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.sokoban.rules import DIRECTIONS, Level, is_solved, moved
from spear_rl.envs.sokoban.solver import solution

Expert = Callable[[Level, int], list[str]]

QUICK_WEIGHT = 5.0


def optimal_moves(level: Level, seed: int = 0) -> list[str]:
    """A solution with the fewest moves; the same for every seed."""
    return [DIRECTIONS[direction] for direction in _solved(level)]


def quick_moves(level: Level, seed: int = 0) -> list[str]:
    """A solution found about a hundred times as fast, at most five times as long as the shortest and rarely so."""
    return [DIRECTIONS[direction] for direction in _solved(level, weight=QUICK_WEIGHT)]


def hasty_moves(level: Level, seed: int = 0, *, error_rate: float = 0.1) -> list[str]:
    """A solution in which one move in ten is random; it stops where a box can no longer be brought to a target.

    Its imitators see mistakes and how to continue after them.
    """
    dice, state = Dice("hasty", seed), level.start
    moves: list[str] = []
    plan = _solved(level)
    while not is_solved(level.room, state):
        if dice.chance(error_rate):
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
    """As hasty, with three random moves in ten."""
    return hasty_moves(level, seed, error_rate=0.3)


def _solved(level: Level, *, weight: float = 1.0) -> list[int]:
    found = solution(level, weight=weight)
    if found is None:
        raise ValueError("this level cannot be solved")
    return found


DEMONSTRATORS: dict[str, Expert] = {
    "optimal": optimal_moves,
    "quick": quick_moves,
    "hasty": hasty_moves,
    "clumsy": clumsy_moves,
}
