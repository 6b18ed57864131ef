"""Success rates, mean@k and pass@k, with 95 % confidence intervals. Knows no policy."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from spear_rl.types import Group, Metrics, mean_measures

METRICS = {
    "eval/success": "Share of held-out episodes that solved their task, at eval.temperature.",
    "eval/low": "Lower end of the 95 % Wilson interval of eval/success.",
    "eval/high": "Upper end of the 95 % Wilson interval of eval/success.",
    "eval/reward": "Mean reward of a held-out episode.",
    "eval/turns": "Mean turns of a held-out episode.",
    "eval/invalid_turns": "Share of turns of held-out episodes that the environment could not act on.",
    "eval/episodes": "Held-out episodes that count.",
    "eval/failed_episodes": "Held-out episodes lost to infrastructure failures; they do not count.",
    "eval/by_family": "Success with its interval and number of episodes, per family; in eval.jsonl only.",
    "eval/solved": "Share of its episodes that succeeded, per task id; in eval.jsonl only.",
    "eval/stops": "Number of episodes per reason why they ended; in eval.jsonl only.",
    "eval/also": "Success with its interval, episodes, reward and turns, per split of eval.also; in eval.jsonl only.",
    "eval/{split}/{name}": "The same as curves: success, low, high, reward, turns or episodes of a split of eval.also.",
    "eval/metrics": "Means of the environment's own measures; in eval.jsonl only.",
}
"""The fields of an `Evaluation`; in eval.jsonl they stand without eval/."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of episodes of a panel's tasks, equally many per task."""

    success: float
    low: float
    """Lower end of the 95 % Wilson interval of `success`; with several episodes per task, of independent tasks."""
    high: float
    reward: float
    turns: float
    invalid_turns: float
    """Fraction of turns that the environment could not act on."""
    episodes: int
    failed_episodes: int
    """Lost to infrastructure failures; not among `episodes`."""
    by_family: dict[str, dict[str, float]]
    solved: dict[str, float]
    """Task id -> fraction of its episodes that succeeded."""
    stops: dict[str, int] = field(default_factory=dict)
    """Reason why episodes ended -> how many."""
    metrics: Metrics = field(default_factory=dict)
    """Means of the task's other measures."""
    samples: dict[str, dict[str, float]] = field(default_factory=dict)
    """mean@k and pass@k with their intervals, where k > 1 episodes per task were asked for."""
    also: dict[str, Metrics] = field(default_factory=dict)
    """Split of eval.also -> its success, interval, episodes, reward and turns."""
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Task id -> (episodes that succeeded, episodes played); not written to files."""

    @property
    def rate(self) -> dict[str, float]:
        """Success, its interval and the number of episodes."""
        return {"success": self.success, "low": self.low, "high": self.high, "episodes": self.episodes}

    def as_dict(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "counts" and (value or name not in ("samples", "also"))
        }


def evaluation(groups: Sequence[Group], *, k: int = 1) -> Evaluation:
    """Summary of played groups.

    Args:
        k: if above 1, also mean@k and pass@k, in all and of every family.
    """
    played = [t for group in groups for t in group.trajectories]
    turns = [turn for t in played for turn in t.turns]
    families: dict[str, list[tuple[int, int]]] = {}
    for group in groups:
        families.setdefault(group.info.get("family", ""), []).append(_count(group))
    rate = _rate([_count(group) for group in groups])
    return Evaluation(
        success=rate["success"],
        low=rate["low"],
        high=rate["high"],
        reward=fmean(t.reward for t in played),
        turns=fmean(len(t.turns) for t in played),
        invalid_turns=fmean(bool(turn.invalid) for turn in turns) if turns else 0.0,
        episodes=len(played),
        failed_episodes=sum(group.num_failed for group in groups),
        by_family={
            name: _rate(counts) | _pass_rate(counts, k)
            for name, counts in sorted(families.items())
            if any(played for _, played in counts)
        },
        solved={g.task_id: fmean(t.success for t in g.trajectories) for g in groups if g.trajectories},
        stops={str(reason): count for reason, count in sorted(Counter(t.stop for t in played).items())},
        metrics=mean_measures(played),
        samples=sampled(map(_count, groups), k).rates if k > 1 else {},
        counts={group.task_id: _count(group) for group in groups},
    )


def _count(group: Group) -> tuple[int, int]:
    """(episodes that succeeded, episodes played)."""
    return sum(t.success for t in group.trajectories), len(group.trajectories)


def merged(rounds: Sequence[Sequence[Group]]) -> list[Group]:
    """Rounds of groups of the same tasks as one group per task."""
    return [
        replace(
            siblings[0],
            trajectories=[t for group in siblings for t in group.trajectories],
            num_failed=sum(group.num_failed for group in siblings),
        )
        for siblings in zip(*rounds, strict=True)
    ]


def wilson_interval(successes: float, trials: float, *, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % Wilson interval of a success rate, which also holds near 0 and 1."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    center = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(center - half, 0.0), min(center + half, 1.0)


def _rate(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Success over all episodes of some tasks, with an interval that holds for new tasks."""
    shares = [solved / played for solved, played in counts if played]
    num_solved, num_played = (sum(numbers) for numbers in zip(*counts, strict=True))
    rate = num_solved / num_played
    # One episode per task: as many trials as tasks. With more, those of one task are not independent.
    trials = num_played if len(shares) == num_played else _effective_trials(shares, rate, num_played)
    low, high = wilson_interval(num_solved * trials / num_played, trials)
    return {"success": rate, "low": low, "high": high, "episodes": num_played}


def _pass_rate(counts: Sequence[tuple[int, int]], k: int) -> dict[str, float]:
    return {f"pass@{k}": sampled(counts, k).rates[f"pass@{k}"]["rate"]} if k > 1 else {}


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
    rates = {f"mean@{k}": _mean_rate([solved / played for solved, played in whole], num_episodes)}
    for n in [*powers, k]:
        rates[f"pass@{n}"] = _mean_rate([pass_at(n, solved=s, played=p) for s, p in whole], num_episodes / n)
    return Samples(k, rates)


def pass_at(k: int, *, solved: int, played: int) -> float:
    """1 - C(played - solved, k) / C(played, k): the unbiased estimate of pass@k from k or more episodes."""
    if not 0 <= solved <= played or not 1 <= k <= played:
        raise ValueError(f"pass@{k} of {solved} solved among {played} played is undefined")
    return 1 - math.comb(played - solved, k) / math.comb(played, k)


def _mean_rate(values: Sequence[float], most_trials: float) -> dict[str, float]:
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
