"""The formulas once more, in plain loops over floats, and random episodes to try them on."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from hypothesis import strategies as st

from spear_rl.functional import LossInputs
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

Matrix = list[list[float]]


# -- advantages ---------------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    total = Fraction(0)
    for value in values:
        total += Fraction(value)
    return float(total / len(values))


def sample_std(values: Sequence[float]) -> float:
    center = Fraction(0)
    for value in values:
        center += Fraction(value)
    center /= len(values)
    squares = Fraction(0)
    for value in values:
        squares += (Fraction(value) - center) ** 2
    return math.sqrt(squares / (len(values) - 1))


def group_relative(values: Sequence[float], labels: Sequence[Hashable], *, divide_by_std: bool) -> list[float]:
    """GRPO with `divide_by_std`, Dr. GRPO without."""
    out = []
    for value, label in zip(values, labels, strict=True):
        siblings = [v for v, other in zip(values, labels, strict=True) if other == label]
        if len(siblings) == 1:
            out.append(0.0)
            continue
        advantage = float(Fraction(value) - sum(Fraction(v) for v in siblings) / len(siblings))
        out.append(advantage / (sample_std(siblings) + 1e-6) if divide_by_std else advantage)
    return out


def leave_one_out(values: Sequence[float], labels: Sequence[Hashable]) -> list[float]:
    out = []
    for i, value in enumerate(values):
        others = [values[j] for j in range(len(values)) if j != i and labels[j] == labels[i]]
        out.append(value - mean(others) if others else 0.0)
    return out


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    out = []
    for start in range(len(rewards)):
        total = 0.0
        for later in range(start, len(rewards)):
            total += discount ** (later - start) * rewards[later]
        out.append(total)
    return out


def scores(groups: Sequence[Group]) -> tuple[list[float], list[int]]:
    """What on-policy learning compares, and the group it is compared in, for every episode in order."""
    values, labels = [], []
    for number, group in enumerate(groups):
        for t in group.trajectories:
            values.append(sum(turn.reward for turn in t.turns) + t.bonus + sum(turn.shaping for turn in t.turns))
            labels.append(number)
    return values, labels


def gigpo(
    groups: Sequence[Group], *, discount: float, step_weight: float, divide_by_std: bool, episode_weight: float = 1.0
) -> list[list[float]]:
    values, labels = scores(groups)
    episode = group_relative(values, labels, divide_by_std=divide_by_std)
    visits: list[tuple[int, int, str, float]] = []
    n = 0
    for number, group in enumerate(groups):
        for t in group.trajectories:
            for turn, value in zip(
                t.turns, returns_to_go([u.reward + u.shaping for u in t.turns], discount), strict=True
            ):
                visits.append((n, number, turn.state_key, value))
            n += 1
    out: list[list[float]] = [[] for _ in range(n)]
    for owner, number, key, value in visits:
        same = [v for _, other, k, v in visits if key and other == number and k == key]
        step = 0.0
        if len(same) > 1:
            step = value - mean(same)
            if divide_by_std:
                step /= sample_std(same) + 1e-6
        out[owner].append(episode_weight * episode[owner] + step_weight * step)
    return out


# -- losses -------------------------------------------------------------------------------------------------------


@dataclass
class Tokens:
    """One mini-batch as nested lists, [B][T]."""

    logprobs: Matrix
    old_logprobs: Matrix
    advantages: Matrix
    mask: list[list[bool]]
    entropy: Matrix
    ref_logprobs: Matrix

    @property
    def training(self) -> list[tuple[int, int]]:
        """(row, column) of every token that trains."""
        return [(b, t) for b, row in enumerate(self.mask) for t, on in enumerate(row) if on]


def ratio(logprob: float, old_logprob: float) -> float:
    return math.exp(max(-20.0, min(20.0, logprob - old_logprob)))


def surrogate(
    logprob: float, old_logprob: float, advantage: float, *, low: float, high: float, dual: float | None = None
) -> float:
    """The loss of one token: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    r = ratio(logprob, old_logprob)
    loss = -min(r * advantage, max(1 - low, min(1 + high, r)) * advantage)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss = -dual * advantage
    return loss


