"""GRPO and its two siblings: compare an episode with the other episodes of its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spear_rl.algorithms.base import Algorithm
from spear_rl.algorithms.losses import ClippedSurrogate
from spear_rl.functional.advantages import group_relative, leave_one_out
from spear_rl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """An episode's score against its siblings'; every turn of it gets the same advantage."""

    divide_by_std: bool = True
    """GRPO; without it, Dr. GRPO."""
    leave_one_out: bool = False
    """RLOO: the baseline of an episode is the mean of its siblings, itself left out."""

    def __post_init__(self) -> None:
        if self.divide_by_std and self.leave_one_out:
            raise ValueError("leave_one_out has no division by the standard deviation: set divide_by_std to false")

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        episodes = [(i, t) for i, group in enumerate(groups) for t in group.trajectories]
        scores = torch.tensor([t.score for _, t in episodes], dtype=torch.float64)
        labels = torch.tensor([i for i, _ in episodes])
        if self.leave_one_out:
            advantages = leave_one_out(scores, labels).tolist()
        else:
            advantages = group_relative(scores, labels, divide_by_std=self.divide_by_std).tolist()
        return [[a] * len(t.turns) for a, (_, t) in zip(advantages, episodes, strict=True)]


def grpo(*, clip: float = 0.2, divide_by_std: bool = True) -> Algorithm:
    """The original: symmetric clip, group standard deviation."""
    return Algorithm(
        advantages=GroupRelative(divide_by_std=divide_by_std), loss=ClippedSurrogate(clip_low=clip, clip_high=clip)
    )


def dr_grpo(*, clip: float = 0.2) -> Algorithm:
    """GRPO without the division by the group's standard deviation."""
    return grpo(clip=clip, divide_by_std=False)


def rloo(*, clip: float = 0.2) -> Algorithm:
    """The baseline of an episode is the mean of its siblings, itself left out."""
    return Algorithm(
        advantages=GroupRelative(divide_by_std=False, leave_one_out=True),
        loss=ClippedSurrogate(clip_low=clip, clip_high=clip),
    )
