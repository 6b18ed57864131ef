"""Covariance clipping (arXiv 2505.22617): find the few tokens that would make the policy over-confident."""

from __future__ import annotations

import torch
from torch import Tensor

from spear_rl.functional.inputs import LossInputs


def token_covariance(inputs: LossInputs, *, joint: bool = False) -> Tensor:
    """[B, T] (A - mean A)(logp - mean logp), means over all training tokens of the mini-batch; 0 where masked.

    Args:
        joint: the means are over the rows `beside` these too.
    """
    parts = [inputs]
    while joint and (beside := parts[-1].beside) is not None:
        parts.append(beside)
    sums = torch.stack([_sums(part) for part in parts]).sum(0)
    mean_advantage, mean_logprob = sums[:2] / sums[2].clamp(min=1)
    spread = (inputs.advantages - mean_advantage) * (inputs.logprobs.detach() - mean_logprob)
    return torch.where(inputs.mask.bool(), spread, 0.0)


def _sums(inputs: LossInputs) -> Tensor:
    """[3] of the training tokens: their advantages, their log-probabilities, their number."""
    mask, logprobs = inputs.mask.bool(), inputs.logprobs.detach()
    values = (torch.where(mask, x, 0.0).sum() for x in (inputs.advantages.to(logprobs.dtype), logprobs))
    return torch.stack([*values, mask.sum().to(logprobs.dtype)])


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

    At most max(1, floor(fraction * training tokens)) are dropped; a token the PPO clip has already silenced is never
    drawn. The draw runs over the candidates in an order given by their values, so it does not depend on how rows are
    ordered or padded; tokens that agree in every value are interchangeable.
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
    mask = inputs.mask.bool()
    return torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0).clamp(-20, 20)


def clip_is_active(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Tensor:
    """[B, T] True where PPO's clip has silenced the token: it moved past the bound its advantage favours."""
    ratio, advantages = log_ratio(inputs).exp(), inputs.advantages
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
