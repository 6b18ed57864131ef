"""Policy losses: what a loss is given and returns, PPO's clipped objective, covariance clipping, reductions, schedules.

Pure functions, and records of their settings. Every tensor is [B, T]; column t always describes token t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss is given; column t always describes token t."""

    logprobs: Tensor
    """Of the policy being trained; carries the gradient."""
    old_logprobs: Tensor
    """Of the policy that sampled the tokens."""
    advantages: Tensor
    mask: Tensor
    """True on the tokens the policy wrote and that train."""
    entropy: Tensor | None = None
    """Of the policy's distribution at each token, where the engine gives it."""
    ref_logprobs: Tensor | None = None
    """Of a frozen reference, where the engine has one."""
    generator: torch.Generator | None = None
    """The random stream that a loss with a random part draws from; None is torch's global one."""
    beside: LossInputs | None = None
    """Of other rows of the same optimizer step, where the engine has scored some before these."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A scalar to differentiate and scalars to log."""

    loss: Tensor
    metrics: dict[str, Tensor]


METRICS = {
    "clip_fraction": "Share of trained tokens whose gradient PPO's clip silences.",
    "approx_kl": "Mean of ratio - 1 - log ratio over trained tokens: an estimate of KL(sampling policy || policy).",
    "second_moment": "Mean squared ratio of the policy's probability of a token to the one it was sampled with.",
    "ratio": "Mean probability ratio of the policy to the one that sampled a token; 1 if they are the same.",
    "covariance_clip_fraction": "Share of trained tokens that Clip-Cov drops (algorithm.covariance).",
    "entropy": "Mean entropy of the policy over trained tokens, in nats.",
    "reference_kl": "Mean KL of the policy to the frozen reference over trained tokens (algorithm.kl).",
}
"""What a `LossOutput` of `clipped_surrogate` reports; the engine puts the term's name before each."""

LossFn = Callable[[LossInputs], LossOutput]
"""A pure function of a whole mini-batch: the engine's micro-batches are invisible here."""

