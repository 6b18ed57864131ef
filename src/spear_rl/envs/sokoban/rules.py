"""The rules of Sokoban: the player pushes boxes onto targets. Cells are numbered row by row."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

DIRECTIONS = ("up", "down", "left", "right")
OFFSETS = ((0, -1), (0, 1), (-1, 0), (1, 0))
"""Columns to the right and rows down, for every direction's number."""
OPPOSITE = (1, 0, 3, 2)
"""For every direction's number, that of the opposite direction."""
WALL = -1
"""In place of a neighbouring cell: a wall, or the edge of the room."""

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0


class State(NamedTuple):
    """What a move can change."""

    player: int
    boxes: frozenset[int]


class Outcome(StrEnum):
    """The result of a move; nothing moves at a wall, or at a box that cannot be pushed (stuck)."""

    WALKED = "walked"
    PUSHED = "pushed"
    WALL = "wall"
    STUCK = "stuck"


@dataclass(frozen=True)
class Room:
    """What no move can change. Beyond the edge all is wall."""

    width: int
    height: int
    walls: frozenset[int]
    targets: frozenset[int]

    @cached_property
    def beside(self) -> tuple[tuple[int, int, int, int], ...]:
        """For every cell its neighbours up, down, left and right; WALL where there is no floor."""
        width, cells = self.width, range(self.width * self.height)
        floor = frozenset(cells) - self.walls
        return tuple(
            (
                cell - width if cell - width in floor else WALL,
                cell + width if cell + width in floor else WALL,
                cell - 1 if cell % width and cell - 1 in floor else WALL,
                cell + 1 if (cell + 1) % width and cell + 1 in floor else WALL,
            )
            for cell in cells
        )


class Level(NamedTuple):
    """A room and its first state."""

    room: Room
    start: State


def moved(room: Room, state: State, direction: int) -> tuple[State, Outcome]:
    """The state after a move, which is the same one if nothing could move."""
    player, boxes = state
    ahead = room.beside[player][direction]
    if ahead == WALL:
        return state, Outcome.WALL
    if ahead not in boxes:
        return State(ahead, boxes), Outcome.WALKED
    behind = room.beside[ahead][direction]
    if behind == WALL or behind in boxes:
        return state, Outcome.STUCK
    return State(ahead, boxes - {ahead} | {behind}), Outcome.PUSHED


def is_solved(room: Room, state: State) -> bool:
    return state.boxes <= room.targets


def reward(room: Room, before: State, now: State) -> float:
    """The reward of a move: a cost per step, plus or minus 1 per box that reaches or leaves a target, 10 at the end."""
    gained = len(now.boxes & room.targets) - len(before.boxes & room.targets)
    return STEP_REWARD + BOX_REWARD * gained + SOLVED_REWARD * is_solved(room, now)
