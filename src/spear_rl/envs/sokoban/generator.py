"""Generates levels from seeds: boxes are pulled away from their targets, so pushing them back solves the level.

Two generators: ours aims at a number of pushes; the published one, after gym_sokoban's description, takes what it gets.
"""

import math
import time
from dataclasses import astuple, dataclass
from typing import Literal

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.sokoban.rules import OFFSETS, OPPOSITE, WALL, Level, Room, State
from spear_rl.envs.sokoban.solver import pushes_needed
from spear_rl.errors import OptionError

MAX_ROOMS = 10_000
"""Rooms tried for one level before its shape counts as impossible."""
MAX_STATES = 20_000
"""States that the published reverse play looks at; a room of 6 x 6 with one box has at most 240."""

_STAMPS = (
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (0, 1)),
    ((0, 0), (1, 0), (0, 1)),
    ((-1, 0), (0, 0), (-1, 1), (0, 1)),
)
"""The patterns of the published floor: a row, a column, two corners and a square."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size and difficulty of generated levels."""

    width: int
    height: int
    num_boxes: int
    pushes: tuple[int, ...]
    """The lower bound of a level's pushes; consecutive seeds alternate between these."""
    floor: tuple[float, float] = (0.55, 0.9)
    """The fraction of the inner cells that is floor, at least and at most."""
    rooms: Literal["ours", "published"] = "ours"
    """published: after gym_sokoban's description, as they come; pushes and floor then mean nothing."""

    def __post_init__(self) -> None:
        inner = (self.width - 2) * (self.height - 2)
        if min(self.width, self.height) < 3 or max(self.width, self.height) > 40:
            raise OptionError(f"width: a room is 3 to 40 cells wide and high, not {self.width} x {self.height}")
        if not 1 <= self.num_boxes <= 12 or 2 * self.num_boxes + 1 > inner * self.floor[0]:
            raise OptionError(f"num_boxes: {self.num_boxes} boxes do not fit into {self.width} x {self.height} cells")
        if not self.pushes or min(self.pushes) < 1:
            raise OptionError("min_pushes must be 1 or more and at most max_pushes")


LEVELS: dict[str, Shape] = {
    "starter": Shape(6, 6, 1, pushes=(1, 2), floor=(0.75, 1.0)),
    "easy": Shape(6, 6, 1, pushes=(1, 2, 3, 4)),
    "medium": Shape(7, 7, 2, pushes=(3, 5, 7, 9)),
    "hard": Shape(10, 10, 4, pushes=(8, 12, 16, 20)),
}
PUBLISHED = Shape(6, 6, 1, pushes=(1,), rooms="published")


def generated_level(shape: Shape, seed: int, *, deadline: float = math.inf) -> Level:
    """The level of a seed; an error if it is not found before `deadline` (of time.monotonic)."""
    is_ours, values = shape.rooms == "ours", astuple(shape)
    dice = Dice("sokoban", *(values[:-1] if is_ours else values), seed)
    wanted = shape.pushes[seed % len(shape.pushes)]
    for _ in range(MAX_ROOMS):
        if time.monotonic() > deadline:
            raise OptionError(
                f"width: levels of {shape.width} x {shape.height} with {shape.num_boxes} boxes and {wanted} pushes "
                "take too long to find: take a smaller room, fewer boxes or lower max_pushes"
            )
        floor = _carved_floor(dice, shape) if is_ours else _stamped_floor(dice, shape)
        if len(floor) <= shape.num_boxes:
            continue
        *targets, player = dice.shuffled(sorted(floor))[: shape.num_boxes + 1]
        walls = frozenset(range(shape.width * shape.height)) - floor
        room = Room(shape.width, shape.height, walls, frozenset(targets))
        if is_ours:
            start = _after_pulls(dice, room, State(player, room.targets), wanted)
        else:
            start = _reverse_played(room, player)
        if start is not None:
            return Level(room, start)
    raise OptionError(
        f"max_pushes: no room of {shape.width} x {shape.height} with {shape.num_boxes} boxes and {wanted} pushes was "
        "found: lower max_pushes or take a larger room"
    )


