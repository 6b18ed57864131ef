"""Covariance clipping (arXiv 2505.22617): find the few tokens that would make the policy over-confident."""

from __future__ import annotations

import torch
from torch import Tensor

from spear_rl.functional.inputs import LossInputs, token_mean


def token_covariance(inputs: LossInputs) -> Tensor:
    """[B, T] (A - mean A)(logp - mean logp), means over all training tokens of the mini-batch; 0 where masked."""
    mask, logprobs = inputs.mask.bool(), inputs.logprobs.detach()
    spread = (inputs.advantages - token_mean(inputs.advantages, mask)) * (logprobs - token_mean(logprobs, mask))
    return torch.where(mask, spread, 0.0)


@torch.no_grad()
def keep_low_covariance(
    inputs: LossInputs,
    *,
    fraction: float,
    low: float,
    high: float,
    generator: torch.Generator,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """Clip-Cov: [B, T] weights, 0 on a random few of the tokens with low < covariance < high, else 1.

    At most max(1, floor(fraction * training tokens)) are dropped; a token the PPO clip has already silenced is never
    drawn. The draw runs over the candidates in an order given by their stored values, so it does not depend on how
    rows are ordered or padded.
    """
    mask = inputs.mask.bool()
    covariance = token_covariance(inputs)
    unclipped = ~clip_is_active(inputs, clip_low=clip_low, clip_high=clip_high)
    rows, columns = torch.nonzero(mask & unclipped & (covariance > low) & (covariance < high), as_tuple=True)
    by_advantage = torch.argsort(inputs.advantages[rows, columns], stable=True)
    order = by_advantage[torch.argsort(inputs.old_logprobs[rows, columns][by_advantage], stable=True)]
    count = max(int(fraction * int(mask.sum())), 1)
    chosen = order[torch.randperm(len(order), generator=generator)[:count].to(order.device)]
    keep = torch.ones_like(inputs.logprobs)
    keep[rows[chosen], columns[chosen]] = 0
    return keep


def high_covariance_penalty(inputs: LossInputs, *, fraction: float, beta: float) -> Tensor:
    """KL-Cov: [B, T] beta * |log ratio| on the max(1, floor(fraction * tokens)) of highest covariance, else 0."""
    mask = inputs.mask.bool()
    count = min(max(int(fraction * int(mask.sum())), 1), int(mask.sum()))
    ranked = torch.where(mask, token_covariance(inputs), -torch.inf).flatten()
    chosen = torch.zeros_like(ranked).index_fill(0, ranked.topk(count).indices, 1.0).reshape(mask.shape)
    return beta * chosen * log_ratio(inputs).abs()


def log_ratio(inputs: LossInputs) -> Tensor:
    """[B, T] logp - old_logp, clamped to [-20, 20]; 0 (and without gradient) where masked."""
    mask = inputs.mask.bool()
    return torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0).clamp(-20, 20)


def clip_is_active(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Tensor:
    """[B, T] True where PPO's clip has silenced the token: it moved past the bound its advantage favours."""
    ratio, advantages = log_ratio(inputs).exp(), inputs.advantages
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
