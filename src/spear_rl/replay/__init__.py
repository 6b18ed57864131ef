"""Memory between steps; knows no tensors."""

from spear_rl.replay.buffer import ReplayBuffer, RewardHistory, Stored

__all__ = ["ReplayBuffer", "RewardHistory", "Stored"]
