"""mean@k and pass@k: success per attempt, and success in at least one of k attempts. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from spear_rl.train.evaluate import wilson_interval


@dataclass(frozen=True, slots=True)
class Samples:
    """Rates by name, mean@k first, each with its 95 % interval and number of tasks."""

    k: int
    rates: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, object]:
        return {"k": self.k, "samples": self.rates}


def sampled(counts: Iterable[tuple[int, int]], k: int) -> Samples:
    """mean@k, and pass@n for n = 1, 2, 4, ... and k, from (solved, played) of every task.

    A task with fewer than k episodes, because of infrastructure failures, is left out.
    """
    if k < 1:
        raise ValueError(f"k must be 1 or more, not {k}")
    whole = [(solved, played) for solved, played in counts if played >= k]
    powers = [2**n for n in range(k.bit_length()) if 2**n < k]
    num_episodes = sum(played for _, played in whole)
    rates = {f"mean@{k}": _rate([solved / played for solved, played in whole], num_episodes)}
    for n in [*powers, k]:
        rates[f"pass@{n}"] = _rate([pass_at(n, solved=s, played=p) for s, p in whole], num_episodes / n)
    return Samples(k, rates)


def pass_at(k: int, *, solved: int, played: int) -> float:
    """1 - C(played - solved, k) / C(played, k): the unbiased estimate of pass@k from k or more episodes."""
    if not 0 <= solved <= played or not 1 <= k <= played:
        raise ValueError(f"pass@{k} of {solved} solved among {played} played is undefined")
    return 1 - math.comb(played - solved, k) / math.comb(played, k)


def _rate(values: Sequence[float], most_trials: float) -> dict[str, float]:
    if not values:
        return {"rate": 0.0, "low": 0.0, "high": 1.0, "tasks": 0}
    rate = fmean(values)
    trials = _effective_trials(values, rate, most_trials)
    low, high = wilson_interval(rate * trials, trials)
    return {"rate": rate, "low": low, "high": high, "tasks": len(values)}


def _effective_trials(values: Sequence[float], rate: float, most_trials: float) -> float:
    """The number of independent trials that would give an interval as wide as that of this mean over tasks.

    Trials of one task are not independent. It is the number of tasks if each is either always or never solved, and
    `most_trials` if all are equally hard; between these, the variance over tasks decides.
    """
    variance, trial_variance = fmean((value - rate) ** 2 for value in values), rate * (1 - rate)
    if not trial_variance:
        return len(values)
    return min(len(values) * trial_variance / variance, most_trials) if variance else most_trials
