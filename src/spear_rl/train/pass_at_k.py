"""mean@k and pass@k: how often a task is solved in one attempt, and how often in at least one of k. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from spear_rl.train.evaluate import wilson_interval


@dataclass(frozen=True, slots=True)
class Samples:
    """Rates by name, mean@k first, each with its 95 % interval and the number of tasks it is the mean of."""

    k: int
    rates: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, object]:
        return {"k": self.k, "samples": self.rates}


def sampled(counts: Iterable[tuple[int, int]], k: int) -> Samples:
    """mean@k, and pass@n for n = 1, 2, 4, ... and k, from (solved, played) of every task.

    A task with fewer than k episodes, because some failed in their machinery, is left out of all of them.
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
    """The chance that k of `played` episodes, drawn without replacement, hold a solved one.

    1 - C(played - solved, k) / C(played, k): the unbiased estimate of pass@k from more than k episodes.
    """
    if not 0 <= solved <= played or not 1 <= k <= played:
        raise ValueError(f"pass@{k} of {solved} solved among {played} played makes no sense")
    return 1 - math.comb(played - solved, k) / math.comb(played, k)


def _rate(values: Sequence[float], most_trials: float) -> dict[str, float]:
    if not values:
        return {"rate": 0.0, "low": 0.0, "high": 1.0, "tasks": 0}
    rate = fmean(values)
    trials = _effective_trials(values, rate, most_trials)
    low, high = wilson_interval(rate * trials, trials)
    return {"rate": rate, "low": low, "high": high, "tasks": len(values)}


def _effective_trials(values: Sequence[float], rate: float, most_trials: float) -> float:
    """How many independent trials would give a rate as certain as this mean over tasks.

    As many as there are tasks if a task is either always or never solved, `most_trials` if all tasks are equally hard:
    trials of one task are not independent, and the spread between tasks says how much so.
    """
    spread, of_one_trial = fmean((value - rate) ** 2 for value in values), rate * (1 - rate)
    if not of_one_trial:
        return len(values)
    return min(len(values) * of_one_trial / spread, most_trials) if spread else most_trials
