"""What a policy loss looks at and returns, and how values a token become one number. Every tensor is [B, T]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What any policy loss may look at; column t always describes token t."""

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


LossFn = Callable[[LossInputs], LossOutput]
"""A pure function of one whole mini-batch: how the engine cuts it up to compute `logprobs` is invisible here."""

Reduce = Callable[[Tensor, Tensor], Tensor]
"""[B, T] values and [B, T] mask in, a scalar out."""


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Every token weighs the same (DAPO)."""
    return _masked(values, mask).sum() / mask.sum().clamp(min=1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over rows of each row's token mean: every sequence weighs the same (GRPO as published)."""
    return (_masked(values, mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def fixed_length_mean(values: Tensor, mask: Tensor, *, length: int) -> Tensor:
    """Sum over tokens divided by a constant length, mean over rows: no reward for being long (Dr. GRPO)."""
    return _masked(values, mask).sum() / (values.shape[0] * length)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask is 0, even where the value there is not finite; a fractional mask is a weight."""
    return torch.where(mask.bool(), values * mask, 0.0)
