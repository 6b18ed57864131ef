"""An environment from outside: the policy reads a digit and must say the next one, after looking it up if it likes."""

from __future__ import annotations

from functools import partial

from spear_rl.rollout import Observation, StepResult, Task

DIGITS = "0123456789"
STARTS = {"train": range(10), "validation": range(0, 10, 2), "test": range(1, 10, 2)}


class NextDigit:
    """`look` shows the answer and is the tool; any other text ends the episode."""

    def __init__(self, digit: int) -> None:
        self._digit, self._is_over = digit, True

    def reset(self) -> Observation:
        self._is_over = False
        return Observation(DIGITS[self._digit], state_key="start")

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("the episode is over: make a new environment")
        answer = DIGITS[(self._digit + 1) % 10]
        if action.strip() == "look":
            return StepResult(Observation(f"{DIGITS[self._digit]} {answer}", state_key="looked"), used_tool=True)
        is_right = action.strip() == answer
        self._is_over = True
        return StepResult(
            Observation("right" if is_right else "wrong"), reward=float(is_right), done=True, success=is_right
        )

    def close(self) -> None:
        pass


def expert(digit: int, seed: int) -> list[str]:
    answer = DIGITS[(digit + 1) % 10]
    return ["look", answer] if seed % 3 else [answer]


def tasks(split: str = "train") -> list[Task]:
    return [
        Task(
            id=f"next/{split}/{digit}",
            make_env=partial(NextDigit, digit),
            instructions="Say the next digit, or look.",
            demonstrate=partial(expert, digit),
        )
        for digit in STARTS[split]
    ]
