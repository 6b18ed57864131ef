"""A game that even a random policy wins now and then: ask once, then say something of the right kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from spear_rl.rollout import Observation, StepResult, Task


class Game:
    def __init__(self, number: int) -> None:
        self._number, self._turns = number, 0

    def reset(self) -> Observation:
        self._turns = 0
        return Observation(f"red code {self._number}", state_key="start")

    def step(self, action: str) -> StepResult:
        self._turns += 1
        if self._turns == 1:
            return StepResult(Observation("blue code ?", state_key="asked"), used_tool=True, success=False)
        points = sum(action.encode()) % 5
        return StepResult(Observation("right" if points else "wrong"), reward=points / 2, done=True, success=points > 2)

    def close(self) -> None:
        pass


def tasks(split: str = "train") -> Sequence[Task]:
    return tuple(Task(id=f"game/{split}/{n}", make_env=partial(Game, n), family=f"f{n % 2}") for n in range(16))
