"""HGPO, GraphGPO and G2PO once more, in plain loops over all pairs of turns, and random episodes to try them on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

import references
from spear_rl.types import Group, Stop, Trajectory

FAR = 10**9


@dataclass(frozen=True)
class Visit:
    """One turn, with what the formulas need of its episode."""

    episode: int
    group: int
    path: tuple[Hashable, ...]
    """The states of the episode up to this turn's; an unknown state equals no other."""
    rewards: tuple[float, ...]
    """Of this turn and of those after it."""
    following: Hashable
    """The next state, "won", "lost" or "cut off"."""
    won: float
    """What a success of the group is worth."""

    @property
    def state(self) -> Hashable:
        return self.path[-1]


def visits(groups: Sequence[Group]) -> list[Visit]:
    out, n = [], 0
    for number, group in enumerate(groups):
        wins = [sum(u.reward for u in t.turns) for t in group.trajectories if t.success]
        won = max(wins) if wins and max(wins) > 0 else 1.0
        for t in group.trajectories:
            states = [("key", u.state_key) if u.state_key else ("unknown", n, m) for m, u in enumerate(t.turns)]
            ended = "won" if t.success else "lost" if t.stop == Stop.DONE else "cut off"
            for m in range(len(t.turns)):
                following = states[m + 1] if m + 1 < len(t.turns) else ended
                rewards = tuple(u.reward + u.shaping for u in t.turns[m:])
                out.append(Visit(n, number, tuple(states[: m + 1]), rewards, following, won))
            n += 1
    return out


def by_episode(
    groups: Sequence[Group], steps: Sequence[float], *, step_weight: float, episode_weight: float, divide_by_std: bool
) -> list[list[float]]:
    episode = references.group_relative(*references.scores(groups), divide_by_std=divide_by_std)
    out: list[list[float]] = [[] for _ in episode]
    for visit, step in zip(visits(groups), steps, strict=True):
        out[visit.episode].append(episode_weight * episode[visit.episode] + step_weight * step)
    return out


def relative(value: float, siblings: Sequence[float], *, divide_by_std: bool) -> float:
    if len(siblings) < 2:
        return 0.0
    centered = value - references.mean(siblings)
    return centered / (references.sample_std(siblings) + 1e-6) if divide_by_std else centered


def hgpo_steps(
    groups: Sequence[Group], *, depth: int, depth_power: float, discount: float, divide_by_std: bool
) -> list[float]:
    turns, out = visits(groups), []
    values = [references.returns_to_go(v.rewards, discount)[0] for v in turns]
    for mine, value in zip(turns, values, strict=True):
        total = weights = 0.0
        for k in range(depth + 1):
            same = [
                other_value
                for other, other_value in zip(turns, values, strict=True)
                if other.group == mine.group
                and other.path[-(k + 1) :] == mine.path[-(k + 1) :]
                and min(len(other.path), k + 1) == min(len(mine.path), k + 1)
            ]
            if max(same) - min(same) > 1e-12 * max(map(abs, same)):
                total += (k + 1) ** depth_power * relative(value, same, divide_by_std=divide_by_std)
                weights += (k + 1) ** depth_power
        out.append(total / weights if weights else 0.0)
    return out


def shortest_paths(turns: Sequence[Visit], group: int) -> dict[Hashable, int]:
    """Floyd and Warshall's: turns from each node to "won", FAR where there is no path."""
    edges = {(v.state, v.following) for v in turns if v.group == group}
    nodes = {node for edge in edges for node in edge} | {"won"}
    length = {(a, b): 0 if a == b else 1 if (a, b) in edges else FAR for a in nodes for b in nodes}
    for middle in nodes:
        for a in nodes:
            for b in nodes:
                length[a, b] = min(length[a, b], length[a, middle] + length[middle, b])
    return {node: min(length[node, "won"], FAR) for node in nodes}


def graphgpo_steps(groups: Sequence[Group], *, distance_discount: float, divide_by_std: bool) -> list[float]:
    turns, progress = visits(groups), []
    for visit in turns:
        paths = shortest_paths(turns, visit.group)
        beyond = 1 + max(d for d in paths.values() if d < FAR)
        here, there = (beyond if paths[s] == FAR else paths[s] for s in (visit.state, visit.following))
        progress.append(visit.won * distance_discount ** (there - here + 1))
    out = []
    for mine, value in zip(turns, progress, strict=True):
        same = [
            p
            for other, p in zip(turns, progress, strict=True)
            if (other.group, other.state) == (mine.group, mine.state) and other.following != "cut off"
        ]
        out.append(0.0 if mine.following == "cut off" else relative(value, same, divide_by_std=divide_by_std))
    return out


def g2po_steps(groups: Sequence[Group], *, discount: float, divide_by_std: bool) -> list[float]:
    turns = visits(groups)

    def worth(group: int, state: Hashable) -> float:
        returns = [
            discount * references.returns_to_go(v.rewards, discount)[0]
            for v in turns
            if (v.group, v.state) == (group, state)
        ]
        return references.mean(returns) if returns else 0.0

    leads = [v.rewards[0] + worth(v.group, v.following) for v in turns]
    gains = [lead - worth(v.group, v.state) for v, lead in zip(turns, leads, strict=True)]
    out = []
    for mine, lead, gain in zip(turns, leads, gains, strict=True):
        beside = [x for v, x in zip(turns, leads, strict=True) if (v.group, v.state) == (mine.group, mine.state)]
        everywhere = [x for v, x in zip(turns, gains, strict=True) if v.group == mine.group]
        local = relative(lead, beside, divide_by_std=divide_by_std)
        out.append(local + relative(gain, everywhere, divide_by_std=divide_by_std))
    return out


# -- random episodes ----------------------------------------------------------------------------------------------


def walk(states: str, *, won: bool = False, stop: Stop = Stop.DONE, reward: float | None = None) -> Trajectory:
    """An episode through these states, one letter each ("." is unknown); the last turn pays 1 for a win."""
    paid = float(won) if reward is None else reward
    turns = [
        references.turn(paid if m == len(states) - 1 else 0.0, state="" if s == "." else s)
        for m, s in enumerate(states)
    ]
    return Trajectory(turns, stop, success=won)


walks = st.builds(
    walk,
    st.text("aabbcd.", max_size=6),
    won=st.booleans(),
    stop=st.sampled_from([Stop.DONE, Stop.DONE, Stop.MAX_TURNS, Stop.OVERLONG]),
    reward=st.sampled_from([None, None, 10.0, 0.5, 0.0, -1.0]),
)
"""Few states, so that episodes meet, come back and stay where they are."""

rich = st.builds(
    lambda turns, won, stop, bonus: Trajectory(turns, stop, bonus=bonus, success=won),
    st.lists(references.turns, max_size=4),
    st.booleans(),
    st.sampled_from([Stop.DONE, Stop.MAX_TURNS]),
    st.sampled_from([0.0, 0.1]),
)
"""With rewards and format terms on every turn."""

groups = st.lists(
    st.builds(lambda played: references.group(*played), st.lists(st.one_of(walks, rich), max_size=5)), max_size=3
)
