"""PPO: advantages from a critic, which the engine holds, instead of from a group's siblings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from spear_rl.algorithms.base import Algorithm
from spear_rl.algorithms.critic import Critic, Estimate, per_turn
from spear_rl.functional.losses import ClippedSurrogate
from spear_rl.functional.values import gae, whitened
from spear_rl.settings.ranges import Share, check_fields
from spear_rl.types import Group, Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE:
    """Generalised advantage estimation over an episode's tokens, or over its turns.

    A turn's reward and format term come at its last token, the episode's bonus at the last of all. After a turn's last
    token comes the first of the next turn: the environment's words are no step of the policy.
    """

    gamma: Annotated[float, Share] = 1.0
    """Discount per token or per turn, as `level` says."""
    lam: Annotated[float, Share] = 1.0
    """1 is return minus value, 0 the error of one step."""
    level: Literal["token", "turn"] = "token"
    """`turn` has one value per turn, at the end of its prompt, and one advantage for all its tokens."""
    bootstrap: bool = False
    """After a limit cut an episode off, it is worth its last value; if off, nothing: the limit is part of the task."""
    divide_by_std: bool = True
    """Whiten: mean 0 and std 1 over the tokens that train."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        """One advantage per turn as a new critic gives it, whose values are all 0."""
        count = sum(t.num_tokens for group in groups for t in group.trajectories)
        advantages = self.estimate(groups, torch.zeros(count)).advantages
        if self.divide_by_std:
            advantages = whitened(advantages, torch.ones(count, dtype=torch.bool))
        return per_turn(advantages, groups)

    def estimate(self, groups: Sequence[Group], values: Tensor) -> Estimate:
        """Advantages and targets, before any whitening.

        Args:
            values: [K] of the state before each token that the policy wrote, in the order of episodes and turns.
        """
        played = [t for group in groups for t in group.trajectories]
        rewards: list[float] = []
        sizes: list[int] = []
        counts: list[int] = []
        for trajectory in played:
            own: list[float] = []
            owed = 0.0
            for turn in trajectory.turns:
                length, paid = len(turn.completion.token_ids), turn.reward + turn.shaping + owed
                # A turn without a token is no step: what it earned counts for the step before it, or else after it.
                owed = 0.0 if length or own else paid
                if length:
                    steps = 1 if self.level == "turn" else length
                    own += [0.0] * (steps - 1) + [paid]
                    sizes += [length] if self.level == "turn" else [1] * length
                elif own:
                    own[-1] += paid
            if own:
                own[-1] += trajectory.bonus
            rewards += own
            counts.append(len(own))
        spans = torch.tensor(sizes, dtype=torch.long)
        first = spans.cumsum(0) - spans
        lengths = torch.tensor(counts, dtype=torch.long)
        mask = torch.arange(max(counts, default=0)) < lengths[:, None]
        known = values.to("cpu", torch.float64)[first]
        padded = torch.zeros(2, *mask.shape, dtype=torch.float64)
        padded[0][mask], padded[1][mask] = torch.tensor(rewards, dtype=torch.float64), known
        last = torch.zeros(len(played), dtype=torch.float64)
        if self.bootstrap and mask.any():
            cut = torch.tensor([t.stop is not Stop.DONE for t in played]) & (lengths > 0)
            last = torch.where(cut, padded[1].gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0], last)
        advantages = gae(padded[0], padded[1], mask, gamma=self.gamma, lam=self.lam, last_values=last)[mask]
        fits = torch.zeros(len(values), dtype=torch.bool)
        fits[first] = True
        returns = torch.zeros(len(values), dtype=torch.float64).index_put((first,), advantages + known)
        return Estimate(advantages.repeat_interleave(spans), returns, fits)


def ppo(*, clip: float = 0.2, gamma: float = 1.0, lam: float = 1.0) -> Algorithm:
    """The original: symmetric clip, whitened GAE; the value loss is clipped where the critic says so."""
    return Algorithm(
        advantages=GAE(gamma=gamma, lam=lam),
        loss=ClippedSurrogate(clip_low=clip, clip_high=clip),
        critic=Critic(),
    )
