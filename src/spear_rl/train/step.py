"""One training step, start to end: play, judge, learn, remember."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

import torch

from spear_rl.algorithms.base import Algorithm
from spear_rl.engines.base import Engine, Term
from spear_rl.train.collate import collate
from spear_rl.train.evaluate import mean_measures
from spear_rl.types import Group, Metrics

CollectFn = Callable[[int], list[Group]]
"""Step in, that step's groups out. Ours is `rollout.collect`; a foreign framework may bring its own."""

PlayedFn = Callable[[Sequence[Group], Sequence[Sequence[float]], Sequence[Sequence[str]]], None]
"""Told what was played, with one advantage a turn and why a turn does not train ("" if it does)."""


def train_step(
    step: int,
    *,
    collect: CollectFn,
    algorithm: Algorithm,
    engine: Engine,
    rng: random.Random,
    num_minibatches: int = 1,
    on_played: PlayedFn | None = None,
) -> Metrics:
    """Play with the current policy, take `num_minibatches` optimizer steps, remember what went well."""
    metrics: Metrics = {}
    with timed("time/rollout", metrics):
        groups = algorithm.shaped(collect(step), step)

    played = [t for group in groups for t in group.trajectories]
    turn_advantages = algorithm.advantages(groups)
    dropped = algorithm.dropped(groups)
    batch = collate(played, turn_advantages, pad_id=engine.pad_id, dropped=dropped)
    policy = [Term("policy", batch, algorithm.loss, generator=algorithm.generator)] if batch else []
    if on_played:
        on_played(groups, turn_advantages, dropped)

    replay: list[Term] = []
    imitation = algorithm.imitation
    if imitation:
        imitation.observe(groups)
        drawn = imitation.draw(step, rng, num_played=len(played))
        metrics |= drawn.metrics
        batch = collate(drawn.trajectories, drawn.turn_advantages, pad_id=engine.pad_id, dropped=drawn.dropped)
        if batch:
            wanted = round(len(batch) / drawn.share)
            replay = [Term("replay", batch, imitation.loss, imitation.weight(step), imitation.generator, wanted)]

    with timed("time/update", metrics):
        if imitation and imitation.update == "separate":
            updates = [*minibatches(policy, num_minibatches, rng), *minibatches(replay, num_minibatches, rng)]
        else:
            updates = minibatches([*policy, *replay], num_minibatches, rng)
        metrics |= mean_metrics([engine.update(terms) for terms in updates])
        engine.sync()

    if imitation:
        imitation.keep(groups, turn_advantages, step, dropped=dropped)
    return metrics | rollout_metrics(groups) | ledger(dropped) | {"rollout/bonus": fmean(t.bonus for t in played)}


def minibatches(terms: Sequence[Term], count: int, rng: random.Random) -> list[list[Term]]:
    """The rows of every term dealt out at random to `count` updates; one update keeps them as they are."""
    if not terms or count == 1:
        return [[weighed(term, 1) for term in terms]] if terms else []
    updates: list[list[Term]] = [[] for _ in range(count)]
    for term in terms:
        order = rng.sample(range(len(term.batch)), len(term.batch))
        for number, update in enumerate(updates):
            if chosen := order[number::count]:
                update.append(weighed(replace(term, batch=term.batch.rows(torch.tensor(chosen))), count))
    return [update for update in updates if update]


def weighed(term: Term, count: int) -> Term:
    """A term, a mean over its rows, weighed by those it has over those it wanted of one of `count` updates."""
    wanted = term.rows_wanted // count
    return replace(term, weight=term.weight * len(term.batch) / wanted) if len(term.batch) < wanted else term


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """How the played episodes went, by the task's own measure."""
    played = [t for group in groups for t in group.trajectories]
    turns = [turn for t in played for turn in t.turns]
    stops = Counter(t.stop for t in played)
    weights = [weight for turn in turns for weight in turn.completion.weights or ()]
    gap = {"rollout/sampler_gap": fmean(abs(math.log(w)) for w in weights if w > 0)} if any(weights) else {}
    return (
        gap
        | {
            "rollout/reward": fmean(t.reward for t in played),
            "rollout/success": fmean(t.success for t in played),
            "rollout/turns": fmean(len(t.turns) for t in played),
            "rollout/tool_turns": fmean(t.num_tool_turns for t in played),
            "rollout/invalid_turns": fmean(bool(turn.invalid) for turn in turns) if turns else 0.0,
            "rollout/tokens": float(sum(t.num_tokens for t in played)),
            "rollout/episodes": float(len(played)),
            "rollout/failed_episodes": float(sum(group.num_failed for group in groups)),
        }
        | {f"rollout/stop_{stop}": stops[stop] / len(played) for stop in stops}
        | {f"rollout/{name}": mean for name, mean in mean_measures(played).items()}
    )


def ledger(dropped: Sequence[Sequence[str]]) -> Metrics:
    """How many turns were played, how many trained, and why each of the others did not."""
    reasons = Counter(reason for turns in dropped for reason in turns)
    return {
        "policy/turns": float(reasons.total()),
        "policy/turns_trained": float(reasons.pop("", 0)),
    } | {f"policy/dropped_{reason}": float(count) for reason, count in sorted(reasons.items())}


def mean_metrics(updates: Sequence[Metrics]) -> Metrics:
    """The mean of every metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}


@contextmanager
def timed(name: str, metrics: Metrics) -> Iterator[None]:
    """Put the seconds the block takes into `metrics`."""
    start = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - start
