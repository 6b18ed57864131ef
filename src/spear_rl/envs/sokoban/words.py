"""A state in a few words, for models too small to read a grid: where things are, seen from the player.

What is not beside the player or a box is left out, so it is not all there is to know; the grid is.
"""

from __future__ import annotations

from spear_rl.envs.sokoban.rules import WALL, Room, State


def described(room: Room, state: State) -> str:
    """For example, with one box one row up and two columns left of the player:

    box 1 up 2 left, target 3 right of it, beside it floor floor wall you; beside you floor wall floor floor

    What is beside something is listed up, down, left, right; a box's target is the nearest one.
    """
    boxes = (
        f"box {_way(room, state.player, box)}, target {_way(room, box, _nearest(room, box))} of it, "
        f"beside it {_around(room, state, box)}"
        for box in sorted(state.boxes)
    )
    return "; ".join([*boxes, f"beside you {_around(room, state, state.player)}"])


def _nearest(room: Room, box: int) -> int:
    x, y = box % room.width, box // room.width
    return min(sorted(room.targets), key=lambda cell: abs(cell % room.width - x) + abs(cell // room.width - y))


def _way(room: Room, start: int, end: int) -> str:
    """How to get from a cell to another: `1 up 2 left`; `here` if it is the same one."""
    down = end // room.width - start // room.width
    right = end % room.width - start % room.width
    steps = []
    if down:
        steps.append(f"{abs(down)} {'down' if down > 0 else 'up'}")
    if right:
        steps.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return " ".join(steps) or "here"


def _around(room: Room, state: State, cell: int) -> str:
    return " ".join(_name(room, state, other) for other in room.beside[cell])


def _name(room: Room, state: State, cell: int) -> str:
    if cell == WALL:
        return "wall"
    if cell in state.boxes:
        return "box"
    if cell == state.player:
        return "you"
    return "target" if cell in room.targets else "floor"
