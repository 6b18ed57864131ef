"""Means and differences with 95 % intervals, and a sign test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

NO_WIDTH = 1e-9
"""An interval below this width is one of equal values: rounding leaves 1e-16, which says nothing."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, its 95 % interval and the method."""

    value: float
    low: float
    high: float
    method: str


def t_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| < t) = confidence, by bisecting the closed form for whole degrees of freedom (A&S 26.7.3-4)."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_within(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _t_within(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) * tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd + 2, freedom + 2, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of two or more seeds' values with Student's interval."""
    mean = fmean(values)
    half = t_quantile(0.95, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, f"Student t, {len(values)} seeds")


def over_tasks(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences in [-1, 1] with Agresti and Min's interval.

    It adds half a task to each of solved/unsolved by one/other, and so has a width even where all tasks agree.
    """
    count = len(differences) + 2
    center = math.fsum(differences) / count
    spread = (math.fsum(d * d for d in differences) + 1) / count - center**2
    half = 1.959963984540054 * math.sqrt(spread / count)
    low, high = max(center - half, -1.0), min(center + half, 1.0)
    return Estimate(fmean(differences), low, high, f"Agresti-Min, {len(differences)} tasks")


def sign_test(better: int, worse: int) -> float:
    """Chance of a split at least this uneven, either way, if better and worse were equally likely."""
    trials, fewer = better + worse, min(better, worse)
    return min(1.0, 2 * math.fsum(math.comb(trials, k) / 2**trials for k in range(fewer + 1)))
