"""Success on a panel, with the interval that says how much of it is chance. Knows no policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from spear_rl.train.step import mean_measures
from spear_rl.types import Group, Metrics, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes of a panel's tasks, as many of each."""

    success: float
    low: float
    """Lower end of the 95 % Wilson interval of `success`."""
    high: float
    reward: float
    turns: float
    invalid_turns: float
    """Share of turns the environment could not act on."""
    episodes: int
    failed_episodes: int
    """Lost by the machinery; not among `episodes`."""
    by_family: dict[str, dict[str, float]]
    solved: dict[str, float]
    """Task id -> share of its episodes that succeeded."""
    stops: dict[str, int] = field(default_factory=dict)
    """Why episodes ended -> how many."""
    metrics: Metrics = field(default_factory=dict)
    """The task's other measures -> their means."""
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Task id -> (episodes that succeeded, episodes played); not part of what is written."""

    @property
    def rate(self) -> dict[str, float]:
        """The headline: success, its interval, and over how many episodes."""
        return {"success": self.success, "low": self.low, "high": self.high, "episodes": self.episodes}

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "counts"}


def evaluation(groups: Sequence[Group]) -> Evaluation:
    """Sum up played groups."""
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


def merged(rounds: Sequence[Sequence[Group]]) -> list[Group]:
    """Groups of the same tasks, played one round after the other, as one group a task."""
    return [
        replace(
            siblings[0],
            trajectories=[t for group in siblings for t in group.trajectories],
            num_failed=sum(group.num_failed for group in siblings),
        )
        for siblings in zip(*rounds, strict=True)
    ]


def wilson_interval(successes: float, trials: float, *, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % interval of a success rate; honest near 0 and 1, where the plain one is not."""
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
