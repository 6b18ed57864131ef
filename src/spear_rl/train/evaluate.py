"""Success rates with confidence intervals. Knows no policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from spear_rl.types import Group, Metrics, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of episodes of a panel's tasks, equally many per task."""

    success: float
    low: float
    """Lower end of the 95 % Wilson interval of `success`."""
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
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Task id -> (episodes that succeeded, episodes played); not written to files."""

    @property
    def rate(self) -> dict[str, float]:
        """Success, its interval and the number of episodes."""
        return {"success": self.success, "low": self.low, "high": self.high, "episodes": self.episodes}

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "counts"}


def evaluation(groups: Sequence[Group]) -> Evaluation:
    """Summary of played groups."""
    played = [t for group in groups for t in group.trajectories]
    turns = [turn for t in played for turn in t.turns]
    families: dict[str, list[Trajectory]] = {}
    for group in groups:
        families.setdefault(group.info.get("family", ""), []).extend(group.trajectories)
    rate = _rate(played)
    return Evaluation(
        success=rate["success"],
        low=rate["low"],
        high=rate["high"],
        reward=fmean(t.reward for t in played),
        turns=fmean(len(t.turns) for t in played),
        invalid_turns=fmean(bool(turn.invalid) for turn in turns) if turns else 0.0,
        episodes=len(played),
        failed_episodes=sum(group.num_failed for group in groups),
        by_family={name: _rate(members) for name, members in sorted(families.items()) if members},
        solved={g.task_id: fmean(t.success for t in g.trajectories) for g in groups if g.trajectories},
        stops={str(reason): count for reason, count in sorted(Counter(t.stop for t in played).items())},
        metrics=mean_measures(played),
        counts={g.task_id: (sum(t.success for t in g.trajectories), len(g.trajectories)) for g in groups},
    )


def mean_measures(played: Sequence[Trajectory]) -> Metrics:
    """Mean of every measure; an episode without it, ended before its first turn, counts as 0."""
    names = sorted({name for t in played for name in t.metrics})
    return {name: fmean(t.metrics.get(name, 0.0) for t in played) for name in names}


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


def _rate(played: Sequence[Trajectory]) -> dict[str, float]:
    successes = sum(t.success for t in played)
    low, high = wilson_interval(successes, len(played))
    return {"success": successes / len(played), "low": low, "high": high, "episodes": len(played)}
