"""The critic's part of a training step: values of the played episodes, advantages from them, and the value loss."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from spear_rl.algorithms.base import Algorithm
from spear_rl.algorithms.critic import Critic, Estimate, Estimator, per_turn
from spear_rl.engines.base import Batch, CriticEngine, Engine, ValueModel
from spear_rl.errors import ConfigError
from spear_rl.functional.values import explained_variance, whitened
from spear_rl.types import Group, Metrics, Trajectory


def critic_engine(engine: Engine) -> CriticEngine:
    """The engine, if it can hold a critic."""
    if not isinstance(engine, CriticEngine):
        kind = type(engine).__name__
        raise ConfigError(f"algorithm.name: the engine {kind} cannot hold a critic: take an algorithm without one")
    return engine


@dataclass(frozen=True, slots=True)
class Judged:
    """The played episodes with the critic's values; K is the number of tokens that the policy wrote, in order."""

    model: ValueModel
    settings: Critic
    batch: Batch | None
    """All rows; the mask is True on all K tokens, also of turns that do not train the policy."""
    values: Tensor
    """[K] of the state before each token."""
    estimate: Estimate
    advantages: Tensor
    """[K] what a token trains the policy with."""
    trains: Tensor
    """[K] whether it does."""
    turn_advantages: list[list[float]]
    """Per episode and turn: the mean of its tokens' advantages."""

    def token_level(self, batch: Batch) -> Batch:
        """A batch of the turns that train the policy, with an advantage for every token."""
        own = self.advantages[self.trains].to(batch.advantages.dtype)
        return replace(batch, advantages=torch.zeros_like(batch.advantages).masked_scatter(batch.mask, own))

    @property
    def num_rows(self) -> int:
        return 0 if self.batch is None else len(self.batch)

    def learn(self, count: int, epochs: int, rng: random.Random) -> list[Metrics]:
        """Fit the values: per pass `count` optimizer steps, each on a random part of the rows; one keeps their order.

        Every played turn counts, also one that a filter drops: the critic is a baseline, like a group's mean. Given
        turns do not: the policy did not choose them.
        """
        if self.batch is None:
            return []
        columns = torch.zeros(3, *self.batch.mask.shape)
        for column, x in zip(columns, (self.values, self.estimate.returns, self.estimate.fits), strict=True):
            column[self.batch.mask] = x.to(column.dtype)
        old, returns, batch = columns[0], columns[1], replace(self.batch, mask=columns[2].bool())
        clip, fitted = self.settings.value_clip or None, list[Metrics]()
        for _ in range(epochs):
            order = list(range(len(batch))) if count == 1 else rng.sample(range(len(batch)), len(batch))
            parts = [torch.tensor(order[number::count]) for number in range(min(count, len(order)))]
            fitted += [
                self.model.update(batch.rows(n), old[n], returns[n], clip=clip) for n in parts if batch.mask[n].any()
            ]
        return fitted

    @property
    def metrics(self) -> Metrics:
        """Of the values before this step's update."""
        values, returns = self.values[self.estimate.fits].double(), self.estimate.returns[self.estimate.fits]
        if not len(values):
            return {}
        return {
            "critic/value": float(values.mean()),
            "critic/return": float(returns.mean()),
            "critic/explained_variance": explained_variance(values, returns),
        }


def judged(
    algorithm: Algorithm,
    engine: Engine,
    groups: Sequence[Group],
    dropped: Sequence[Sequence[str]],
    collate: Callable[[list[Trajectory], list[list[float]]], Batch | None],
) -> Judged:
    """Values and advantages of what was played.

    Args:
        collate: episodes and per-turn advantages in, the rows of all turns out; None if there is not one token.
    """
    played = [t for group in groups for t in group.trajectories]
    batch = collate(played, [[0.0] * len(t.turns) for t in played])
    model, estimator, settings = critic_engine(engine).critic, algorithm.advantages, algorithm.critic
    if model is None or settings is None or not isinstance(estimator, Estimator):
        raise ValueError("PPO needs an engine after hold_critic, and advantages with a method estimate, as GAE has")
    values = torch.zeros(0) if batch is None else model.values(batch).cpu()[batch.mask]
    estimate = estimator.estimate(groups, values)
    given = [n < t.num_given for t in played for n, turn in enumerate(t.turns) for _ in turn.completion.token_ids]
    estimate = replace(estimate, fits=estimate.fits & ~torch.tensor(given, dtype=torch.bool))
    completions = [turn.completion for t in played for turn in t.turns]
    sizes = [len(completion.token_ids) for completion in completions]
    trains = torch.tensor([not why for turns in dropped for why in turns], dtype=torch.bool)
    trains, advantages = trains.repeat_interleave(torch.tensor(sizes, dtype=torch.long)), estimate.advantages
    if getattr(estimator, "divide_by_std", False):
        advantages = whitened(advantages, trains)
    turn_advantages = per_turn(advantages, groups)
    if any(completion.weights for completion in completions):
        weights = chain.from_iterable(c.weights or [1.0] * n for c, n in zip(completions, sizes, strict=True))
        advantages = advantages * torch.tensor(list(weights))
    return Judged(model, settings, batch, values, estimate, advantages, trains, turn_advantages)