def is_clipped(logprob: float, old_logprob: float, advantage: float, *, low: float, high: float) -> bool:
    """Whether the clip has taken the token's gradient."""
    r = ratio(logprob, old_logprob)
    if advantage > 0:
        return r > 1 + high
    if advantage < 0:
        return r < 1 - low
    return False


def kl_estimate(logprob: float, ref_logprob: float) -> float:
    d = ref_logprob - logprob
    return math.exp(d) - d - 1


def token_mean(values: Matrix, tokens: Tokens) -> float:
    total = 0.0
    for b, t in tokens.training:
        total += values[b][t]
    return total / max(len(tokens.training), 1)


def sequence_mean(values: Matrix, tokens: Tokens) -> float:
    means = []
    for row, mask in zip(values, tokens.mask, strict=True):
        kept = [value for value, trains in zip(row, mask, strict=True) if trains]
        means.append(sum(kept) / max(len(kept), 1))
    return sum(means) / len(means)


def fixed_length_mean(values: Matrix, tokens: Tokens, length: int) -> float:
    rows = []
    for b in range(len(tokens.mask)):
        rows.append(sum(values[b][t] for t in range(len(tokens.mask[b])) if tokens.mask[b][t]) / length)
    return sum(rows) / len(rows)


def covariances(tokens: Tokens) -> dict[tuple[int, int], float]:
    """(A - mean A)(logp - mean logp) of every token that trains."""
    places = tokens.training
    mean_a = sum(tokens.advantages[b][t] for b, t in places) / max(len(places), 1)
    mean_l = sum(tokens.logprobs[b][t] for b, t in places) / max(len(places), 1)
    return {(b, t): (tokens.advantages[b][t] - mean_a) * (tokens.logprobs[b][t] - mean_l) for b, t in places}


def covariance_candidates(
    tokens: Tokens, *, low: float, high: float, clip_low: float, clip_high: float
) -> set[tuple[int, int]]:
    """What Clip-Cov may draw from: inside the bounds and not silenced by PPO's clip."""
    out = set()
    for (b, t), covariance in covariances(tokens).items():
        clipped = is_clipped(
            tokens.logprobs[b][t], tokens.old_logprobs[b][t], tokens.advantages[b][t], low=clip_low, high=clip_high
        )
        if low < covariance < high and not clipped:
            out.add((b, t))
    return out


def each(tokens: Tokens, function: object, *names: str, **options: object) -> Matrix:
    """`function` of the named values of every training token; 0 elsewhere."""
    out = [[0.0] * len(row) for row in tokens.mask]
    for b, t in tokens.training:
        out[b][t] = function(*(getattr(tokens, name)[b][t] for name in names), **options)  # type: ignore[operator]
    return out


# Log-ratios on both sides of every kink (log 0.8, log 1.2, log 1.28, log 10, +-20), none of them near one.
LOG_RATIOS = (-25.0, -21.0, -19.0, -3.0, -0.5, -0.3, -0.15, 0.0, 0.1, 0.21, 0.3, 1.0, 2.2, 2.5, 19.0, 21.0, 25.0)


def random_tokens(
    seed: int, *, log_ratios: Sequence[float] = LOG_RATIOS, max_rows: int = 4, max_columns: int = 6, scale: float = 1.0
) -> Tokens:
    """A mini-batch with at least one training token; no two tokens have equal values."""
    rng = random.Random(seed)
    rows, columns = rng.randint(1, max_rows), rng.randint(1, max_columns)
    everywhere = [[0.0] * columns for _ in range(rows)]
    old = [[-rng.expovariate(0.7) for _ in row] for row in everywhere]
    tokens = Tokens(
        logprobs=[[o + rng.choice(log_ratios) + rng.uniform(-0.009, 0.009) for o in row] for row in old],
        old_logprobs=old,
        advantages=[[scale * rng.choice((rng.gauss(0, 1), rng.gauss(0, 3), 0.0)) for _ in row] for row in everywhere],
        mask=[[rng.random() < 0.7 for _ in row] for row in everywhere],
        entropy=[[rng.uniform(0, 3) for _ in row] for row in everywhere],
        ref_logprobs=[[o + rng.gauss(0, 1) for o in row] for row in old],
    )
    tokens.mask[rng.randrange(rows)][rng.randrange(columns)] = True
    return tokens


GARBAGE = (math.inf, -math.inf, math.nan, 1e30)


