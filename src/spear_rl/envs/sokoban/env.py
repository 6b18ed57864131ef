"""Sokoban as an environment: a direction in, the room as text, as an image, or as both out."""

from collections.abc import Callable
from typing import Literal

from spear_rl.envs.shared.answer_tags import parsed_answer
from spear_rl.envs.sokoban.rules import DIRECTIONS, STEP_REWARD, Level, Outcome, Room, State, is_solved, moved, reward
from spear_rl.envs.sokoban.text import Drawing, described, spaced
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

View = Literal["spaced", "compact", "words", "none"]
"""A grid with spaces between its cells, so that a tokenizer keeps them apart, or without; a few words; no text."""
Picture = Callable[[Room, State], bytes]
"""Draws a state of a room as a PNG file."""

_MESSAGES = {
    Outcome.WALKED: "You walk {direction}.",
    Outcome.PUSHED: "You push a box {direction}.",
    Outcome.WALL: "A wall is in the way: nothing moves.",
    Outcome.STUCK: "The box cannot move {direction}: nothing moves.",
}
_NO_MOVE = "That is no move: nothing moves."


class SokobanEnv:
    """One episode of one level, observed in a text view, with a picture where one is given.

    Every turn costs 0.1, also one that moves nothing or cannot be parsed, so that doing nothing is never cheaper.
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
        direction, invalid = parsed_answer(action)
        if direction not in DIRECTIONS:
            observation = self._observation(_NO_MOVE)
            return StepResult(observation, reward=STEP_REWARD, invalid=invalid or INADMISSIBLE, success=False)
        room, before = self._level.room, self._state
        self._state, outcome = moved(room, before, DIRECTIONS.index(direction))
        self._is_over = solved = is_solved(room, self._state)
        message = _MESSAGES[outcome].format(direction=direction)
        return StepResult(
            self._observation(f"{message} Solved!" if solved else message),
            reward=reward(room, before, self._state),
            done=solved,
            used_tool=outcome in (Outcome.WALKED, Outcome.PUSHED),
            success=solved,
        )

    def close(self) -> None:
        self._is_over = True

    def _observation(self, message: str) -> Observation:
        grid = text = self._drawing.text(self._state)
        if self._view == "spaced":
            text = spaced(grid)
        elif self._view == "words":
            text, message = described(self._level.room, self._state), ""  # the words show the result of a move
        elif self._view == "none":
            text = ""
        text = "\n".join(part for part in (message, text) if part)
        images = () if self._picture is None else (self._picture(self._level.room, self._state),)
        return Observation(text, state_key=grid, choices=DIRECTIONS, images=images)