def _carved_floor(dice: Dice, shape: Shape) -> set[int]:
    """The cells of a random walk inside the outer wall: a connected floor."""
    columns, rows = shape.width - 2, shape.height - 2
    low, high = (round(share * columns * rows) for share in shape.floor)
    wanted = dice.between(max(low, 2 * shape.num_boxes + 1), max(high, 2 * shape.num_boxes + 1))
    x, y = dice.below(columns), dice.below(rows)
    carved = {(x, y)}
    while len(carved) < wanted:
        step_x, step_y = dice.choice(OFFSETS)
        x, y = min(max(x + step_x, 0), columns - 1), min(max(y + step_y, 0), rows - 1)
        carved.add((x, y))
    return {(y + 1) * shape.width + x + 1 for x, y in carved}


def _stamped_floor(dice: Dice, shape: Shape) -> set[int]:
    """The published floor: a random walk, which turns with probability 0.35, stamps a small pattern at every step."""
    x, y = dice.between(1, shape.width - 1), dice.between(1, shape.height - 1)
    heading, floor = dice.choice(OFFSETS), set()
    for _ in range(int(1.7 * (shape.width + shape.height))):
        if dice.chance(0.35):
            heading = dice.choice(OFFSETS)
        x = min(max(x + heading[0], 1), shape.width - 2)
        y = min(max(y + heading[1], 1), shape.height - 2)
        stamp = [(x + right, y + down) for right, down in dice.choice(_STAMPS)]
        floor |= {(a, b) for a, b in stamp if 0 < a < shape.width - 1 and 0 < b < shape.height - 1}
    return {b * shape.width + a for a, b in floor}


def _reverse_played(room: Room, player: int) -> State | None:
    """The published reverse play: the state, among those that walks and pulls lead to, with the highest score.

    A depth-first search, first pulls and then walks. The score is the number of pulls on the way times the distance of
    the boxes from where they began, in cells; 0 where a target is covered. None if no state scores.
    """
    homes = tuple(sorted(room.targets))
    stack, seen, best, found = [(player, homes, 0)], set[tuple[int, tuple[int, ...]]](), 0, None
    while stack and len(seen) < MAX_STATES:
        here, boxes, num_pulls = stack.pop()
        if (here, boxes) in seen:
            continue
        seen.add((here, boxes))
        score = num_pulls * sum(_distance(room, *pair) for pair in zip(homes, boxes, strict=True))
        if score > best and room.targets.isdisjoint((here, *boxes)):
            best, found = score, State(here, frozenset(boxes))
        first, then = [], []
        for direction, ahead in enumerate(room.beside[here]):
            if ahead == WALL or ahead in boxes:
                continue
            walk, behind = (ahead, boxes, num_pulls), room.beside[here][OPPOSITE[direction]]
            pulled = tuple(here if box == behind else box for box in boxes)
            first.append((ahead, pulled, num_pulls + 1) if behind in boxes else walk)
            then.append(walk)
        stack += reversed([*first, *then])
    return found


def _distance(room: Room, a: int, b: int) -> int:
    return abs(a % room.width - b % room.width) + abs(a // room.width - b // room.width)


def _after_pulls(dice: Dice, room: Room, end: State, wanted: int) -> State | None:
    """The state after random pulls until `wanted` pushes are needed; None if that takes too long."""
    player, boxes = end
    seen = {boxes}
    for _ in range(10 * wanted):
        pulls = _pulls(room, player, boxes)
        if not pulls:
            return None
        # Prefer new positions of the boxes, or pulls would undo each other.
        player, boxes = dice.choice([pull for pull in pulls if pull[1] not in seen] or pulls)
        seen.add(boxes)
        if pushes_needed(room, boxes) == wanted:
            return State(dice.choice(sorted(_reachable(room, player, boxes))), boxes)
    return None


def _pulls(room: Room, player: int, boxes: frozenset[int]) -> list[tuple[int, frozenset[int]]]:
    """(player, boxes) after every possible pull."""
    reached, found = _reachable(room, player, boxes), []
    for box in sorted(boxes):
        for direction, stand in enumerate(room.beside[box]):
            if stand in reached:
                back = room.beside[stand][direction]
                if back != WALL and back not in boxes:
                    found.append((back, boxes - {box} | {stand}))
    return found


def _reachable(room: Room, player: int, boxes: frozenset[int]) -> set[int]:
    """The cells the player can walk to."""
    reached, stack, beside = {player}, [player], room.beside
    while stack:
        for ahead in beside[stack.pop()]:
            if ahead != WALL and ahead not in reached and ahead not in boxes:
                reached.add(ahead)
                stack.append(ahead)
    return reached
