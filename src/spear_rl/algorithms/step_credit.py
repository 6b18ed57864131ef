"""HGPO, GraphGPO and G2PO: turns are compared by the states they start from, came from and lead to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spear_rl.algorithms.base import Algorithm
from spear_rl.functional import step_credit as estimators
from spear_rl.functional.advantages import discounted_returns
from spear_rl.functional.losses import ClippedSurrogate
from spear_rl.types import Group, Stop, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class HGPO:
    """Episode advantage plus the mean over k of that among turns with the same state and k states before it."""

    depth: int = 2
    depth_power: float = 1.0
    """A group that shares k past states weighs (k + 1) to this power."""
    discount: float = 0.95
    step_weight: float = 1.0
    episode_weight: float = 1.0
    divide_by_std: bool = True

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        table = _Table(groups)
        advantages = estimators.hgpo(
            table.scores,
            table.groups,
            table.returns(self.discount),
            table.states,
            table.owners,
            depth=self.depth,
            depth_power=self.depth_power,
            step_weight=self.step_weight,
            episode_weight=self.episode_weight,
            divide_by_std=self.divide_by_std,
        )
        return table.by_episode(advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphGPO:
    """Episode advantage plus the advantage of a turn's progress on the shortest path to success.

    The paths are those of the graph that all turns of a group form together, so a good turn of a lost episode gains.
    """

    distance_discount: float = 0.1
    """A turn that makes the shortest path to success one turn longer is worth this share of one that does not."""
    step_weight: float = 1.0
    episode_weight: float = 1.0
    divide_by_std: bool = True

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        table = _Table(groups)
        advantages = estimators.graphgpo(
            table.scores,
            table.groups,
            table.states,
            table.next_states(),
            table.owners,
            success_rewards=table.success_rewards(),
            distance_discount=self.distance_discount,
            step_weight=self.step_weight,
            episode_weight=self.episode_weight,
            divide_by_std=self.divide_by_std,
        )
        return table.by_episode(advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class G2PO:
    """Episode advantage plus what a turn gains in the mean return of states, beside its siblings and in the graph."""

    discount: float = 0.95
    step_weight: float = 1.0
    episode_weight: float = 1.0
    divide_by_std: bool = True

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        table = _Table(groups)
        advantages = estimators.g2po(
            table.scores,
            table.groups,
            table.rewards,
            table.returns(self.discount),
            table.states,
            table.owners,
            discount=self.discount,
            step_weight=self.step_weight,
            episode_weight=self.episode_weight,
            divide_by_std=self.divide_by_std,
        )
        return table.by_episode(advantages)


def hgpo(*, depth: int = 2, gamma: float = 0.95, clip: float = 0.2, divide_by_std: bool = True) -> Algorithm:
    """Hierarchy-of-groups policy optimization, with the episode part that GiGPO has."""
    loss = ClippedSurrogate(clip_low=clip, clip_high=clip)
    return Algorithm(advantages=HGPO(depth=depth, discount=gamma, divide_by_std=divide_by_std), loss=loss)


def graphgpo(*, clip: float = 0.2, divide_by_std: bool = True) -> Algorithm:
    """Graph-based group policy optimization: credit by distance to success."""
    return Algorithm(
        advantages=GraphGPO(divide_by_std=divide_by_std), loss=ClippedSurrogate(clip_low=clip, clip_high=clip)
    )


def g2po(*, gamma: float = 0.95, clip: float = 0.2, divide_by_std: bool = True) -> Algorithm:
    """Group-graph policy optimization: credit by the mean return of states."""
    loss = ClippedSurrogate(clip_low=clip, clip_high=clip)
    return Algorithm(advantages=G2PO(discount=gamma, divide_by_std=divide_by_std), loss=loss)


def anchor(turn: Turn) -> str:
    """Equal and not empty for turns of one group that started from the same state."""
    return turn.state_key


@dataclass(slots=True)
class _Table:
    """The turns of all episodes in one row, as the estimators take them."""

    played: Sequence[Group]
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
                key = anchor(turn)
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
