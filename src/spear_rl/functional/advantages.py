"""Advantage estimators: rewards and group labels in, one advantage per entry out."""

import torch
from torch import Tensor


def group_relative(values: Tensor, groups: Tensor, *, divide_by_std: bool = False, eps: float = 1e-6) -> Tensor:
    """Center `values` inside each group; the whole of GRPO's estimator.

    Args:
        values: [N] one score per entry.
        groups: [N] one integer label per entry; entries with equal labels are compared.
        divide_by_std: also divide by the group's sample standard deviation plus `eps` (GRPO); without it, Dr. GRPO.

    Returns:
        [N] advantages. A group of one gets 0.
    """
    index, count, shifted, rounding = _above_group_minimum(values, groups)
    mean = torch.zeros_like(count).index_add_(0, index, shifted) / count
    centered = torch.where((shifted - mean[index]).abs() < rounding, 0.0, shifted - mean[index])
    if divide_by_std:
        variance = torch.zeros_like(count).index_add_(0, index, centered**2) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[index] + eps)
    return _as_given(centered, values)


def leave_one_out(values: Tensor, groups: Tensor) -> Tensor:
    """RLOO: each value minus the mean of the *other* values of its group; a group of one gets 0.

    Args:
        values, groups: [N] as in `group_relative`.
    """
    index, count, shifted, rounding = _above_group_minimum(values, groups)
    total = torch.zeros_like(count).index_add_(0, index, shifted)
    others = (total[index] - shifted) / (count[index] - 1).clamp(min=1)
    above = shifted - others
    return _as_given(torch.where((count[index] == 1) | (above.abs() < rounding), 0.0, above), values)


def discounted_returns(rewards: Tensor, *, discount: float) -> Tensor:
    """[M] reward-to-go of one episode: G_t = r_t + discount * G_{t+1}."""
    out, future = [], 0.0
    for reward in reversed(rewards.tolist()):  # plain numbers: a tensor per turn takes seven times as long
        future = reward + discount * future
        out.append(future)
    return _as_given(torch.tensor(out[::-1], dtype=torch.float64, device=rewards.device), rewards)


def gigpo(
    rewards: Tensor,
    groups: Tensor,
    turn_returns: Tensor,
    turn_states: Tensor,
    turn_trajectory: Tensor,
    *,
    step_weight: float = 1.0,
    divide_by_std: bool = False,
    episode_weight: float = 1.0,
) -> Tensor:
    """Episode advantage plus `step_weight` times the advantage among visits to the same state.

    Args:
        rewards, groups: [N] per episode; the mean is over trajectories, not over rows.
        turn_returns, turn_states, turn_trajectory: [M] per turn; `turn_trajectory` indexes [N].
            Equal `turn_states` are compared; the caller keeps states of different groups apart.

    Returns:
        [M] one advantage per turn. A state visited once adds 0.
    """
    episode = group_relative(rewards, groups, divide_by_std=divide_by_std)[turn_trajectory]
    turn = group_relative(turn_returns, turn_states, divide_by_std=divide_by_std)
    return episode_weight * episode + step_weight * turn


def recalibrate(
    rewards: Tensor, baseline: float | Tensor, std: float | Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Advantages of replayed episodes against the current baseline, not their own group's mean; 0 at the baseline.

    Args:
        std: a typical one of recent groups, for a base that divides by its group's: divides as in `group_relative`.
    """
    above = torch.where((rewards - baseline).abs() < 1e-12 * rewards.abs(), 0.0, rewards - baseline)  # rounding
    return above if std is None else above / (std + eps)


def _as_given(result: Tensor, values: Tensor) -> Tensor:
    """`result` in the dtype of `values`; integers become floats."""
    return result.to(values.dtype if values.is_floating_point() else torch.get_default_dtype())


def _above_group_minimum(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Group index [N], group sizes [K], values above their group's minimum [N] and what is rounding in their group [N].

    Subtracting the minimum first, in double precision, makes the advantages of a flat group exactly 0: rounding would
    give some of them a tiny positive value, as to one at its group's mean, and replay would store those episodes.
    """
    labels, index = torch.unique(groups, return_inverse=True)
    exact = values.to(torch.float64)
    count = torch.zeros(len(labels), dtype=exact.dtype, device=exact.device)
    lowest = torch.full_like(count, torch.inf).scatter_reduce_(0, index, exact, "amin")
    largest = torch.zeros_like(count).scatter_reduce_(0, index, exact.abs(), "amax")
    count.index_add_(0, index, torch.ones_like(exact))
    return index, count, exact - lowest[index], 1e-15 * largest[index]
