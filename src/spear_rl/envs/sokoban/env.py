"""Sokoban as an environment: directions in, the room as text, as an image, or as both out."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from spear_rl.envs.shared.answer_tags import parsed_answer
from spear_rl.envs.shared.scenes import MAX_TEXT, Board, Scene, Seen
from spear_rl.envs.sokoban.rules import DIRECTIONS, STEP_REWARD, Level, Outcome, Room, State, is_solved, moved, reward
from spear_rl.envs.sokoban.text import Drawing, described, published, read_level, spaced
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

View = Literal["spaced", "compact", "words", "none"]
"""A grid with spaces between its cells, so that a tokenizer keeps them apart, or without; a few words; no text."""
Symbols = Literal["ours", "published"]
"""published: the grid in the published runs' symbols, and no words about what the last move did."""
Parse = Literal["strict", "substring"]
"""strict: an action is a direction and nothing else; substring: it contains one, of which the first counts."""
TASK = "Your task is to push every box onto a target."
SEPARATOR = "||"
"""Between the moves of one turn."""
Picture = Callable[[Room, State], bytes]
"""Draws a state of a room as a PNG file."""

_MESSAGES = {
    Outcome.WALKED: "You walk {direction}.",
    Outcome.PUSHED: "You push a box {direction}.",
    Outcome.WALL: "A wall is in the way: nothing moves.",
    Outcome.STUCK: "The box cannot move {direction}: nothing moves.",
}
_NO_MOVE = "That is no move: nothing moves."
_ANY_DIRECTION = re.compile("|".join(DIRECTIONS))


class SokobanEnv:
    """One episode of one level, observed in a text view, with a picture where one is given.

    Every move costs 0.1, and so does a turn that moves nothing or cannot be parsed, so that doing nothing is never
    cheaper. A turn may have up to `moves_per_turn` moves; further ones are ignored.
    """

    __slots__ = ("_drawing", "_is_over", "_level", "_most", "_parse", "_picture", "_state", "_symbols", "_view")

    def __init__(
        self,
        level: Level,
        *,
        view: View = "spaced",
        picture: Picture | None = None,
        symbols: Symbols = "ours",
        parse: Parse = "strict",
        moves_per_turn: int = 1,
    ) -> None:
        self._level, self._drawing = level, Drawing(level.room)
        self._view, self._picture, self._symbols = view, picture, symbols
        self._parse, self._most = parse, moves_per_turn
        self._state = level.start
        self._is_over = True

    def reset(self) -> Observation:
        self._state = self._level.start
        self._is_over = False
        first = self._observation("This is the room." if self._view == "none" else "")
        return replace(first, task=TASK)

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode of sokoban is under way: make a new environment, or call reset() first")
        command, invalid = parsed_answer(action)
        directions = moves_in(command, parse=self._parse, most=self._most)
        if not directions:
            observation, invalid = self._observation(_NO_MOVE), invalid or INADMISSIBLE
            return StepResult(observation, reward=STEP_REWARD, invalid=invalid, success=False, action=command)
        room, earned, has_moved = self._level.room, 0.0, False
        messages: list[str] = []
        for direction in directions:
            before = self._state
            self._state, outcome = moved(room, before, DIRECTIONS.index(direction))
            earned += reward(room, before, self._state)
            has_moved |= outcome in (Outcome.WALKED, Outcome.PUSHED)
            messages.append(_MESSAGES[outcome].format(direction=direction))
            if is_solved(room, self._state):
                self._is_over = True
                messages.append("Solved!")
                break
        return StepResult(
            self._observation(" ".join(messages)),
            reward=earned,
            done=self._is_over,
            used_tool=has_moved,
            success=self._is_over,
            action=f" {SEPARATOR} ".join(directions),
        )

    def close(self) -> None:
        self._is_over = True

    def _observation(self, message: str) -> Observation:
        grid = text = self._drawing.text(self._state)
        if self._symbols == "published":
            text, message = published(grid), "This is the room." if self._view == "none" else ""
        if self._view == "spaced":
            text = spaced(text)
        elif self._view == "words":
            text, message = described(self._level.room, self._state), ""  # the words show the result of a move
        elif self._view == "none":
            text = ""
        text = "\n".join(part for part in (message, text) if part)
        images = () if self._picture is None else (self._picture(self._level.room, self._state),)
        return Observation(text, state_key=grid, choices=DIRECTIONS, images=images)


def moves_in(command: str, *, parse: Parse = "strict", most: int = 1) -> list[str]:
    """The directions in an action, `most` at most; none if it is not one.

    "right"                       -> right
    "right || up", most = 5       -> right, up
    "go right, then up"           -> none, or by substring right
    "right || jump", most = 5     -> none, or by substring right
    """
    parts = [part.strip() for part in command.split(SEPARATOR)] if most > 1 else [command]
    if parse == "substring":
        return [found[0] for part in parts if (found := _ANY_DIRECTION.search(part))][:most]
    said = [part for part in parts if part]
    return said[:most] if all(part in DIRECTIONS for part in said) else []


_CELLS = {
    "#": "wall", "-": "floor", ".": "target", "$": "box", "*": "home", "@": "player", "+": "player_home"
}  # fmt: skip


def boards(turns: Sequence[Seen]) -> list[Scene | None]:
    """The room at every turn: from the key of its state, from its text, or as the turn before it left it."""
    found, grid, action = list[Scene | None](), "", ""
    for turn in turns:
        grid = turn.state_key[:MAX_TEXT] or _grid_in(turn.observation[:MAX_TEXT]) or _grid_after(grid, action)
        action, is_grid = turn.action, grid and _CELLS.keys() >= set(grid) - {"\n"}
        found.append(Board(tuple(tuple(map(_CELLS.__getitem__, row)) for row in grid.split("\n"))) if is_grid else None)
    return found


def _grid_in(observation: str) -> str:
    lines = (line.replace(" ", "") for line in observation.split("\n"))
    return "\n".join(line for line in lines if "#" in line and _CELLS.keys() >= set(line))


def _grid_after(grid: str, action: str) -> str:
    try:
        room, state = read_level(grid)
    except ValueError:
        return ""
    for direction in moves_in(action, most=MAX_TEXT):
        state = moved(room, state, DIRECTIONS.index(direction))[0]
    return Drawing(room).text(state)
