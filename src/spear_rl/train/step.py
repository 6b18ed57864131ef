"""One training step: rollout, advantages, update, replay. Below it: episodes to tensors, mini-batches and metrics."""

import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, TypeVar

import torch

from spear_rl.algorithms.base import Algorithm
from spear_rl.engines.base import Batch, Engine, EpisodeBatch, Term
from spear_rl.replay.buffer import Remembered, Replay, Stored, unfit_reason
from spear_rl.train.critic import judged
from spear_rl.types import Completion, Group, Metrics, Trajectory, Turn, mean_measures

CollectFn = Callable[[int], list[Group]]
"""Step in, that step's groups out: `rollout.collect_groups`, or another framework's rollout."""

METRICS = {
    "time/rollout": "Seconds of the step spent on playing episodes.",
    "time/update": "Seconds of the step spent on optimizer steps.",
    "rollout/bonus": "Mean bonus of an episode: tool bonus times mu(t), and the format bonus.",
    "rollout/reward": "Mean reward of an episode by the task alone, without bonus and format terms.",
    "rollout/success": "Share of episodes that solved their task, at rollout.temperature on training tasks.",
    "rollout/turns": "Mean turns per episode.",
    "rollout/tool_turns": "Mean turns per episode that used a tool.",
    "rollout/invalid_turns": "Share of turns that the environment could not act on.",
    "rollout/truncated_turns": "Share of turns that hit their token limit.",
    "rollout/flat_groups": "Share of groups whose episodes all have the same reward: nothing in them can be compared.",
    "rollout/flat_won": "Share of groups that are flat because every episode solved the task.",
    "rollout/flat_lost": "Share of groups that are flat because no episode solved the task.",
    "rollout/tokens": "Tokens that the policy wrote in this step.",
    "rollout/entropy": "Mean entropy of these tokens, in nats; of a generator that gives none, their mean -log p.",
    "rollout/episodes": "Episodes of this step that count in the means.",
    "rollout/failed_episodes": "Episodes lost to infrastructure failures; they are in no mean and do not train.",
    "rollout/sampler_gap": "Mean absolute log of the importance weights of another sampler (engine.importance_cap).",
    "rollout/stop_{reason}": "Share of episodes that ended so: done, max_turns or overlong.",
    "rollout/{measure}": "Mean over episodes of a measure of the environment, by the name that it gives it.",
    "rollout/returned_tasks": "Tasks of this step that were played before and not solved (rollout.return_share).",
    "rollout/restarted_groups": "Groups of this step that began within an earlier win (rollout.restart_share).",
    "rollout/restarted_success": "Share of their episodes that solved the task from there; in no other mean.",
    "rollout/given_turns": "Mean turns of the win that such an episode was given.",
    "rollout/strayed_restarts": "Episodes whose given turns did not repeat themselves: played from the start instead.",
    "rollout/returned_success": "Share of the returned tasks' episodes that solved them; absent where none returned.",
    "replay/joined_groups": "Lost groups that a stored win of their task joined (algorithm.imitation.join_lost).",
    "policy/turns": "Turns of this step's episodes, given ones included.",
    "policy/turns_trained": "Turns of this step that no filter dropped.",
    "policy/advantage": "Mean absolute advantage of these turns; 0 without any.",
    "policy/dropped_{reason}": "Turns of this step that did not train, by the filter's reason.",
    "policy/optimizer_steps": "Optimizer steps of the policy in this step, those of replayed rows alone included.",
}
"""What `train_step` reports beside the metrics of the engine, its losses and replay."""

PlayedFn = Callable[[Sequence[Group], Sequence[Sequence[float]], Sequence[Sequence[str]]], None]
"""Called with the groups, one advantage per turn, and why a turn does not train ("" if it does)."""


