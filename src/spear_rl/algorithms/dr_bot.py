"""Dr.BoT: the known tricks of agentic RL as one wrapper over a base algorithm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from spear_rl.algorithms import filters
from spear_rl.algorithms.base import AdvantageFn, Algorithm
from spear_rl.functional.covariance import keep_low_covariance
from spear_rl.functional.inputs import fixed_length_mean


def dr_bot(base: Algorithm, *, max_length: int = 1024, keep_groups: float = 0.75) -> Algorithm:
    """Wrap `base`: clip-higher with dual clip, no std, no length bias, and filters that drop what cannot teach.

    Args:
        max_length: the constant that replaces a row's length in the reduction: the most tokens a row may train.
        keep_groups: the share of groups, those with the largest spread, that trains.
    """
    loss: Any = base.loss
    keep = getattr(loss, "keywords", {}).get("keep")
    if isinstance(keep, partial) and keep.func is keep_low_covariance:
        loss = partial(loss, keep=partial(keep, clip_low=0.2, clip_high=0.28))
    return replace(
        base,
        advantages=_without_std(base.advantages),
        loss=partial(
            loss,
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=10.0,
            kl_coefficient=0.0,
            reduce=partial(fixed_length_mean, length=max_length),
        ),
        filters=(
            *base.filters,
            filters.overlong,
            filters.void,
            filters.repetitive,
            filters.unreadable,
            partial(filters.flat, keep=keep_groups),
        ),
    )


def _without_std(advantages: AdvantageFn) -> AdvantageFn:
    """The same estimator with its division by the standard deviation switched off, where it has one."""
    if isinstance(advantages, partial) and "divide_by_std" in advantages.keywords:
        return partial(advantages, divide_by_std=False)
    return advantages
