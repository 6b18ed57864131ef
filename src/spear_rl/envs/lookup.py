"""A toy task of two turns for tests: `look` shows a hidden digit, answering with it wins. Takes microseconds."""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.settings.ranges import OneOf, Range, has_checked_options

FAMILIES = ("red", "green", "blue", "gold")
SPLITS = {"train": 64, "validation": 16, "test": 16}
INSTRUCTIONS = "A digit is hidden. Say look to see it, then say the digit."

_DIGITS = "0123456789"
_FIRST_NUMBER = {"train": 0, "validation": 64, "test": 80}


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    num_digits: Annotated[int, Range(1, len(_DIGITS))] = 10,
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
    families: Sequence[Annotated[str, OneOf(FAMILIES, "family")]] = (),
) -> Sequence[Task]:
    """The tasks of a split, in a fixed order; `num_digits` is the number of different digits."""
    chosen = []
    for number in range(_FIRST_NUMBER[split], _FIRST_NUMBER[split] + SPLITS[split]):
        family, digit = FAMILIES[number % len(FAMILIES)], _DIGITS[_draw("digit", number) % num_digits]
        if not families or family in families:
            chosen.append(
                Task(
                    id=f"lookup/{split}/{number:03d}",
                    make_env=partial(LookupEnv, family, digit, num_digits),
                    family=family,
                    instructions=INSTRUCTIONS,
                    demonstrate=partial(_demonstration, number, digit, num_digits),
                )
            )
    return tuple(chosen[:max_tasks])


def _demonstration(number: int, digit: str, num_digits: int, seed: int) -> list[str]:
    """Looks and answers in half of the demonstrations, guesses in the others: imitation leaves room to learn."""
    if _draw("looks", number, seed) % 2:
        return ["look", digit]
    return [_DIGITS[_draw("guess", number, seed) % num_digits]]


class LookupEnv:
    """One episode: a hidden digit of one colour."""

    __slots__ = ("_choices", "_digit", "_family", "_is_over", "_looked")

    def __init__(self, family: str, digit: str, num_digits: int = 10) -> None:
        self._family, self._digit = family, digit
        self._choices = ("look", *_DIGITS[:num_digits])
        self._looked, self._is_over = False, True

    def reset(self) -> Observation:
        self._looked = self._is_over = False
        return self._observation()

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode of lookup is under way: call reset() first")
        word = action.strip()
        if word == "look":
            self._looked = True
            return StepResult(self._observation(), used_tool=True, success=False)
        self._is_over = True
        is_right, invalid = word == self._digit, "" if word else "no_action"
        last = Observation("right" if is_right else "wrong", state_key="over")
        return StepResult(last, reward=float(is_right), done=True, invalid=invalid, success=is_right)

    def close(self) -> None:
        self._is_over = True

    def _observation(self) -> Observation:
        shown = self._digit if self._looked else "?"
        return Observation(f"{self._family} code {shown}", state_key=shown, choices=self._choices)


def _draw(*what: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big")
