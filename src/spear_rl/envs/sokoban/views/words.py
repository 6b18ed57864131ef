"""A state in a few words, for models too small to read a grid: one word a fact, as many for every state of a room.

A tokenizer of its own words then has a token a fact. Walls are told where the next moves meet them, beside the player
and around every box, so it is not all there is to know; the grid is.
"""

from __future__ import annotations

from collections.abc import Iterable

from spear_rl.envs.sokoban.rules import DIRECTIONS, Room, State

_SIDES = dict(zip(DIRECTIONS, ((0, -1), (0, 1), (-1, 0), (1, 0)), strict=True))
_CORNERS = {"upleft": (-1, -1), "upright": (1, -1), "downleft": (-1, 1), "downright": (1, 1)}


def described(room: Room, state: State) -> str:
    """For example, with the box one row up and two columns left of the player, and its target two columns right of it:

    walls_down_right box_up1_left2 target_up0_right2 beside_none corners_upleft

    - walls: on which sides of the player there is one;
    - then of every box: where it is, seen from the player; where the nearest target is, seen from the box; on which of
      its sides and at which of its corners there is a wall or another box.
    """
    words = [_listed("walls", _shut(room, frozenset(), state.player, _SIDES))]
    for box in sorted(state.boxes):
        words += [
            f"box_{_way(room, state.player, box)}",
            f"target_{_way(room, box, _nearest(room, box))}",
            _listed("beside", _shut(room, state.boxes, box, _SIDES)),
            _listed("corners", _shut(room, state.boxes, box, _CORNERS)),
        ]
    return " ".join(words)


def _listed(what: str, names: Iterable[str]) -> str:
    return "_".join([what, *(list(names) or ["none"])])


def _shut(room: Room, boxes: frozenset[int], cell: int, around: dict[str, tuple[int, int]]) -> list[str]:
    """The names of the cells around one that have a wall or one of `boxes` in them; beyond the edge all is wall."""
    column, row = cell % room.width, cell // room.width
    shut = []
    for name, (right, down) in around.items():
        x, y = column + right, row + down
        inside = 0 <= x < room.width and 0 <= y < room.height
        if not inside or (there := y * room.width + x) in room.walls or there in boxes:
            shut.append(name)
    return shut


def _nearest(room: Room, box: int) -> int:
    x, y = box % room.width, box // room.width
    return min(sorted(room.targets), key=lambda cell: abs(cell % room.width - x) + abs(cell // room.width - y))


def _way(room: Room, start: int, end: int) -> str:
    """How far it is from one cell to another: rows, then columns."""
    down = end // room.width - start // room.width
    right = end % room.width - start % room.width
    return f"{'down' if down > 0 else 'up'}{abs(down)}_{'right' if right > 0 else 'left'}{abs(right)}"
