"""GiGPO: also compare turns that started from the same state."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from spear_rl.algorithms.base import Algorithm
from spear_rl.functional import step_credit as estimators
from spear_rl.functional.advantages import discounted_returns
from spear_rl.functional.advantages import gigpo as gigpo_estimator
from spear_rl.functional.losses import ClippedSurrogate
from spear_rl.settings.ranges import Share, check_fields
from spear_rl.types import Group, Stop, Trajectory, Turn

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
class StepCredit:
    """What GiGPO and its relatives have in common: an episode advantage, plus one among comparable turns."""

    step_weight: float = 1.0
    episode_weight: float = 1.0
    divide_by_std: bool = True
    anchor: Anchor = "state"
    """What makes two turns visits to the same state, see `anchor_of`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def weights(self) -> dict[str, Any]:
        """How an estimator adds the two parts up."""
        weights = {"step_weight": self.step_weight, "episode_weight": self.episode_weight}
        return weights | {"divide_by_std": self.divide_by_std}


@dataclass(frozen=True, slots=True, kw_only=True)
class GiGPO(StepCredit):
    """Episode advantage plus the advantage among visits to the same state of the same task.

    A turn's return is the discounted sum of the turns' own rewards and format terms; the episode's bonus belongs to
    no turn and counts in the episode part only.
    """

    discount: Annotated[float, Share] = 0.95

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        table = TurnTable(groups, self.anchor)
        returns = table.returns(self.discount)
        return table.by_episode(
            gigpo_estimator(table.scores, table.groups, returns, table.states, table.owners, **self.weights)
        )


def gigpo(*, gamma: float = 0.95, step_weight: float = 1.0, clip: float = 0.2, divide_by_std: bool = True) -> Algorithm:
    """Group-in-group policy optimization; `divide_by_std=False` is its mode without normalisation."""
    return Algorithm(
        advantages=GiGPO(discount=gamma, step_weight=step_weight, divide_by_std=divide_by_std),
        loss=ClippedSurrogate(clip_low=clip, clip_high=clip),
    )


@dataclass(slots=True)
class TurnTable:
    """The turns of all episodes in one row, as the estimators take them."""

    played: Sequence[Group]
    anchor: Anchor = "state"
    episodes: list[tuple[int, Trajectory]] = field(init=False)
    groups: Tensor = field(init=False)
    owners: Tensor = field(init=False)
    states: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.episodes = [(i, t) for i, group in enumerate(self.played) for t in group.trajectories]
        labels: dict[tuple[int, str] | tuple[int, int], int] = {}
        states: list[int] = []
        owners: list[int] = []
        for n, (i, t) in enumerate(self.episodes):
            for turn in t.turns:
                key = anchor_of(turn, self.anchor)
                states.append(labels.setdefault((i, key) if key else (i, len(states)), len(labels)))
                owners.append(n)
        self.groups = torch.tensor([i for i, _ in self.episodes], dtype=torch.long)
        self.owners = torch.tensor(owners, dtype=torch.long)
        self.states = torch.tensor(states, dtype=torch.long)

    @property
    def scores(self) -> Tensor:
        return torch.tensor([t.score for _, t in self.episodes], dtype=torch.float64)

    @property
    def rewards(self) -> Tensor:
        """Per turn: the environment's reward and the format term."""
        own = [turn.reward + turn.shaping for _, t in self.episodes for turn in t.turns]
        return torch.tensor(own, dtype=torch.float64)

    def returns(self, discount: float) -> Tensor:
        episodes = torch.split(self.rewards, self._lengths)
        return torch.cat([self.rewards[:0], *(discounted_returns(own, discount=discount) for own in episodes)])

    def next_states(self) -> Tensor:
        """Per turn: the state it led to, or how its episode ended there."""
        following = self.states.roll(-1).tolist()
        last = -1
        for _, t in self.episodes:
            last += len(t.turns)
            if t.turns:
                lost = estimators.FAILURE if t.stop is Stop.DONE else estimators.UNKNOWN
                following[last] = estimators.SUCCESS if t.success else lost
        return torch.tensor(following, dtype=torch.long)

    def success_rewards(self) -> Tensor:
        """Per episode: the highest reward of a success of its group; 1 where there is none above 0."""
        best = [max((t.reward for t in group.trajectories if t.success), default=0.0) for group in self.played]
        worth = [best[i] if best[i] > 0 else 1.0 for i, _ in self.episodes]
        return torch.tensor(worth, dtype=torch.float64)

    def by_episode(self, advantages: Tensor) -> list[list[float]]:
        return [part.tolist() for part in torch.split(advantages, self._lengths)]

    @property
    def _lengths(self) -> list[int]:
        return [len(t.turns) for _, t in self.episodes]
