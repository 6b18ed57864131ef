"""A state in a few words, for models too small to read a grid: where boxes and targets are, seen from the player.

Of walls only those beside the player are told, so it is not all there is to know; the grid is. Every state of a room
has the same number of words: what stands where is then a matter of counting.
"""

from __future__ import annotations

from spear_rl.envs.sokoban.rules import WALL, Room, State


def described(room: Room, state: State) -> str:
    """For example, with a box one row up and two columns left of the player, and a target three columns right of it:

    box up1 left2 target up0 right3 beside floor wall floor floor

    A box's target is the nearest one; what is beside the player is listed up, down, left, right.
    """
    boxes = (
        f"box {_way(room, state.player, box)} target {_way(room, box, _nearest(room, box))}"
        for box in sorted(state.boxes)
    )
    around = (_name(room, state, cell) for cell in room.beside[state.player])
    return " ".join([*boxes, "beside", *around])


def _nearest(room: Room, box: int) -> int:
    x, y = box % room.width, box // room.width
    return min(sorted(room.targets), key=lambda cell: abs(cell % room.width - x) + abs(cell // room.width - y))


def _way(room: Room, start: int, end: int) -> str:
    """How far it is from one cell to another: rows, then columns."""
    down = end // room.width - start // room.width
    right = end % room.width - start % room.width
    return f"{'down' if down > 0 else 'up'}{abs(down)} {'right' if right > 0 else 'left'}{abs(right)}"


def _name(room: Room, state: State, cell: int) -> str:
    if cell == WALL:
        return "wall"
    if cell in state.boxes:
        return "box"
    return "target" if cell in room.targets else "floor"