def train_step(
    step: int,
    *,
    collect: CollectFn,
    algorithm: Algorithm,
    engine: Engine,
    rng: random.Random,
    num_minibatches: int = 1,
    minibatch_rows: int = 0,
    epochs: int = 1,
    on_played: PlayedFn | None = None,
    on_drawn: Callable[[Replay], object] | None = None,
) -> Metrics:
    """Collect episodes with the current policy, learn from them and from replayed ones, store the good episodes.

    Args:
        num_minibatches: optimizer steps per pass over the rows.
        minibatch_rows: if above 0, as many as keep each at or below this number of on-policy rows instead.
        epochs: passes over the rows, each divided at random again; log-probabilities of the sampler stay.
    """
    metrics, replay, imitation = Metrics(), list[Term](), algorithm.imitation
    with timed("time/rollout", metrics):
        groups = algorithm.shaped(collect(step), step)

    compared = joined(groups, algorithm, step, metrics) if imitation and imitation.join_lost else groups
    dropped = algorithm.dropped(compared)
    rows_of = partial(collate, pad_id=engine.pad_id)
    critic = judged(algorithm, engine, groups, dropped, rows_of) if algorithm.critic else None
    turn_advantages = critic.turn_advantages if critic else algorithm.advantages(compared)
    batch = rows_of(episodes(compared), turn_advantages, dropped=dropped)
    batch = critic.token_level(batch) if critic and batch is not None else batch
    policy = [Term("policy", batch, algorithm.policy_loss, generator=algorithm.generator)] if batch is not None else []
    turn_advantages, dropped = played_part(compared, turn_advantages), played_part(compared, dropped)
    if on_played:
        on_played(groups, turn_advantages, dropped)

    if imitation:
        imitation.observe(groups, step)
        drawn = imitation.draw(step, rng, num_played=len(dropped))
        metrics |= drawn.metrics
        if on_drawn:
            on_drawn(drawn)
        batch = rows_of(drawn.trajectories, drawn.turn_advantages, dropped=drawn.dropped)
        if batch is not None:
            wanted = len(batch.mask) / drawn.share
            replay = [Term("replay", batch, imitation.loss, imitation.weight(step), imitation.generator, wanted)]

    with timed("time/update", metrics):
        split = Split(num_minibatches, minibatch_rows, epochs, rng)
        together = [policy, replay] if imitation and imitation.update == "separate" else [[*policy, *replay]]
        if not (critic and step < critic.settings.warmup_steps):
            metrics |= updated(engine, chain.from_iterable(map(split.updates, together)))
        if critic:
            metrics |= critic.metrics | mean_metrics(critic.learn(split.count(critic.num_rows), epochs, rng))
        engine.sync()

    if imitation:
        imitation.keep(groups, turn_advantages, step, dropped=dropped)
    return algorithm.observed(metrics | rollout_metrics(groups) | ledger(turn_advantages, dropped), step)


def joined(groups: Sequence[Group], algorithm: Algorithm, step: int, metrics: Metrics) -> Sequence[Group]:
    """The groups to compare under `SelfImitation.join_lost`: those that lost end with the newest stored win, if any.

    A flat group teaches nothing. The win gives it a positive and the losses negative advantages; it trains with the
    log-probabilities that it was sampled with, so that the clipped ratio bounds it.
    """
    imitation, num_joined = algorithm.imitation, 0
    assert imitation
    wins, out = dict[str, Stored[Remembered]](), list[Group]()
    for stored in sorted(imitation.buffer.items, key=lambda stored: (stored.step, stored.reward)):
        if stored.item.trajectory.success and 0 < step - stored.step <= imitation.buffer.max_age:
            wins[stored.item.task] = stored
    for group in groups:
        is_lost = bool(group.trajectories) and not any(t.success or t.num_given for t in group.trajectories)
        if is_lost and group.task_id and group.task_id in wins:
            item = wins[group.task_id].item
            why = [old or unfit_reason(turn) for old, turn in zip(item.dropped, item.trajectory.turns, strict=True)]
            if not all(why):
                group = replace(group, trajectories=[*group.trajectories, item.trajectory], joined=[why])
                num_joined += 1
        out.append(group)
    metrics["replay/joined_groups"] = float(num_joined)
    return algorithm.shaped(out, step)


