"""Levels and states as text: a grid of the usual symbols, or a few words for models too small to read a grid."""

import hashlib

from spear_rl.envs.sokoban.rules import DIRECTIONS, OFFSETS, Level, Room, State

LEGEND = "# wall, - floor, . target, $ box, * box on a target, @ you, + you on a target"
PUBLISHED_LEGEND = "# wall, _ floor, O target, X box, \u221a box on a target, P you, S you on a target"
_PUBLISHED = str.maketrans("-.*$@+", "_O\u221aXPS")
_SIDES = dict(zip(DIRECTIONS, OFFSETS, strict=True))
_CORNERS = {"upleft": (-1, -1), "upright": (1, -1), "downleft": (-1, 1), "downright": (1, 1)}


def read_level(text: str) -> Level:
    """The level in a grid; floor may be a space, - or _, and short lines end in floor.

    ######
    #@-$.#    is a room of 6 x 3 cells, solved by two pushes to the right
    ######
    """
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    width = max(map(len, lines))
    cells = "".join(line.ljust(width) for line in lines)
    strange = set(cells) - set("# -_.$*@+")
    if strange:
        raise ValueError(f"a Sokoban level cannot have {min(strange)!r} in it: {LEGEND}")

    def cells_with(symbols: str) -> frozenset[int]:
        return frozenset(cell for cell, symbol in enumerate(cells) if symbol in symbols)

    players, boxes, targets = cells_with("@+"), cells_with("$*"), cells_with(".*+")
    if len(players) != 1:
        raise ValueError(f"a Sokoban level has one player (@ or +), this one has {len(players)}")
    if not boxes or len(boxes) != len(targets):
        raise ValueError(
            f"a Sokoban level has as many boxes as targets, this one has {len(boxes)} boxes and {len(targets)} targets"
        )
    return Level(Room(width, len(lines), cells_with("#"), targets), State(min(players), boxes))


class Drawing:
    """Draws states of one room as a grid; the empty room is drawn once."""

    __slots__ = ("_empty", "_targets", "_width")

    def __init__(self, room: Room) -> None:
        self._width, self._targets = room.width, room.targets
        self._empty: list[str] = []
        for cell in range(room.width * room.height):
            self._empty.append("#" if cell in room.walls else "." if cell in room.targets else "-")
            if (cell + 1) % room.width == 0:
                self._empty.append("\n")

    def text(self, state: State) -> str:
        """One line per row, without a newline at the end."""
        symbols, width, targets = self._empty.copy(), self._width, self._targets
        for box in state.boxes:
            symbols[box + box // width] = "*" if box in targets else "$"
        player = state.player
        symbols[player + player // width] = "+" if player in targets else "@"
        return "".join(symbols[:-1])


def grid_text(level: Level) -> str:
    """The start of a level as a grid, the inverse of `read_level`."""
    return Drawing(level.room).text(level.start)


def published(grid: str) -> str:
    """A grid in the symbols of the published runs."""
    return grid.translate(_PUBLISHED)


def spaced(grid: str) -> str:
    """A grid with a space between its cells."""
    return "\n".join(map(" ".join, grid.split("\n")))


def content_hash(grid: str) -> str:
    """Equal for grids that are rotations or reflections of each other."""
    rows = grid.split("\n")
    alike = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*reversed(rows), strict=True)]
        alike += ["\n".join(rows), "\n".join(row[::-1] for row in rows)]
    return hashlib.sha256(min(alike).encode()).hexdigest()


def described(room: Room, state: State) -> str:
    """A state in one word per fact, always in the same order, so that a small tokenizer has one token per fact.

    walls_down_right box_up1_left2 target_up0_right2 beside_none corners_upleft

    means: walls below and right of the player; and for every box, its offset from the player, the offset of the nearest
    target from the box, and which of its sides and corners have a wall or another box. Other walls are left out.
    """
    words = [_word("walls", _blocked(room, frozenset(), state.player, _SIDES))]
    for box in sorted(state.boxes):
        words += [
            f"box_{_offset(room, state.player, box)}",
            f"target_{_offset(room, box, _nearest_target(room, box))}",
            _word("beside", _blocked(room, state.boxes, box, _SIDES)),
            _word("corners", _blocked(room, state.boxes, box, _CORNERS)),
        ]
    return " ".join(words)


def _word(what: str, names: list[str]) -> str:
    return "_".join([what, *(names or ["none"])])


def _blocked(room: Room, boxes: frozenset[int], cell: int, around: dict[str, tuple[int, int]]) -> list[str]:
    """The names of the neighbours of a cell that have a wall or one of `boxes`; beyond the edge all is wall."""
    blocked = []
    for name, (right, down) in around.items():
        x, y = cell % room.width + right, cell // room.width + down
        is_inside = 0 <= x < room.width and 0 <= y < room.height
        if not is_inside or (neighbour := y * room.width + x) in room.walls or neighbour in boxes:
            blocked.append(name)
    return blocked


def _nearest_target(room: Room, box: int) -> int:
    x, y = box % room.width, box // room.width
    return min(sorted(room.targets), key=lambda cell: abs(cell % room.width - x) + abs(cell // room.width - y))


def _offset(room: Room, start: int, end: int) -> str:
    """Rows, then columns, from one cell to another."""
    down = end // room.width - start // room.width
    right = end % room.width - start % room.width
    return f"{'down' if down > 0 else 'up'}{abs(down)}_{'right' if right > 0 else 'left'}{abs(right)}"
