"""What an algorithm says about the critic that the engine holds for it, and what it makes of the critic's values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from spear_rl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """How the critic that the engine holds is trained. The advantages then have a method `estimate`, as `GAE` has."""

    learning_rate: float | None = None
    """Its own, constant; None is the policy's at the start of RL."""
    value_clip: float = 0.0
    """How far a value may move in one step before its loss goes flat; 0 for no clip."""
    warmup_steps: int = 0
    """The critic learns alone for as many steps."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a critic's values make of the played episodes; one entry per token that the policy wrote, in order."""

    advantages: Tensor
    returns: Tensor
    """What the value before the token should have been."""
    fits: Tensor
    """True where the critic has such a target."""


def per_turn(advantages: Tensor, groups: Sequence[Group]) -> list[list[float]]:
    """For every episode, in order, the mean advantage of each turn's tokens; 0 for a turn without any."""
    played = [t for group in groups for t in group.trajectories]
    parts = iter(torch.split(advantages, [len(turn.completion.token_ids) for t in played for turn in t.turns]))
    return [[float(part.mean()) if len(part) else 0.0 for part in (next(parts) for _ in t.turns)] for t in played]


@runtime_checkable
class Estimator(Protocol):
    """Advantages that need a critic's values."""

    def estimate(self, groups: Sequence[Group], values: Tensor) -> Estimate:
        """`values`: [K] of the state before each token that the policy wrote, in the order of episodes and turns."""
