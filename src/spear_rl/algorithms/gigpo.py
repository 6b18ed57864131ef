"""GiGPO: also compare turns that started from the same state."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from spear_rl.algorithms.base import Algorithm
from spear_rl.functional.advantages import discounted_returns
from spear_rl.functional.advantages import gigpo as gigpo_estimator
from spear_rl.functional.losses import ClippedSurrogate
from spear_rl.types import Group, Turn

Anchor = Literal["state", "text"]


def anchor_of(turn: Turn, anchor: Anchor) -> str:
    """What makes the states of two turns the same: equal texts, of which an empty one equals none.

    state  the environment's exact state, which the policy may not see
    text   what the policy saw, as in the published GiGPO: the observation's text and its (last) picture
    """
    if anchor == "state":
        return turn.state_key
    pictures = [hashlib.sha256(picture).hexdigest() for picture in turn.images[-1:]]
    return "\n".join([turn.observation, *pictures])


@dataclass(frozen=True, slots=True, kw_only=True)
class GiGPO:
    """Episode advantage plus the advantage among visits to the same state of the same task.

    A turn's return is the discounted sum of the turns' own rewards and format terms; the episode's bonus belongs to
    no turn and counts in the episode part only.
    """

    discount: float = 0.95
    step_weight: float = 1.0
    episode_weight: float = 1.0
    divide_by_std: bool = True
    anchor: Anchor = "state"
    """What makes two turns visits to the same state, see `anchor_of`."""

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        episodes = [(i, t) for i, group in enumerate(groups) for t in group.trajectories]
        labels: dict[tuple[int, str], int] = {}
        returns = [torch.zeros(0, dtype=torch.float64)]
        states: list[int] = []
        owners: list[int] = []
        for n, (i, t) in enumerate(episodes):
            rewards = torch.tensor([turn.reward + turn.shaping for turn in t.turns], dtype=torch.float64)
            returns.append(discounted_returns(rewards, discount=self.discount))
            for m, turn in enumerate(t.turns):
                state = anchor_of(turn, self.anchor)
                key = (i, f"={state}" if state else f"#{n}.{m}")
                states.append(labels.setdefault(key, len(labels)))
                owners.append(n)
        advantages = gigpo_estimator(
            torch.tensor([t.score for _, t in episodes], dtype=torch.float64),
            torch.tensor([i for i, _ in episodes], dtype=torch.long),
            torch.cat(returns),
            torch.tensor(states, dtype=torch.long),
            torch.tensor(owners, dtype=torch.long),
            step_weight=self.step_weight,
            episode_weight=self.episode_weight,
            divide_by_std=self.divide_by_std,
        )
        parts = torch.split(advantages, [len(t.turns) for _, t in episodes])
        return [part.tolist() for part in parts]


def gigpo(*, gamma: float = 0.95, step_weight: float = 1.0, clip: float = 0.2, divide_by_std: bool = True) -> Algorithm:
    """Group-in-group policy optimization; `divide_by_std=False` is its mode without normalisation."""
    return Algorithm(
        advantages=GiGPO(discount=gamma, step_weight=step_weight, divide_by_std=divide_by_std),
        loss=ClippedSurrogate(clip_low=clip, clip_high=clip),
    )
