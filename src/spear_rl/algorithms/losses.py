"""Losses as records: what they are set to can be printed, compared and changed by `dataclasses.replace`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from spear_rl.functional.covariance import high_covariance_penalty, keep_low_covariance
from spear_rl.functional.inputs import LossInputs, LossOutput, Reduce, fixed_length_mean, sequence_mean, token_mean
from spear_rl.functional.losses import clipped_surrogate


@dataclass(frozen=True, slots=True)
class TokenMean:
    """Every token weighs the same (DAPO)."""

    def __call__(self, values: Tensor, mask: Tensor) -> Tensor:
        return token_mean(values, mask)


@dataclass(frozen=True, slots=True)
class SequenceMean:
    """Every sequence weighs the same (GRPO as published)."""

    def __call__(self, values: Tensor, mask: Tensor) -> Tensor:
        return sequence_mean(values, mask)


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Sums over tokens, divided by a constant length (Dr. GRPO)."""

    length: int

    def __call__(self, values: Tensor, mask: Tensor) -> Tensor:
        return fixed_length_mean(values, mask, length=self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class CovarianceClip:
    """Which tokens a loss holds back because they push hardest towards certainty (arXiv 2505.22617)."""

    kind: Literal["clip", "kl", "none"] = "clip"
    fraction: float = 0.02
    low: float = 2.0
    high: float = 60.0
    beta: float = 1.0
    """Weight of KL-Cov's penalty."""
    joint_means: bool = False
    """The means behind the covariance are over the other rows of the optimizer step too (`LossInputs.beside`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate:
    """PPO's clipped objective and what may be added to it: `functional.clipped_surrogate` with these settings."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    covariance: CovarianceClip | None = None
    entropy_bonus: float = 0.0
    kl: float = 0.0
    """Weight of the KL to a frozen reference; above 0 the engine needs one."""
    reduction: Reduce = TokenMean()

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return clipped_surrogate(
            inputs,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            keep=self.keep,
            penalty=self._penalty if self.covariance and self.covariance.kind == "kl" else None,
            entropy_bonus=self.entropy_bonus,
            kl_coefficient=self.kl,
            reduce=self.reduction,
        )

    @property
    def keep(self) -> Callable[[LossInputs], Tensor] | None:
        """The [B, T] weights of Clip-Cov as a function, 0 on the tokens it drops; None without it."""
        return self._kept if self.covariance and self.covariance.kind == "clip" else None

    def _kept(self, inputs: LossInputs) -> Tensor:
        assert self.covariance
        own = {"fraction": self.covariance.fraction, "low": self.covariance.low, "high": self.covariance.high}
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        joint = self.covariance.joint_means
        return keep_low_covariance(inputs, generator=inputs.generator, joint=joint, **own, **bounds)

    def _penalty(self, inputs: LossInputs) -> Tensor:
        assert self.covariance
        clip = self.covariance
        return high_covariance_penalty(inputs, fraction=clip.fraction, beta=clip.beta, joint=clip.joint_means)