Reduce = Callable[[Tensor, Tensor], Tensor]
"""[B, T] values and [B, T] mask in, a scalar out."""


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Every token weighs the same (DAPO)."""
    return _masked(values, mask).sum() / mask.sum().clamp(min=1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over rows of each row's token mean: every sequence weighs the same (GRPO as published)."""
    return (_masked(values, mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / max(len(mask), 1)


def fixed_length_mean(values: Tensor, mask: Tensor, *, length: int) -> Tensor:
    """Sum over tokens divided by a constant length, mean over rows: no reward for being long (Dr. GRPO)."""
    return _masked(values, mask).sum() / (max(len(mask), 1) * length)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask is 0, even where the value there is not finite; a fractional mask is a weight."""
    return torch.where(mask.bool(), _full(values) * mask, 0.0)


def _full(values: Tensor) -> Tensor:
    """The values in float32 or a wider type: bfloat16 has no 1.28, and in float16 exp(20) is infinite."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
    max_second_moment: float = 0.0,
    reduce: Reduce = token_mean,
) -> LossOutput:
    """PPO's clipped objective, -min(r A, clip(r, 1 - low, 1 + high) A), and what may be added to it.

    Args:
        dual_clip: the loss of a token with a negative advantage never exceeds -dual_clip * A.
        keep: [B, T] weights, e.g. 0 on tokens that covariance clipping drops; they still count in the reduction.
        penalty: [B, T] extra loss per token, e.g. KL-Cov's.
        entropy_bonus: coefficient of the reduced entropy, which is subtracted from the loss.
        kl_coefficient: weight of the KL term to the frozen reference.
        max_second_moment: a row with a larger mean squared ratio does not train; it still counts in the reduction.
            0 is no bound.
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
    stale = row_second_moments(inputs)[:, None] > max_second_moment if max_second_moment else None

    def reduced(values: Tensor) -> Tensor:
        return reduce(values if stale is None else torch.where(stale, 0.0, values), mask)

    loss = reduced(per_token)
    if entropy_bonus:
        loss = loss - entropy_bonus * reduced(_given(inputs.entropy, "entropy"))
    if kl_coefficient:
        loss = loss + kl_coefficient * reduced(reference_kl(inputs))

    with torch.no_grad():
        active = clip_is_active(inputs, clip_low=clip_low, clip_high=clip_high)
        metrics = {
            "clip_fraction": token_mean(active.to(ratio.dtype), mask),
            "approx_kl": token_mean(ratio - 1 - difference, mask),
            "ratio": token_mean(ratio, mask),
            "second_moment": token_mean(ratio.square(), mask),
        }
        if stale is not None:
            metrics["held_back"] = stale.to(ratio.dtype).mean()
        if kept is not None:
            metrics["covariance_clip_fraction"] = token_mean(1 - kept, mask)
        if inputs.entropy is not None:
            metrics["entropy"] = token_mean(inputs.entropy, mask)
        if inputs.ref_logprobs is not None:
            metrics["reference_kl"] = token_mean(reference_kl(inputs), mask)
    return LossOutput(loss, metrics)


def reference_kl(inputs: LossInputs) -> Tensor:
    """[B, T] the low-variance estimate exp(d) - d - 1 of KL(policy || reference), d = ref_logp - logp."""
    difference = _full(_given(inputs.ref_logprobs, "ref_logprobs")) - inputs.logprobs
    difference = torch.where(inputs.mask.bool(), difference, 0.0).clamp(-20, 20)
    return difference.exp() - difference - 1


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"this loss needs {name} in its LossInputs, and the engine gave none")
    return tensor


def token_covariance(inputs: LossInputs, *, joint: bool = False) -> Tensor:
    """[B, T] (A - mean A)(logp - mean logp), means over all training tokens of the mini-batch; 0 where masked.

    Args:
        joint: the means are over the rows `beside` these too.
    """
    parts = [inputs]
    while joint and (beside := parts[-1].beside) is not None:
        parts.append(beside)
    return torch.where(inputs.mask.bool(), _centred(parts, "advantages") * _centred(parts, "logprobs"), 0.0)


def _centred(parts: Sequence[LossInputs], name: str) -> Tensor:
    """[B, T] of the first part: values above their mean over the training tokens of all parts.

    The lowest is taken off first: equal values are then exactly 0, and no rounding ranks them.
    """
    values = [_full(getattr(part, name).detach()) for part in parts]
    trained = torch.cat([x[part.mask.bool()] for x, part in zip(values, parts, strict=True)])
    lowest = trained.min() if len(trained) else trained.sum()
    return values[0] - lowest - (trained - lowest).mean()


@torch.no_grad()
def keep_low_covariance(
    inputs: LossInputs,
    *,
    fraction: float,
    low: float,
    high: float,
    generator: torch.Generator | None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    joint: bool = False,
) -> Tensor:
    """Clip-Cov: [B, T] weights, 0 on a random few of the tokens with low < covariance < high, else 1.

    At most max(1, floor(fraction * training tokens)) are dropped, never one that the PPO clip has already silenced. The
    draw does not depend on how rows are ordered or padded: candidates are sorted by their values first.
    """
    mask = inputs.mask.bool()
    covariance = token_covariance(inputs, joint=joint)
    unclipped = ~clip_is_active(inputs, clip_low=clip_low, clip_high=clip_high)
    rows, columns = torch.nonzero(mask & unclipped & (covariance > low) & (covariance < high), as_tuple=True)
    order = _canonical_order(inputs, rows, columns)
    count = max(int(fraction * int(mask.sum())), 1)
    chosen = order[torch.randperm(len(order), generator=generator)[:count].to(order.device)]
    keep = torch.ones_like(inputs.logprobs)
    keep[rows[chosen], columns[chosen]] = 0
    return keep


def high_covariance_penalty(inputs: LossInputs, *, fraction: float, beta: float, joint: bool = False) -> Tensor:
    """KL-Cov: [B, T] beta * |log ratio| on the max(1, floor(fraction * tokens)) of highest covariance, else 0."""
    rows, columns = torch.nonzero(inputs.mask.bool(), as_tuple=True)
    order = _canonical_order(inputs, rows, columns)
    covariance = token_covariance(inputs, joint=joint)[rows, columns]
    ranked = order[torch.argsort(covariance[order], descending=True, stable=True)]
    top = ranked[: max(int(fraction * len(rows)), 1)]
    chosen = torch.zeros_like(inputs.logprobs)
    chosen[rows[top], columns[top]] = 1
    return beta * chosen * log_ratio(inputs).abs()


def _canonical_order(inputs: LossInputs, rows: Tensor, columns: Tensor) -> Tensor:
    """An order of the given tokens that only their values decide: old log-probability, then advantage, then logp."""
    order = torch.arange(len(rows), device=rows.device)
    for values in (inputs.logprobs.detach(), inputs.advantages, inputs.old_logprobs):
        order = order[torch.argsort(values[rows, columns][order], stable=True)]
    return order


def log_ratio(inputs: LossInputs) -> Tensor:
    """[B, T] logp - old_logp, clamped to [-20, 20]; 0 (and without gradient) where masked."""
    return torch.where(inputs.mask.bool(), _full(inputs.logprobs) - inputs.old_logprobs, 0.0).clamp(-20, 20)


@torch.no_grad()
def row_second_moments(inputs: LossInputs) -> Tensor:
    """[B] mean of the squared ratios over each row's training tokens: how stale the row is (M2PO, arXiv 2510.01161)."""
    mask = inputs.mask.bool()
    return torch.where(mask, log_ratio(inputs).exp().square(), 0.0).sum(1) / mask.sum(1).clamp(min=1)


def clip_is_active(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Tensor:
    """[B, T] True where PPO's clip has silenced the token: it moved past the bound its advantage favours."""
    ratio, advantages = log_ratio(inputs).exp(), inputs.advantages
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


def _require(name: str, value: object, is_right: bool, rule: str) -> None:
    if not is_right:
        raise ValueError(f"{name} must be {rule} (it is {value!r})")


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

    def __post_init__(self) -> None:
        _require("length", self.length, self.length > 0, "above 0")

    def __call__(self, values: Tensor, mask: Tensor) -> Tensor:
        return fixed_length_mean(values, mask, length=self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class CovarianceClip:
    """Settings of covariance clipping (arXiv 2505.22617): tokens of high covariance make the policy over-confident."""

    kind: Literal["clip", "kl", "none"] = "clip"
    fraction: float = 0.02
    low: float = 2.0
    high: float = 60.0
    beta: float = 1.0
    """Weight of KL-Cov's penalty."""
    joint_means: bool = False
    """The means behind the covariance are over the other rows of the optimizer step too (`LossInputs.beside`)."""

    def __post_init__(self) -> None:
        _require("kind", self.kind, self.kind in ("clip", "kl", "none"), "clip, kl or none")
        _require("fraction", self.fraction, 0 <= self.fraction <= 1, "from 0 to 1")
        _require("low", self.low, self.low < self.high, f"below high, {self.high}")
        _require("beta", self.beta, self.beta >= 0, "0 or more")


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
    max_second_moment: float = 0.0
    """A row with a larger mean squared ratio (1 where today's policy sampled it) does not train; 0 is no bound."""
    reduction: Reduce = TokenMean()

    def __post_init__(self) -> None:
        _require("clip_low", self.clip_low, self.clip_low >= 0, "0 or more")
        _require("clip_high", self.clip_high, self.clip_high >= 0, "0 or more")
        _require("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1, "above 1, or None")
        _require("max_second_moment", self.max_second_moment, (self.max_second_moment or 1) >= 1, "1 or more, or 0")

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
            max_second_moment=self.max_second_moment,
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


Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `value`."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Cosine:
    """Half a cosine from `start` at step 0 to `end` at `steps`; `end` after that.

    The paper's mu(t) is `cosine(1, 0, T_decay)` and its gamma(t) is `cosine(0, c, T_warm)`.
    """

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.end
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * step / self.steps)) / 2


constant, cosine = Constant, Cosine


def as_schedule(coefficient: float | Schedule) -> Schedule:
    """A number as a constant schedule; a schedule as it is."""
    return coefficient if callable(coefficient) else Constant(coefficient)
