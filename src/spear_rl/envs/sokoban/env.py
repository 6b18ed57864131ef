"""Sokoban as an environment: the policy says a direction, the room comes back as text, as a picture, or as both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from spear_rl.envs.household.action import said_command
from spear_rl.envs.sokoban.grid import Drawing, spaced
from spear_rl.envs.sokoban.rules import DIRECTIONS, STEP_REWARD, Level, Outcome, Room, State, is_solved, moved, reward
from spear_rl.envs.sokoban.views.words import described
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

View = Literal["spaced", "compact", "words", "none"]
Picture = Callable[[Room, State], bytes]
"""Draws a state of a room as a PNG file."""

_TOLD = {
    Outcome.WALKED: "You walk {direction}.",
    Outcome.PUSHED: "You push a box {direction}.",
    Outcome.WALL: "A wall is in the way: nothing moves.",
    Outcome.STUCK: "The box cannot move {direction}: nothing moves.",
}
_NO_MOVE = "That is no move: nothing moves."


class SokobanEnv:
    """One episode of one level.

    Every turn is a step that costs its 0.1, also one that moves nothing or cannot be read: doing nothing must not be
    cheaper than trying.

    Args:
        view: how the room is put into text: its cells with spaces between them, so that a tokenizer keeps them apart
            (spaced), without (compact), in a few words (words), or not at all (none).
        picture: draws the room; left out, observations have no image.
    """

    __slots__ = ("_drawing", "_is_over", "_level", "_picture", "_state", "_view")

    def __init__(self, level: Level, *, view: View = "spaced", picture: Picture | None = None) -> None:
        self._level, self._drawing = level, Drawing(level.room)
        self._view, self._picture = view, picture
        self._state = level.start
        self._is_over = True

    def reset(self) -> Observation:
        self._state = self._level.start
        self._is_over = False
        return self._observation("This is the room." if self._view == "none" else "")

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode of sokoban is under way: make a new environment, or call reset() first")
        said = said_command(action)
        if said.command not in DIRECTIONS:
            seen = self._observation(_NO_MOVE)
            return StepResult(seen, reward=STEP_REWARD, invalid=said.invalid or INADMISSIBLE, success=False)
        room, before = self._level.room, self._state
        self._state, outcome = moved(room, before, DIRECTIONS.index(said.command))
        self._is_over = solved = is_solved(room, self._state)
        told = _TOLD[outcome].format(direction=said.command)
        return StepResult(
            self._observation(f"{told} Solved!" if solved else told),
            reward=reward(room, before, self._state),
            done=solved,
            used_tool=outcome in (Outcome.WALKED, Outcome.PUSHED),
            success=solved,
        )

    def close(self) -> None:
        self._is_over = True

    def _observation(self, told: str) -> Observation:
        grid = text = self._drawing.text(self._state)
        if self._view == "spaced":
            text = spaced(grid)
        elif self._view == "words":
            text, told = described(self._level.room, self._state), ""  # where things are says what has happened
        elif self._view == "none":
            text = ""
        text = "\n".join(part for part in (told, text) if part)
        if self._picture is None:
            return Observation(text, state_key=grid, choices=DIRECTIONS)
        picture = self._picture(self._level.room, self._state)
        return Observation(text, state_key=grid, choices=DIRECTIONS, images=(picture,))
