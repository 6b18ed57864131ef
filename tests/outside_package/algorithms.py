"""Algorithms from outside: plain functions, a record of one's own, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, pstdev

from spear_rl.algorithms import Algorithm, Bonus, ClippedSurrogate
from spear_rl.functional import LossInputs, LossOutput, constant, token_mean
from spear_rl.types import Group, Trajectory


def above_median(groups: Sequence[Group]) -> list[list[float]]:
    return AboveMedian()(groups)


def reinforce(inputs: LossInputs) -> LossOutput:
    loss = token_mean(-inputs.advantages * inputs.logprobs, inputs.mask)
    return LossOutput(loss, {"logprob": token_mean(inputs.logprobs, inputs.mask).detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class AboveMedian:
    divide_by_std: bool = False

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        advantages = []
        for group in groups:
            scores = [t.score for t in group.trajectories]
            scale = pstdev(scores) + 1e-6 if self.divide_by_std else 1.0
            advantages += [[(t.score - median(scores)) / scale] * len(t.turns) for t in group.trajectories]
        return advantages


def plain() -> Algorithm:
    """A plain advantage function and a plain loss."""
    return Algorithm(advantages=above_median, loss=reinforce)


def half_plain() -> Algorithm:
    """A plain advantage function with a loss of ours."""
    return Algorithm(advantages=above_median, loss=ClippedSurrogate())


def record() -> Algorithm:
    """A record of its own, with values of its own."""
    return Algorithm(invalid_penalty=0.3, advantages=AboveMedian(), loss=ClippedSurrogate(clip_high=0.25))


def _short(trajectory: Trajectory) -> float:
    return 1.0 / (1 + len(trajectory.turns))


def with_bonus() -> Algorithm:
    return Algorithm(bonus=Bonus(of=_short, weight=constant(0.1)), advantages=AboveMedian(), loss=ClippedSurrogate())


def returns_a_loss() -> object:
    return ClippedSurrogate()


def raises() -> Algorithm:
    raise RuntimeError("no luck today")


def wants_arguments(clip: float) -> Algorithm:
    return Algorithm(advantages=above_median, loss=ClippedSurrogate(clip_low=clip))


def without_a_loss() -> Algorithm:
    return Algorithm(advantages=above_median, loss=None)  # type: ignore[arg-type]
