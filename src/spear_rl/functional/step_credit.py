"""Advantages of single turns: nested step groups (HGPO) and the graph of a group's states (GraphGPO, G2PO).

All take the turns of all episodes in one row: those of an episode one after the other, in the order they were played.
A state is an integer label; equal labels are the same state, and the caller keeps states of different groups apart.
"""

from collections import deque

import torch
from torch import Tensor

from spear_rl.functional.advantages import group_relative

SUCCESS, FAILURE, UNKNOWN = -1, -2, -3
"""In place of the next state, where an episode ended: it won, it lost, or it was cut off before its end."""


def nested_contexts(turn_states: Tensor, turn_trajectory: Tensor, *, depth: int) -> list[Tensor]:
    """For k = 0..depth, [M] labels: equal where the state and the k states before it are equal.

    A history that is shorter than k, because the episode began there, is equal to others just as short.
    """
    state = torch.unique(turn_states, return_inverse=True)[1]
    follows = torch.zeros_like(state, dtype=torch.bool)
    follows[1:] = turn_trajectory[1:] == turn_trajectory[:-1]
    levels = [state]
    for _ in range(depth):
        before = torch.where(follows, levels[-1].roll(1) + 1, 0)  # 0: the episode began with this turn
        levels.append(torch.unique(before * len(state) + state, return_inverse=True)[1])
    return levels


def hgpo(
    rewards: Tensor,
    groups: Tensor,
    turn_returns: Tensor,
    turn_states: Tensor,
    turn_trajectory: Tensor,
    *,
    depth: int = 2,
    depth_power: float = 1.0,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    divide_by_std: bool = False,
) -> Tensor:
    """Episode advantage plus `step_weight` times the mean over k of the advantage among turns with one k-context.

    The k-context of a turn is its state and the k states before it.

    Level k weighs (k + 1) ** `depth_power`. A level whose group is flat, or the turn alone, says nothing about the turn
    and is left out of its mean.

    Args:
        rewards, groups: [N] per episode.
        turn_returns, turn_states, turn_trajectory: [M] per turn; `turn_trajectory` indexes [N].
        depth: the most past states that a group shares; 0 is GiGPO's step part.

    Returns:
        [M] one advantage per turn.
    """
    total = torch.zeros(len(turn_returns), dtype=torch.float64, device=turn_returns.device)
    weights = torch.zeros_like(total)
    for k, context in enumerate(nested_contexts(turn_states, turn_trajectory, depth=depth)):
        weight = float(k + 1) ** depth_power
        total += weight * group_relative(turn_returns, context, divide_by_std=divide_by_std).to(torch.float64)
        weights += weight * _has_spread(turn_returns, context)
    step = torch.where(weights > 0, total / weights, 0.0)
    return _combined(rewards, groups, step, turn_trajectory, step_weight, episode_weight, divide_by_std)


def distances_to_success(turn_states: Tensor, turn_next: Tensor) -> dict[int, int]:
    """The fewest turns from a state to success, for the states from which some path of played turns leads there."""
    into: dict[int, list[int]] = {}
    for source, target in zip(turn_states.tolist(), turn_next.tolist(), strict=True):
        into.setdefault(target, []).append(source)
    found, queue = {SUCCESS: 0}, deque([SUCCESS])
    while queue:
        target = queue.popleft()
        for source in into.get(target, ()):
            if source not in found:
                found[source] = found[target] + 1
                queue.append(source)
    return found


