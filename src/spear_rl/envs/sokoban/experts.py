"""Experts that demonstrate: a level and a seed in, the moves of one episode out."""

from collections.abc import Callable

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.sokoban.rules import DIRECTIONS, Level, is_solved, moved
from spear_rl.envs.sokoban.solver import solution

Expert = Callable[[Level, int], list[str]]


def optimal_moves(level: Level, seed: int = 0, *, weight: float = 1.0) -> list[str]:
    """A solution with the fewest moves; the same for every seed."""
    found = solution(level, weight=weight)
    if found is None:
        raise ValueError("this level cannot be solved")
    return [DIRECTIONS[direction] for direction in found]


def quick_moves(level: Level, seed: int = 0) -> list[str]:
    """A solution found about a hundred times as fast, at most five times as long as the shortest and rarely so."""
    return optimal_moves(level, weight=5.0)


def hasty_moves(level: Level, seed: int = 0, *, error_rate: float = 0.1) -> list[str]:
    """A solution in which one move in ten is random; it stops where a box can no longer be brought to a target."""
    dice, (room, state) = Dice("hasty", seed), level
    moves: list[str] = []
    plan = optimal_moves(level)
    while not is_solved(room, state):
        move = DIRECTIONS[dice.below(4)] if dice.chance(error_rate) else plan[0]
        plan = plan[1:] if move == plan[0] else []
        state, _ = moved(room, state, DIRECTIONS.index(move))
        moves.append(move)
        if not plan and not is_solved(room, state):
            found = solution(Level(room, state))
            if found is None:
                return moves
            plan = [DIRECTIONS[direction] for direction in found]
    return moves


def clumsy_moves(level: Level, seed: int = 0) -> list[str]:
    """As hasty, with three random moves in ten."""
    return hasty_moves(level, seed, error_rate=0.3)


DEMONSTRATORS: dict[str, Expert] = {
    "optimal": optimal_moves,
    "quick": quick_moves,
    "hasty": hasty_moves,
    "clumsy": clumsy_moves,
}
