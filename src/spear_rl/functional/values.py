"""What a critic adds: generalised advantage estimation, PPO's clipped value loss, whitening."""

import torch
from torch import Tensor

from spear_rl.functional.losses import token_mean


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, last_values: Tensor | None = None
) -> Tensor:
    """Generalised advantage estimation: A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t.

    Args:
        rewards, values, mask: [N, M] one episode per row, padded on the right; the mask is True on its steps.
        last_values: [N] the value after an episode's last step; None is 0, the episode has ended.

    Returns:
        [N, M] advantages, 0 on padding. A value's target is advantage plus value: with lam=1 the discounted return.
    """
    out = torch.zeros_like(values)
    future = values.new_zeros(len(values)) if last_values is None else last_values.to(values.dtype)
    carried = torch.zeros_like(future)
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        error = rewards[:, t] + gamma * future - values[:, t]
        carried = torch.where(here, error + gamma * lam * carried, carried)
        future = torch.where(here, values[:, t], future)
        out[:, t] = torch.where(here, carried, 0.0)
    return out


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's value loss: half the squared error, token mean, and the share of tokens that the clip silences.

    Args:
        clip: a value may not leave old_values +- clip to its advantage: the larger of the two errors counts.
    """
    errors = (values - returns) ** 2
    silenced = torch.zeros_like(errors)
    if clip is not None:
        clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns) ** 2
        silenced = (clipped > errors).to(errors.dtype)
        errors = torch.maximum(errors, clipped)
    return 0.5 * token_mean(errors, mask), token_mean(silenced, mask)


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-6) -> Tensor:
    """`values` less the mean and divided by the sample std, plus `eps`, of those where `mask` is True."""
    counted = values[mask]
    if len(counted) < 2:
        return values - counted.mean() if len(counted) else values
    return (values - counted.mean()) / (counted.std() + eps)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 no better than a constant."""
    variance = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
