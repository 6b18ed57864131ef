"""Coefficients that change over training: a schedule is any function from step to number."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """Always `value`."""
    return lambda step: value


def cosine(start: float, end: float, steps: int) -> Schedule:
    """Half a cosine from `start` at step 0 to `end` at `steps`; `end` after that.

    The paper's mu(t) is `cosine(1, 0, T_decay)` and its gamma(t) is `cosine(0, c, T_warm)`.
    """

    def at(step: int) -> float:
        if step >= steps:
            return end
        return end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2

    return at


def as_schedule(coefficient: float | Schedule) -> Schedule:
    """A coefficient anywhere is a number or a schedule; this makes it a schedule."""
    return coefficient if callable(coefficient) else constant(coefficient)