def loss_inputs(tokens: Tokens, dtype: torch.dtype = torch.float64) -> LossInputs:
    """The same mini-batch as tensors; logprobs and entropy carry a gradient."""
    names = ("logprobs", "old_logprobs", "advantages", "entropy", "ref_logprobs")
    values = {name: torch.tensor(getattr(tokens, name), dtype=dtype) for name in names}
    values["logprobs"].requires_grad_()
    values["entropy"].requires_grad_()
    return LossInputs(**values, mask=torch.tensor(tokens.mask))


def padded(tokens: Tokens, rng: random.Random, *, left: int, right: int) -> Tokens:
    """The same tokens among masked columns that hold anything at all; what was masked already holds anything too."""

    def widened(rows: list[list[float]]) -> list[list[float]]:
        dirty = [
            [v if on else rng.choice(GARBAGE) for v, on in zip(row, mask, strict=True)]
            for row, mask in zip(rows, tokens.mask, strict=True)
        ]
        return [[*rng.choices(GARBAGE, k=left), *row, *rng.choices(GARBAGE, k=right)] for row in dirty]

    return Tokens(
        **{f.name: widened(getattr(tokens, f.name)) for f in dataclasses.fields(Tokens) if f.name != "mask"},
        mask=[[False] * left + row + [False] * right for row in tokens.mask],
    )


def reordered(tokens: Tokens, order: list[int]) -> Tokens:
    return Tokens(**{f.name: [getattr(tokens, f.name)[i] for i in order] for f in dataclasses.fields(Tokens)})


# -- replay -------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at rank (n - 1) * percent / 100 counted from 0, linear between ranks, in exact arithmetic."""
    ordered = [Fraction(v) for v in sorted(values)]
    rank = Fraction(percent) * (len(ordered) - 1) / 100
    whole = int(rank)
    if whole == len(ordered) - 1:
        return float(ordered[-1])
    return float(ordered[whole] * (whole + 1 - rank) + ordered[whole + 1] * (rank - whole))


# -- episodes -----------------------------------------------------------------------------------------------------


def turn(
    reward: float = 0.0,
    *,
    state: str = "",
    tool: bool = False,
    invalid: str = "",
    shaping: float = 0.0,
    text: str = "",
    tokens: Sequence[int] = (1, 2, 3),
    truncated: bool = False,
) -> Turn:
    return Turn(
        prompt_ids=[0],
        completion=Completion(list(tokens), [-1.0] * len(tokens), truncated),
        reward=reward,
        state_key=state,
        used_tool=tool,
        invalid=invalid,
        text=text,
        shaping=shaping,
    )


def episode(*turns: Turn | float, bonus: float = 0.0, stop: Stop = Stop.DONE) -> Trajectory:
    """An episode of these turns; a number is a turn with that reward."""
    return Trajectory([t if isinstance(t, Turn) else turn(t) for t in turns], stop, bonus=bonus)


def group(*trajectories: Trajectory | float, task: str = "task", family: str = "", step: int = 0) -> Group:
    """A group of these episodes; a number is an episode of one turn with that reward."""
    episodes = [t if isinstance(t, Trajectory) else episode(t) for t in trajectories]
    return Group(task, episodes, step=step, info={"family": family} if family else {})


rewards = st.one_of(st.sampled_from([-1.0, 0.0, 0.1, 1.0, 10.0]), st.floats(-20, 20))
"""Often equal to each other, as rewards are."""

turns = st.builds(
    turn,
    rewards,
    state=st.sampled_from(["", "kitchen", "hall", "=hall", "#0.0", "#1.0"]),
    tool=st.booleans(),
    invalid=st.sampled_from(["", "", "no_action", "inadmissible"]),
    shaping=st.sampled_from([0.0, 0.0, -0.1]),
)

episodes = st.builds(
    lambda played, bonus: episode(*played, bonus=bonus),
    st.lists(turns, min_size=1, max_size=4),
    st.sampled_from([0.0, 0.0, 0.1, 0.7]),
)

groups = st.lists(
    st.builds(
        lambda played, task: group(*played, task=task),
        st.lists(episodes, min_size=1, max_size=4),
        st.sampled_from(["first", "second"]),
    ),
    min_size=1,
    max_size=3,
)
"""Groups of one to four episodes; two of them may be of the same task."""