def episodes(groups: Sequence[Group]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]


T = TypeVar("T")


def played_part(groups: Sequence[Group], per_episode: list[T]) -> list[T]:
    """What a list with one entry per episode has of those that were played: not of wins that joined."""
    if not any(group.joined for group in groups):
        return per_episode
    sizes = [(len(group.trajectories), len(group.joined)) for group in groups]
    is_played = [n < size - num_joined for size, num_joined in sizes for n in range(size)]
    return [entry for entry, keeps in zip(per_episode, is_played, strict=True) if keeps]


@dataclass(frozen=True)
class _Answer:
    """What the policy wrote, and where in its row."""

    column: int
    completion: Completion
    advantage: float
    trains: bool


@dataclass
class Row:
    """One line of a batch."""

    ids: list[int] = field(default_factory=list)
    answers: list[_Answer] = field(default_factory=list)
    images: tuple[bytes, ...] = ()


def rows(trajectory: Trajectory, turn_advantages: Sequence[float], dropped: Sequence[str] | None = None) -> list[Row]:
    """One row, or several where a prompt does not extend what came before it; none where nothing would train.

    Two turns with prompts [1 2] and [1 2 7 3 4] and answers [7] and [8] make one row:

        ids   1 2 7 3 4 8
        mask  . . x . . x

    A dropped turn's answer stays in the row as context, with its mask off.
    """
    out: list[Row] = []
    reasons = dropped or [""] * len(trajectory.turns)
    for turn, advantage, reason in zip(trajectory.turns, turn_advantages, reasons, strict=True):
        if not out or not _extends(turn, out[-1]):
            out.append(Row())
        row = out[-1]
        row.images = turn.images
        row.ids += turn.prompt_ids[len(row.ids) :]
        row.answers.append(_Answer(len(row.ids), turn.completion, advantage, not reason))
        row.ids += turn.completion.token_ids
    return [row for row in out if any(answer.trains and answer.completion.token_ids for answer in row.answers)]


def _extends(turn: Turn, row: Row) -> bool:
    """Whether a turn's prompt begins with the row; the same placeholder tokens may stand for other pictures."""
    return turn.prompt_ids[: len(row.ids)] == row.ids and turn.images[: len(row.images)] == row.images


def collate(
    trajectories: Sequence[Trajectory],
    turn_advantages: Sequence[Sequence[float]],
    *,
    pad_id: int,
    dropped: Sequence[Sequence[str]] | None = None,
) -> Batch | None:
    """Pad the rows of many episodes into one batch; None if no token of them trains."""
    reasons = dropped or [[""] * len(t.turns) for t in trajectories]
    by_episode = [rows(t, a, why) for t, a, why in zip(trajectories, turn_advantages, reasons, strict=True)]
    flat = list(chain.from_iterable(by_episode))
    if not flat:
        return None
    lengths = torch.tensor([len(row.ids) for row in flat])
    attention = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = array("q", chain.from_iterable(row.ids for row in flat))  # a quarter of torch.tensor's time
    input_ids = torch.full(attention.shape, pad_id).masked_scatter_(attention, torch.frombuffer(ids, dtype=torch.int64))

    # Only the policy's own tokens, a few in a hundred, have anything in the other tensors.
    answers = [(number, answer) for number, row in enumerate(flat) for answer in row.answers]
    sizes = torch.tensor([len(answer.completion.token_ids) for _, answer in answers])
    ends = sizes.cumsum(0)
    line = torch.tensor([number for number, _ in answers]).repeat_interleave(sizes)
    begins = torch.tensor([answer.column for _, answer in answers])
    place = (line, torch.arange(int(ends[-1])) + (begins - (ends - sizes)).repeat_interleave(sizes))
    advantages = torch.tensor([float(a.advantage) for _, a in answers]).repeat_interleave(sizes)
    if any(answer.completion.weights for _, answer in answers):
        weights = (a.completion.weights or [1.0] * len(a.completion.token_ids) for _, a in answers)
        advantages = advantages * torch.tensor(list(map(float, chain.from_iterable(weights))))
    old = torch.tensor(list(map(float, chain.from_iterable(a.completion.logprobs for _, a in answers))))
    trains = torch.tensor([answer.trains for _, answer in answers]).repeat_interleave(sizes)
    return EpisodeBatch(
        input_ids=input_ids,
        attention=attention,
        mask=torch.zeros(attention.shape, dtype=torch.bool).index_put_(place, trains),
        old_logprobs=torch.zeros(attention.shape).index_put_(place, old),
        advantages=torch.zeros(attention.shape).index_put_(place, advantages),
        episodes=torch.arange(len(by_episode)).repeat_interleave(torch.tensor(list(map(len, by_episode)))),
        images=tuple(row.images for row in flat) if any(row.images for row in flat) else (),
    )


