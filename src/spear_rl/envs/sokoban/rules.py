"""The rules of Sokoban: one player walks and pushes boxes, one at a time, until every box is on a target.

Cells are numbered row by row. Knows no text, no pictures and no levels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

DIRECTIONS = ("up", "down", "left", "right")
OPPOSITE = (1, 0, 3, 2)
"""The number of the way back, for every direction's number."""
WALL = -1
"""What lies beyond a floor cell that has a wall, or the edge of the room, beside it."""

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0


class State(NamedTuple):
    """What a move can change."""

    player: int
    boxes: frozenset[int]


class Outcome(StrEnum):
    """What a move led to."""

    WALKED = "walked"
    PUSHED = "pushed"
    WALL = "wall"
    """Nothing moved: a wall is in the way."""
    STUCK = "stuck"
    """Nothing moved: a box is in the way that cannot be pushed."""


@dataclass(frozen=True)
class Room:
    """What no move can change. Beyond its edge all is wall."""

    width: int
    height: int
    walls: frozenset[int]
    targets: frozenset[int]

    @cached_property
    def floor(self) -> tuple[int, ...]:
        """All cells without a wall, in order."""
        return tuple(cell for cell in range(self.width * self.height) if cell not in self.walls)

    @cached_property
    def beside(self) -> tuple[tuple[int, int, int, int], ...]:
        """For every cell the ones above, below, left and right of it; WALL where there is no floor."""
        return tuple(
            (
                self._floor_at(cell - self.width, cell >= self.width),
                self._floor_at(cell + self.width, cell < self.width * (self.height - 1)),
                self._floor_at(cell - 1, cell % self.width > 0),
                self._floor_at(cell + 1, cell % self.width < self.width - 1),
            )
            for cell in range(self.width * self.height)
        )

    def _floor_at(self, cell: int, is_inside: bool) -> int:
        return cell if is_inside and cell not in self.walls else WALL


class Level(NamedTuple):
    """A room and how a game in it starts."""

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


def played(room: Room, state: State, directions: Iterable[int]) -> State:
    """The state after some moves."""
    for direction in directions:
        state, _ = moved(room, state, direction)
    return state


def is_solved(room: Room, state: State) -> bool:
    return state.boxes <= room.targets


def reward(room: Room, before: State, now: State) -> float:
    """Of a move: a little is lost with each, a box that comes to a target pays, one that leaves it costs."""
    gained = len(now.boxes & room.targets) - len(before.boxes & room.targets)
    return STEP_REWARD + BOX_REWARD * gained + SOLVED_REWARD * is_solved(room, now)
