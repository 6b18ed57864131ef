"""HGPO, GraphGPO and G2PO: turns are compared by the states they start from, came from and lead to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from spear_rl.algorithms.base import Algorithm
from spear_rl.algorithms.gigpo import StepCredit, TurnTable
from spear_rl.functional import step_credit as estimators
from spear_rl.functional.losses import ClippedSurrogate
from spear_rl.settings.ranges import Range, Share
from spear_rl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class HGPO(StepCredit):
    """Episode advantage plus the mean over k of that among turns with the same state and k states before it."""

    depth: Annotated[int, Range(0, 1000, unit="states")] = 2
    depth_power: Annotated[float, Range(0, 100)] = 1.0
    """A group that shares k past states weighs (k + 1) to this power."""
    discount: Annotated[float, Share] = 0.95

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        table = TurnTable(groups, self.anchor)
        advantages = estimators.hgpo(
            table.scores,
            table.groups,
            table.returns(self.discount),
            table.states,
            table.owners,
            depth=self.depth,
            depth_power=self.depth_power,
            **self.weights,
        )
        return table.by_episode(advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphGPO(StepCredit):
    """Episode advantage plus the advantage of a turn's progress on the shortest path to success.

    The paths are those of the graph that all turns of a group form together, so a good turn of a lost episode gains.
    """

    distance_discount: Annotated[float, Share] = 0.1
    """A turn that makes the shortest path to success one turn longer is worth this share of one that does not."""

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        table = TurnTable(groups, self.anchor)
        advantages = estimators.graphgpo(
            table.scores,
            table.groups,
            table.states,
            table.next_states(),
            table.owners,
            success_rewards=table.success_rewards(),
            distance_discount=self.distance_discount,
            **self.weights,
        )
        return table.by_episode(advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class G2PO(StepCredit):
    """Episode advantage plus what a turn gains in the mean return of states, beside its siblings and in the graph."""

    discount: Annotated[float, Share] = 0.95

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        table = TurnTable(groups, self.anchor)
        advantages = estimators.g2po(
            table.scores,
            table.groups,
            table.rewards,
            table.returns(self.discount),
            table.states,
            table.owners,
            discount=self.discount,
            **self.weights,
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
