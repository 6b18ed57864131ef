"""Policy losses. Every tensor is [B, T]; column t always describes token t."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spear_rl.functional.covariance import (
    clip_is_active,
    high_covariance_penalty,
    keep_low_covariance,
    log_ratio,
    token_covariance,
)
from spear_rl.functional.inputs import LossFn, LossInputs, LossOutput, Reduce, fixed_length_mean, token_mean

__all__ = [
    "LossFn",
    "LossInputs",
    "LossOutput",
    "Reduce",
    "clipped_surrogate",
    "fixed_length_mean",
    "high_covariance_penalty",
    "keep_low_covariance",
    "reference_kl",
    "token_covariance",
    "token_mean",
]


def clipped_surrogate(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    keep: Callable[[LossInputs], Tensor] | None = None,
    penalty: Callable[[LossInputs], Tensor] | None = None,
    entropy_bonus: float = 0.0,
    kl_coefficient: float = 0.0,
    reduce: Reduce = token_mean,
) -> LossOutput:
    """PPO's clipped objective, -min(r A, clip(r, 1 - low, 1 + high) A), and what may be added to it.

    Args:
        dual_clip: the loss of a token with a negative advantage never exceeds -dual_clip * A.
        keep: [B, T] weights, e.g. 0 on tokens that covariance clipping drops; they still count in the reduction.
        penalty: [B, T] extra loss a token, e.g. KL-Cov's.
        entropy_bonus: how much of the reduced entropy is subtracted from the loss.
        kl_coefficient: weight of the KL term to the frozen reference.
    """
    mask = inputs.mask
    difference = log_ratio(inputs)
    ratio = difference.exp()
    advantages = torch.where(mask.bool(), inputs.advantages, 0.0)
    per_token = -torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        per_token = torch.where(advantages < 0, torch.min(per_token, -dual_clip * advantages), per_token)
    kept = None if keep is None else keep(inputs)
    if kept is not None:
        per_token = per_token * kept
    if penalty is not None:
        per_token = per_token + penalty(inputs)
    loss = reduce(per_token, mask)
    if entropy_bonus:
        loss = loss - entropy_bonus * reduce(_given(inputs.entropy, "entropy"), mask)
    if kl_coefficient:
        loss = loss + kl_coefficient * reduce(reference_kl(inputs), mask)

    with torch.no_grad():
        active = clip_is_active(inputs, clip_low=clip_low, clip_high=clip_high)
        metrics = {
            "clip_fraction": token_mean(active.to(ratio.dtype), mask),
            "approx_kl": token_mean(ratio - 1 - difference, mask),
            "ratio": token_mean(ratio, mask),
        }
        if kept is not None:
            metrics["covariance_clip_fraction"] = token_mean(1 - kept, mask)
        if inputs.entropy is not None:
            metrics["entropy"] = token_mean(inputs.entropy, mask)
        if inputs.ref_logprobs is not None:
            metrics["reference_kl"] = token_mean(reference_kl(inputs), mask)
    return LossOutput(loss, metrics)


def reference_kl(inputs: LossInputs) -> Tensor:
    """[B, T] the low-variance estimate exp(d) - d - 1 of KL(policy || reference), d = ref_logp - logp."""
    difference = _given(inputs.ref_logprobs, "ref_logprobs") - inputs.logprobs
    difference = torch.where(inputs.mask.bool(), difference, 0.0).clamp(-20, 20)
    return difference.exp() - difference - 1


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"this loss needs {name} in its LossInputs, and the engine gave none")
    return tensor
