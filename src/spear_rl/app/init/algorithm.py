"""my_game: GRPO with the median of a group's scores as the baseline. Change the two parts to your own algorithm.

An algorithm is a record: `advantages` turns groups of episodes into one number per turn, and `loss` is minimized.
Its name is algorithm.name=my_game:algorithm; spear-my_game:algorithm is SPEAR over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, pstdev

from spear_rl.algorithms import Algorithm, ClippedSurrogate
from spear_rl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class AboveMedian:
    """Fields are settings: algorithm.divide_by_std=false sets this one, and so does Dr.BoT."""

    divide_by_std: bool = True

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        """For every episode of every group, in order, one advantage per turn."""
        advantages = []
        for group in groups:  # the episodes of one task
            scores = [t.score for t in group.trajectories]  # the task's reward with bonus and penalties
            scale = pstdev(scores) + 1e-6 if self.divide_by_std and scores else 1.0
            advantages += [[(t.score - median(scores)) / scale] * len(t.turns) for t in group.trajectories]
        return advantages


def algorithm() -> Algorithm:
    """The record. `ClippedSurrogate` is PPO's loss with fields that settings and wrappers change, e.g. clip_high.

    A loss of your own is a function of `spear_rl.functional.LossInputs`; it returns a `LossOutput`.
    """
    return Algorithm(advantages=AboveMedian(), loss=ClippedSurrogate(clip_low=0.2, clip_high=0.28))
