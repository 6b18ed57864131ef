"""Which stored episodes are drawn first: sampling weights, and the draw by them.

Standard library only.
"""

import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from spear_rl.replay.buffer import Outcomes, Remembered, Stored
from spear_rl.types import Metrics

PRIORITIES = ("medium", "hard", "rare", "confident", "fresh", "family")
"""Words of `algorithm.imitation.priority`, the sampling weights of replay; `priorities` says what each does."""
SATURATED = 0.9
"""From this success rate on, `medium` never draws an episode of the task."""
HALF_LIFE = 2
"""Steps after which `fresh` halves an episode's weight."""


def priorities(
    words: Iterable[str], stored: Sequence[Stored[Remembered]], outcomes: Outcomes, step: int
) -> list[float]:
    """The weight of each episode in a draw, the product of what each word gives it; one of 0 is never drawn.

    medium: p (1 - p) with p the current success rate of its task, 0 where p >= 0.9
    hard: 1 - the success rate of its group when it was played, 1/2 if that is unknown
    rare: 1 over that rate, at most 20: each group is drawn as often as any other, however many of its episodes won
    confident: from 1, of the lowest surprisal, evenly down to 1/n; equal ones have the mean of their places
    fresh: half per 2 steps of age
    family: 1 over the sum of its family's other weights: every family is drawn with equal probability
    """
    items, weights = [s.item for s in stored], [1.0] * len(stored)
    for word in sorted(dict.fromkeys(words), key=lambda word: word == "family"):  # it is the last, and sums the others
        if word == "medium":
            own = [p * (1 - p) if p < SATURATED else 0.0 for p in outcomes.success_rates(items)]
        elif word == "hard":
            own = [0.5 if item.group_success is None else 1 - item.group_success for item in items]
        elif word == "rare":
            own = [2.0 if item.group_success is None else 1 / max(item.group_success, 0.05) for item in items]
        elif word == "confident":
            ordered = sorted(item.surprisal for item in items)
            ends = [(bisect_left(ordered, item.surprisal), bisect_right(ordered, item.surprisal)) for item in items]
            own = [1 - (first + last - 1) / 2 / len(items) for first, last in ends]
        elif word == "fresh":  # the floor is for weights that would round to 0
            own = [max(0.5 ** ((step - s.step) / HALF_LIFE), 1e-200) for s in stored]
        elif word == "family":
            families = [item.family for item in items]
            totals = {name: sum(w for f, w in zip(families, weights, strict=True) if f == name) for name in {*families}}
            own = [1 / (totals[family] or 1.0) for family in families]
        else:
            raise ValueError(f"there is no priority {word!r}: it is one of {', '.join(PRIORITIES)}")
        weights = [weight * factor for weight, factor in zip(weights, own, strict=True)]
    return weights


def weighted_sample(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Up to `count` different places, one after the other in proportion to the weights of those left; none of 0.

    Sorting by exponential variates divided by the weights is exactly such a draw (Efraimidis and Spirakis, 2006).
    A `count` of 0 takes no random number: the rest of the step is then that of a run without replay.
    """
    if not count:
        return []
    times = [(rng.expovariate(1.0) / weight, place) for place, weight in enumerate(weights) if weight > 0]
    return [place for _, place in heapq.nsmallest(count, times)]


def weight_metrics(weights: Sequence[float]) -> Metrics:
    """How far the weights of a draw are from uniform."""
    effective = sum(weights) ** 2 / squares / len(weights) if (squares := sum(w * w for w in weights)) else 0.0
    return {"replay/priority": effective, "replay/never_drawn": float(weights.count(0.0))}
