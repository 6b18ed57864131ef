"""GRPO and its two siblings: compare an episode with the other episodes of its group."""

from spear_rl.algorithms.base import Algorithm, GroupRelative
from spear_rl.functional.losses import ClippedSurrogate, Reduce, SequenceMean, TokenMean


def grpo(*, clip: float = 0.2, divide_by_std: bool = True, reduction: Reduce = SequenceMean()) -> Algorithm:  # noqa: B008 (frozen)
    """The original: symmetric clip, group standard deviation, the mean over sequences of each one's token mean."""
    return Algorithm(
        advantages=GroupRelative(divide_by_std=divide_by_std),
        loss=ClippedSurrogate(clip_low=clip, clip_high=clip, reduction=reduction),
    )


def dr_grpo(*, clip: float = 0.2) -> Algorithm:
    """GRPO's advantages without the division by the group's standard deviation, and a token mean."""
    return grpo(clip=clip, divide_by_std=False, reduction=TokenMean())


def rloo(*, clip: float = 0.2) -> Algorithm:
    """The baseline of an episode is the mean of its siblings, itself left out."""
    return Algorithm(
        advantages=GroupRelative(divide_by_std=False, leave_one_out=True),
        loss=ClippedSurrogate(clip_low=clip, clip_high=clip),
    )
