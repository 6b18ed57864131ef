"""GRPO and its two siblings: compare an episode with the other episodes of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from spear_rl.algorithms.base import Algorithm
from spear_rl.functional.advantages import group_relative, leave_one_out
from spear_rl.functional.losses import clipped_surrogate
from spear_rl.types import Group


def episode_advantages(
    groups: Sequence[Group], *, estimator: Callable[[Tensor, Tensor], Tensor], **options: bool
) -> list[list[float]]:
    """Every turn of an episode gets the episode's advantage; `options` go to the estimator."""
    episodes = [(i, t) for i, group in enumerate(groups) for t in group.trajectories]
    scores = torch.tensor([t.score for _, t in episodes], dtype=torch.float64)
    labels = torch.tensor([i for i, _ in episodes])
    advantages = estimator(scores, labels, **options).tolist()
    return [[a] * len(t.turns) for a, (_, t) in zip(advantages, episodes, strict=True)]


def grpo(*, clip: float = 0.2, divide_by_std: bool = True) -> Algorithm:
    """The original: symmetric clip, group standard deviation."""
    return Algorithm(
        advantages=partial(episode_advantages, estimator=group_relative, divide_by_std=divide_by_std),
        loss=partial(clipped_surrogate, clip_low=clip, clip_high=clip),
    )


def dr_grpo(*, clip: float = 0.2) -> Algorithm:
    """GRPO without the division by the group's standard deviation."""
    return grpo(clip=clip, divide_by_std=False)


def rloo(*, clip: float = 0.2) -> Algorithm:
    """The baseline of an episode is the mean of its siblings, itself left out."""
    return Algorithm(
        advantages=partial(episode_advantages, estimator=leave_one_out),
        loss=partial(clipped_surrogate, clip_low=clip, clip_high=clip),
    )