def graphgpo(
    rewards: Tensor,
    groups: Tensor,
    turn_states: Tensor,
    turn_next: Tensor,
    turn_trajectory: Tensor,
    *,
    success_rewards: Tensor,
    distance_discount: float = 0.1,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    divide_by_std: bool = False,
) -> Tensor:
    """Episode advantage plus `step_weight` times the advantage of a turn's progress among turns from the same state.

    Progress is `success_rewards` times `distance_discount` to the power of how many turns the best path to success got
    longer by this turn: 0 for a turn on it. A state without a path counts as one turn farther than the farthest of its
    group. A turn whose next state is UNKNOWN gets no step part and is compared with none.

    Args:
        rewards, groups: [N] per episode.
        turn_states, turn_next, turn_trajectory: [M] per turn; `turn_next` is a state, SUCCESS, FAILURE or UNKNOWN.
        success_rewards: [N] what a success of the episode's group is worth.

    Returns:
        [M] one advantage per turn.
    """
    distances = distances_to_success(turn_states, turn_next)
    group = groups[turn_trajectory]
    index = torch.unique(group, return_inverse=True)[1]
    here = torch.tensor([distances.get(s, -1) for s in turn_states.tolist()], dtype=torch.float64, device=group.device)
    there = torch.tensor([distances.get(s, -1) for s in turn_next.tolist()], dtype=torch.float64, device=group.device)
    farthest = torch.zeros(len(index), dtype=torch.float64, device=group.device)
    unreached = 1 + farthest.scatter_reduce_(0, index, here, "amax")[index]
    here, there = torch.where(here < 0, unreached, here), torch.where(there < 0, unreached, there)
    worth = success_rewards.to(torch.float64)[turn_trajectory]
    progress = worth * distance_discount ** (there - here + 1)
    known = turn_next != UNKNOWN
    alone = -1 - torch.arange(len(group), device=group.device)
    compared = torch.where(known, turn_states, alone)
    step = group_relative(torch.where(known, progress, 0.0), compared, divide_by_std=divide_by_std)
    return _combined(rewards, groups, step, turn_trajectory, step_weight, episode_weight, divide_by_std)


def g2po(
    rewards: Tensor,
    groups: Tensor,
    turn_rewards: Tensor,
    turn_returns: Tensor,
    turn_states: Tensor,
    turn_trajectory: Tensor,
    *,
    discount: float = 0.95,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    divide_by_std: bool = False,
) -> Tensor:
    """Episode advantage plus `step_weight` times two advantages of a turn's edge in the graph of its group's states.

    A state is worth the mean, over all visits to it, of `discount` times the return from there. An edge leads to its
    turn's reward plus the worth of the next state, which is 0 after the last turn. The first advantage compares where
    the edges out of one state lead; the second compares how much each edge of the whole graph gains.

    Args:
        rewards, groups: [N] per episode.
        turn_rewards, turn_returns, turn_states, turn_trajectory: [M] per turn; returns are discounted by `discount`.

    Returns:
        [M] one advantage per turn.
    """
    labels, state = torch.unique(turn_states, return_inverse=True)
    zeros = torch.zeros(len(labels), dtype=torch.float64, device=state.device)
    visits = zeros.index_add(0, state, torch.ones_like(turn_returns, dtype=torch.float64))
    worth = (discount * zeros.index_add(0, state, turn_returns.to(torch.float64)) / visits)[state]
    goes_on = torch.zeros_like(state, dtype=torch.bool)
    goes_on[:-1] = turn_trajectory[1:] == turn_trajectory[:-1]
    lead = turn_rewards.to(torch.float64) + torch.where(goes_on, worth.roll(-1), 0.0)
    local = group_relative(lead, state, divide_by_std=divide_by_std)
    overall = group_relative(lead - worth, groups[turn_trajectory], divide_by_std=divide_by_std)
    return _combined(rewards, groups, local + overall, turn_trajectory, step_weight, episode_weight, divide_by_std)


def _has_spread(values: Tensor, groups: Tensor) -> Tensor:
    """[N] whether a value's group has two values that differ by more than rounding."""
    labels, index = torch.unique(groups, return_inverse=True)
    lowest = torch.full((len(labels),), torch.inf, dtype=values.dtype, device=values.device)
    highest = lowest.neg().scatter_reduce_(0, index, values, "amax")
    lowest.scatter_reduce_(0, index, values, "amin")
    return (highest - lowest > 1e-12 * torch.maximum(highest.abs(), lowest.abs()))[index]


def _combined(
    rewards: Tensor,
    groups: Tensor,
    step: Tensor,
    turn_trajectory: Tensor,
    step_weight: float,
    episode_weight: float,
    divide_by_std: bool,
) -> Tensor:
    episode = group_relative(rewards, groups, divide_by_std=divide_by_std)[turn_trajectory]
    return episode_weight * episode + step_weight * step.to(episode.dtype)
