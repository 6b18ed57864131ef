"""GRPO and its two siblings: compare an episode with the other episodes of its group."""

from spear_rl.algorithms.base import Algorithm, GroupRelative
from spear_rl.functional.losses import ClippedSurrogate


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
