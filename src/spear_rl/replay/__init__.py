"""Memory between steps; knows neither tensors nor what an episode is made of."""

from spear_rl.replay.buffer import ReplayBuffer, RewardHistory, Stored

__all__ = ["ReplayBuffer", "RewardHistory", "Stored"]
