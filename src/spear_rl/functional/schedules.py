"""Coefficients that change over training: a schedule is any function from step to number. Ours are records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `value`."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Cosine:
    """Half a cosine from `start` at step 0 to `end` at `steps`; `end` after that.

    The paper's mu(t) is `cosine(1, 0, T_decay)` and its gamma(t) is `cosine(0, c, T_warm)`.
    """

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.end
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * step / self.steps)) / 2


constant, cosine = Constant, Cosine


def as_schedule(coefficient: float | Schedule) -> Schedule:
    """A coefficient anywhere is a number or a schedule; this makes it a schedule."""
    return coefficient if callable(coefficient) else Constant(coefficient)
