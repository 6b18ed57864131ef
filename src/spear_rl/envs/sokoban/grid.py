"""Levels and states as text: the usual symbols, one character a cell."""

from __future__ import annotations

import hashlib

from spear_rl.envs.sokoban.rules import Level, Room, State

LEGEND = "# wall, - floor, . target, $ box, * box on a target, @ you, + you on a target"
_FLOORS = " -_"
_BOXES, _TARGETS, _PLAYERS = "$*", ".*+", "@+"


def read_level(text: str) -> Level:
    """The level that a text shows; floor may be a space, - or _, and short lines end in floor.

    ######
    #@-$.#    is a room of 6 x 3 cells in which pushing twice to the right solves it
    ######
    """
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    width = max(map(len, lines))
    cells = "".join(line.ljust(width) for line in lines)
    strange = set(cells) - set("#" + _FLOORS + _BOXES + _TARGETS + _PLAYERS)
    if strange:
        raise ValueError(f"a Sokoban level cannot have {min(strange)!r} in it: {LEGEND}")

    def places(symbols: str) -> frozenset[int]:
        return frozenset(cell for cell, symbol in enumerate(cells) if symbol in symbols)

    players, boxes, targets = places(_PLAYERS), places(_BOXES), places(_TARGETS)
    if len(players) != 1:
        raise ValueError(f"a Sokoban level has one player (@ or +), this one has {len(players)}")
    if not boxes or len(boxes) != len(targets):
        raise ValueError(
            f"a Sokoban level has as many boxes as targets, this one has {len(boxes)} boxes and {len(targets)} targets"
        )
    return Level(Room(width, len(lines), places("#"), targets), State(min(players), boxes))


class Drawing:
    """Draws states of one room as text; what never changes is drawn once."""

    __slots__ = ("_bare", "_targets", "_width")

    def __init__(self, room: Room) -> None:
        self._width, self._targets = room.width, room.targets
        symbols = "".join(
            "#" if cell in room.walls else "." if cell in room.targets else "-"
            for cell in range(room.width * room.height)
        )
        rows = (symbols[start : start + room.width] for start in range(0, len(symbols), room.width))
        self._bare = [symbol for row in rows for symbol in row + "\n"]

    def text(self, state: State) -> str:
        """The state, one line a row, without a line's end after the last one."""
        symbols, width, targets = self._bare.copy(), self._width, self._targets
        for box in state.boxes:
            symbols[box + box // width] = "*" if box in targets else "$"
        player = state.player
        symbols[player + player // width] = "+" if player in targets else "@"
        return "".join(symbols[:-1])


def grid_text(level: Level) -> str:
    """A level as text; `read_level` reads it back."""
    return Drawing(level.room).text(level.start)


def spaced(text: str) -> str:
    """A grid with a space between its cells."""
    return "\n".join(map(" ".join, text.split("\n")))


def content_hash(text: str) -> str:
    """The same for two grids if one is the other turned or mirrored."""
    rows = text.split("\n")
    alike = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*reversed(rows), strict=True)]
        alike += ["\n".join(rows), "\n".join(row[::-1] for row in rows)]
    return hashlib.sha256(min(alike).encode()).hexdigest()