@dataclass(frozen=True)
class Split:
    """How the rows of a step are divided between optimizer steps."""

    num_minibatches: int
    minibatch_rows: int
    epochs: int
    rng: random.Random

    def count(self, num_rows: int) -> int:
        """Optimizer steps per pass."""
        return -(-num_rows // self.minibatch_rows) if self.minibatch_rows else self.num_minibatches

    def updates(self, terms: Sequence[Term]) -> Iterator[list[Term]]:
        """The optimizer steps of all passes; the first term's rows decide how many there are in a pass."""
        for _ in range(self.epochs if terms else 0):
            yield from minibatches(terms, self.count(len(terms[0].batch.mask)), self.rng)


def minibatches(terms: Sequence[Term], count: int, rng: random.Random) -> list[list[Term]]:
    """The rows of every term, split at random into `count` updates; a single update keeps their order."""
    if not terms or count == 1:
        return [[weighed(term, 1) for term in terms]] if terms else []
    updates: list[list[Term]] = [[] for _ in range(count)]
    for term in terms:
        order = shuffled(term.batch, rng)
        for number, update in enumerate(updates):
            if chosen := order[number * len(order) // count : (number + 1) * len(order) // count]:
                update.append(weighed(replace(term, batch=term.batch.rows(torch.tensor(chosen))), count))
    return [update for update in updates if update]


def shuffled(batch: Batch, rng: random.Random) -> list[int]:
    """The rows in random order, those of an episode one after another: what they share is then computed once."""
    owners = batch.episodes.tolist() if isinstance(batch, EpisodeBatch) else range(len(batch))
    episodes = list(dict.fromkeys(owners))
    place = {episode: number for number, episode in enumerate(rng.sample(episodes, len(episodes)))}
    return sorted(rng.sample(range(len(batch)), len(batch)), key=lambda row: place[owners[row]])


def weighed(term: Term, count: int) -> Term:
    """A term, a mean over its rows, weighed by those it has over those it wanted of one of `count` updates.

    Of several updates each wants whole rows: with all rows there, none weighs less for the remainder.
    """
    rows, wanted = len(term.batch.mask), term.rows_wanted if count == 1 else round(term.rows_wanted, 6) // count
    return replace(term, weight=term.weight * rows / wanted) if rows < wanted else term


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """Metrics of the played episodes, by the task's own reward; means are of those that began at the start."""
    played = episodes([group for group in groups if not group.has_given_turns]) or episodes(groups)
    turns = [turn for t in played for turn in t.turns]
    written = [turn for t in episodes(groups) for turn in t.turns[t.num_given :]]
    stops, flat = Counter(t.stop for t in played), [group.success for group in groups if group.is_flat]
    weights = [weight for turn in turns for weight in turn.completion.weights or ()]
    nats = [x for turn in written for x in turn.completion.entropies or [-p for p in turn.completion.logprobs]]
    return {
        **({"rollout/sampler_gap": fmean(abs(math.log(w)) for w in weights if w > 0)} if any(weights) else {}),
        **(choice_metrics(groups) if any("origin" in group.info for group in groups) else {}),
        "rollout/reward": fmean(t.reward for t in played),
        "rollout/success": fmean(t.success for t in played),
        "rollout/turns": fmean(len(t.turns) for t in played),
        "rollout/tool_turns": fmean(t.num_tool_turns for t in played),
        "rollout/invalid_turns": fmean(bool(turn.invalid) for turn in turns) if turns else 0.0,
        "rollout/truncated_turns": fmean(turn.completion.truncated for turn in turns) if turns else 0.0,
        "rollout/flat_groups": len(flat) / len(groups),
        **{f"rollout/flat_{end}": flat.count(rate) / len(groups) for end, rate in (("won", 1.0), ("lost", 0.0))},
        "rollout/tokens": float(sum(len(turn.completion.token_ids) for turn in written)),
        **({"rollout/entropy": fmean(nats)} if nats else {}),
        "rollout/episodes": float(len(played)),
        "rollout/failed_episodes": float(sum(group.num_failed for group in groups)),
        **{f"rollout/stop_{stop}": stops[stop] / len(played) for stop in stops},
        **{f"rollout/{name}": mean for name, mean in mean_measures(played).items()},
        "rollout/bonus": fmean(t.bonus for t in played),
    }


def note_families(
    found: dict[str, list[float]], then: PlayedFn | None, groups: Sequence[Group], *learned: Sequence[Sequence[Any]]
) -> None:
    """An `on_played` that fills `found`, task family -> success of each of its groups, and then calls `then`.

    Tasks that return or restart are left out: they are not a fair sample of their family.
    """
    fresh = [group for group in groups if group.trajectories and group.info.get("origin", "fresh") == "fresh"]
    for name in sorted({group.info.get("family", "") for group in fresh} - {""}):
        found[name] = [round(group.success, 4) for group in fresh if group.info.get("family") == name]
    if then:
        then(groups, *learned)


def choice_metrics(groups: Sequence[Group]) -> Metrics:
    """Metrics of the groups that a choice of tasks (`rollout.choice`) put in place of fresh ones."""
    returned = [group for group in groups if group.info["origin"] == "returned"]
    restarted = [group for group in groups if group.has_given_turns]
    means: dict[str, list[float]] = {
        "rollout/returned_success": [t.success for t in episodes(returned)],
        "rollout/restarted_success": [t.success for t in episodes(restarted) if t.num_given],
        "rollout/given_turns": [t.num_given for t in episodes(restarted) if t.num_given],
    }
    return {
        "rollout/returned_tasks": float(len(returned)),
        "rollout/restarted_groups": float(len(restarted)),
        "rollout/strayed_restarts": float(sum(int(group.info.get("strayed", 0)) for group in groups)),
    } | {name: fmean(values) for name, values in means.items() if values}


def ledger(turn_advantages: Sequence[Sequence[float]], dropped: Sequence[Sequence[str]]) -> Metrics:
    """How many turns were played, how many trained and how large their advantages are, and why others did not."""
    reasons = Counter(chain.from_iterable(dropped))
    sizes = [abs(a) for a, why in zip(chain(*turn_advantages), chain(*dropped), strict=True) if not why]
    counts = {"policy/turns": reasons.total(), "policy/turns_trained": reasons.pop("", 0)}
    counts |= {f"policy/dropped_{reason}": count for reason, count in sorted(reasons.items())}
    return {name: float(count) for name, count in counts.items()} | {"policy/advantage": fmean(sizes or [0.0])}


def updated(engine: Engine, updates: Iterable[Sequence[Term]]) -> Metrics:
    """Take the optimizer steps; the mean of their metrics, and how many they were."""
    taken = [engine.update(update) for update in updates]
    return mean_metrics(taken) | {"policy/optimizer_steps": float(len(taken))}


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
