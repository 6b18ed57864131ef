"""The switches beyond the paper: each against a reference kept by hand, through the training step and a resume."""

from __future__ import annotations

import itertools
import json
import math
import random
import tomllib
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import references
from conftest import RecordingEngine
from references import group, turn
from spear_rl.algorithms import (
    ALGORITHMS,
    BASES,
    OURS,
    ByEntropy,
    BySuccess,
    ClippedSurrogate,
    FixedLength,
    SequenceMean,
    SettingError,
    TokenMean,
    dr_bot,
    dr_grpo,
    gigpo,
    grpo,
    spear,
)
from spear_rl.algorithms.base import Algorithm, Remembered
from spear_rl.app.build.rollout import tasks_of
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import PROFILES, Config, flat, load, presets, resolved, to_toml, update
from spear_rl.app.train import train_from
from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.errors import ConfigError
from spear_rl.integrations.verl.launch import require_expressible
from spear_rl.replay import Stored
from spear_rl.replay.buffer import Outcome, Outcomes, Running
from spear_rl.replay.priorities import PRIORITIES, priorities, weighted_sample
from spear_rl.rollout import ChatRenderer
from spear_rl.rollout.agents.records import Recorded
from spear_rl.rollout.collect import demonstration
from spear_rl.train.cold_start import seed_replay
from spear_rl.train.step import train_step
from spear_rl.types import Completion, Group, Metrics, Stop, Trajectory, Turn

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def random_episode(rng: random.Random) -> Trajectory:
    """One to three turns with tokens of their own probabilities; won, lost or in between."""
    turns = []
    for _ in range(rng.randint(1, 3)):
        size = rng.randint(1, 4)
        tokens = Completion([rng.randrange(1, 50) for _ in range(size)], [-rng.expovariate(1.0) for _ in range(size)])
        turns.append(Turn([0], tokens, invalid=rng.choice(["", "", "", "no_action"])))
    reward = rng.choice([0.0, 0.0, 1.0, 1.0, 10.0, rng.uniform(-1, 1)])
    return Trajectory([*turns[:-1], replace(turns[-1], reward=reward)], Stop.DONE, success=reward >= 1)


def random_step(rng: random.Random, num_tasks: int = 4) -> list[Group]:
    names = rng.sample(["a1", "a2", "a3", "b1", "b2", "c1"], rng.randint(1, num_tasks))
    return [
        Group(name, [random_episode(rng) for _ in range(rng.randint(2, 5))], info={"family": name[0]}) for name in names
    ]


class Teller(RecordingEngine):
    """An engine that reports entropies from a list, one per update; None is not reported."""

    def __init__(self, entropies=()) -> None:
        super().__init__(None, [""])
        self._entropies = list(entropies)

    def update(self, terms) -> Metrics:
        super().update(terms)
        entropy = self._entropies.pop(0) if self._entropies else None
        return {} if entropy is None else {"policy/entropy": entropy}


def lived(algorithm: Algorithm, steps, engine=None) -> tuple[RecordingEngine, list, list[Metrics]]:
    """The engine, what each step drew, and each step's metrics."""
    engine, rng, drawn = engine or Teller(), random.Random(0), []
    parts = {"algorithm": algorithm, "engine": engine, "rng": rng, "on_drawn": drawn.append}
    metrics = [train_step(n, collect=lambda _, now=played: now, **parts) for n, played in enumerate(steps)]
    return engine, drawn, metrics


# -- A' against siblings ------------------------------------------------------------------------------------------


def by_hand(steps, now: int, *, max_age: int, per_family: bool, with_std: bool) -> dict[tuple[int, str, float], float]:
    """A' in step `now` of every episode that beat its group in an earlier one, by (step, task, reward)."""
    recent = [g for n, played in enumerate(steps[: now + 1]) if now - n <= max_age for g in played]
    found = {}
    for n, played in enumerate(steps[:now]):
        for one in played if now - n <= max_age else ():
            rewards = [t.reward for t in one.trajectories]
            alike = [g for g in recent if not per_family or g.info["family"] == one.info["family"]]
            today = fmean(t.reward for g in alike for t in g.trajectories)
            for reward in rewards:
                if reward > fmean(rewards):
                    above = reward - max(fmean(rewards), today)
                    found[n, one.task_id, reward] = above / (stdev(rewards) + 1e-6) if with_std else above
    return found


@quick
@given(seeds, st.booleans(), st.sampled_from([grpo, dr_grpo, gigpo]), st.integers(1, 4))
def test_siblings_are_what_an_on_policy_advantage_compares_with(seed, per_family, base, max_age):
    rng = random.Random(seed)
    steps = [random_step(rng) for _ in range(5)]
    for one in (g for played in steps for g in played):
        rewards = [t.reward for t in one.trajectories]
        assume(len(set(rewards)) == 1 or max(rewards) - min(rewards) > 1e-6)
    options = {"baseline": "siblings", "baseline_per_family": per_family, "max_age": max_age, "skip_invalid": False}
    algorithm = spear(replace(base(), filters=()), bonus=None, imitation=1.0, fraction=100.0, **options)
    _, drawn, metrics = lived(algorithm, steps)
    with_std = base is not dr_grpo
    for now, replay in enumerate(drawn):
        expected = by_hand(steps, now, max_age=max_age, per_family=per_family, with_std=with_std)
        got = {(s.step, s.item.task, s.reward): a for s, a in replay.drawn}
        assert got.keys() >= {key for key, a in expected.items() if a > 1e-9}
        for key, advantage in got.items():
            assert advantage == pytest.approx(expected[key], rel=1e-9, abs=1e-9)
        for stored, advantage in replay.drawn:  # never more than it was when it was played
            [then] = {round(a, 9) for a in stored.item.turn_advantages}
            assert advantage <= then + 1e-6
        assert ("replay/baseline" in metrics[now]) == (metrics[now]["replay/buffer_size"] > 0)


def test_a_family_that_is_solved_is_not_imitated_any_more_and_another_is():
    algorithm = spear(
        dr_grpo(), bonus=None, imitation=1.0, fraction=100.0, baseline="siblings", baseline_per_family=True
    )
    first = [group(10.0, 0.0, task="easy", family="e"), group(10.0, 0.0, task="hard", family="h")]
    later = [group(10.0, 10.0, 10.0, 10.0, task=f"easy{n}", family="e") for n in range(2)]
    _, drawn, _ = lived(algorithm, [first, later, later, later])
    means = [(10 + 40 * 2 * n + 40 * 2) / (2 + 8 * n + 8) for n in range(3)]
    for replay, mean in zip(drawn[1:], means, strict=True):
        assert {s.item.family: a for s, a in replay.drawn} == {"e": pytest.approx(10 - mean), "h": 5.0}


@pytest.mark.parametrize("reward", [0.7, 0.3, 1 / 3, 10.0])
@pytest.mark.parametrize("size", range(2, 8))
def test_a_win_that_earns_what_its_family_earns_today_is_not_drawn(reward, size):
    """Rounding of the mean would leave a tiny A', and such wins would take the places of others."""
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=100.0, baseline="siblings", max_age=2)
    solved = [group(*[reward] * size, task=f"other {n}") for n in range(3)]
    _, _, metrics = lived(algorithm, [[group(reward, 0.0)], solved])
    assert (metrics[1]["replay/buffer_size"], metrics[1]["replay/eligible"]) == (1, 1)  # the loss of step 0 counts too
    algorithm.imitation.outcomes.add([], oldest=1)
    assert algorithm.imitation.draw(2, random.Random(0), num_played=4).metrics["replay/eligible"] == 0


def test_siblings_replay_less_than_a_percentile_near_zero():
    """Rewards of 10 over a median near 0: the percentile gives a win all of its reward."""
    steps = [[group(10.0, 10.0, 10.0, 0.0, task="t"), *[group(0.0, 0.0, task=f"x{n}") for n in range(3)]]] * 2
    got = {}
    for baseline in ("percentile", "siblings"):
        algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=1.0, baseline=baseline)
        got[baseline] = lived(algorithm, steps)[2][1]["replay/advantage"]
    assert got == {"percentile": 10.0, "siblings": 2.5}


# -- wins of a file (algorithm.imitation.from) --------------------------------------------------------------------


def of_a_file(algorithm: Algorithm, *wins: tuple[str, float]) -> Algorithm:
    """With a win of one turn per (family, log-probability) in its buffer."""
    found = [
        Recorded(
            Trajectory([Turn([0], Completion([1, 2], [logprob] * 2), reward=1.0)], Stop.DONE, success=True),
            family=family,
            has_logprobs=True,
        )
        for family, logprob in wins
    ]
    seed_replay(algorithm.imitation, found, Teller())
    return algorithm


def test_confident_ranks_the_wins_of_a_file_as_those_that_were_played_also_after_a_resume():
    options = {"imitation": 1.0, "priority": ["confident"]}
    algorithm, again = of_a_file(spear(dr_grpo(), **options), ("a", -3.0), ("a", -0.5)), spear(dr_grpo(), **options)
    again.load_state_dict(algorithm.state_dict())
    for imitation in (algorithm.imitation, again.imitation):
        stored = list(imitation.buffer.items)
        assert [s.item.surprisal for s in stored] == [3.0, 0.5]
        assert priorities(["confident"], stored, Outcomes(), 0) == [0.5, 1.0]


@pytest.mark.parametrize("baseline", ["percentile", "siblings"])
def test_a_win_of_a_file_waits_until_its_family_is_played(baseline):
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=100.0, baseline=baseline, baseline_per_family=True)
    of_a_file(algorithm, ("a", -1.0), ("b", -1.0))
    steps = [[group(0.0, 0.0, family="a")], [group(0.0, 0.0, family="b")]]
    _, drawn, _ = lived(algorithm, steps)
    assert [sorted(s.item.family for s, _ in replay.drawn) for replay in drawn] == [["a"], ["a", "b"]]


# -- weights of a draw --------------------------------------------------------------------------------------------


def success_by_hand(outcomes: list[Outcome], item: Remembered) -> float:
    own = [o for o in outcomes if o.task == item.task]
    own = [o for o in own if o.step == max(o.step for o in own)] or [o for o in outcomes if o.family == item.family]
    return (sum(o.successes for o in own) + 0.5) / (sum(o.episodes for o in own) + 1)


def weight_by_hand(
    word: str, stored: list[Stored[Remembered]], place: int, outcomes: list[Outcome], step: int
) -> float:
    item, surprisals = stored[place].item, [s.item.surprisal for s in stored]
    if word == "medium":
        p = success_by_hand(outcomes, item)
        return 0.0 if p >= 0.9 else p * (1 - p)
    if word == "hard":
        return 1 - (0.5 if item.group_success is None else item.group_success)
    if word == "rare":
        return min(20.0, 1 / (0.5 if item.group_success is None else item.group_success or 0.01))
    if word == "confident":
        lower, equal = sum(x < item.surprisal for x in surprisals), surprisals.count(item.surprisal)
        return fmean((len(stored) - rank) / len(stored) for rank in range(lower, lower + equal))
    if word == "family":
        return 1.0  # of all words together, below
    return 2 ** (-(step - stored[place].step) / 2)


@quick
@given(seeds, st.sets(st.sampled_from(PRIORITIES), min_size=1), st.integers(1, 12))
def test_weights_are_the_product_of_what_each_word_says(seed, words, count):
    rng = random.Random(seed)
    names = ["a1", "a2", "b1", "b2", "c1"]
    outcomes = []
    for _ in range(rng.randint(0, 6)):
        task, episodes = rng.choice(names[:-1]), rng.randint(1, 8)
        outcomes.append(Outcome(rng.randint(3, 8), task, task[0], episodes, rng.randint(0, episodes), 0.0))
    outcomes.sort(key=lambda o: o.step)
    items = [
        (task := rng.choice(names), rng.choice([None, 0.0, 0.125, 0.25, 0.5, 1.0]), rng.choice([0.1, 0.7, 2.0]))
        for _ in range(count)
    ]
    stored = [
        Stored(
            Remembered(Trajectory([], Stop.DONE), [], [], [], task[0], task, 0, 0.0, 0.0, rate, surprisal),
            1.0,
            rng.randint(2, 8),
        )
        for task, rate, surprisal in items
    ]
    got = priorities(sorted(words), stored, Outcomes(deque(outcomes)), 9)
    expected = [math.prod(weight_by_hand(word, stored, place, outcomes, 9) for word in words) for place in range(count)]
    if "family" in words:
        sums = [
            sum(w for w, s in zip(expected, stored, strict=True) if s.item.family == own.item.family) for own in stored
        ]
        expected = [weight / total if total else 0.0 for weight, total in zip(expected, sums, strict=True)]
    assert got == pytest.approx(expected, rel=1e-12)
    assert priorities(sorted(words) * 2, stored, Outcomes(deque(outcomes)), 9) == got


def test_an_unknown_success_rate_is_a_half_and_a_saturated_task_is_never_drawn():
    outcomes = Outcomes()
    item = Remembered(Trajectory([], Stop.DONE), [], [], [], "f", "t")
    assert outcomes.success_rates([item]) == [0.5]
    for won, weighs in ((8, False), (7, True), (0, True)):
        outcomes.groups.clear()
        outcomes.add([Outcome(3, "t", "f", 8, won, 0.0)], oldest=0)
        [weight] = priorities(["medium"], [Stored(item, 1.0, 3)], outcomes, 3)
        assert (weight > 0) == weighs


@pytest.mark.parametrize("seed", range(3))
def test_a_weighted_draw_is_exact(seed):
    """Each ordered outcome as often as drawing one after the other in proportion to the weights left would give it."""
    rng = random.Random(seed)
    weights = [rng.choice([0.0, 0.1, 0.5, 1.0, 3.0]) for _ in range(4)] + [0.7, 0.2]
    count, draws = 2, 30_000
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        places = tuple(weighted_sample(weights, count, rng))
        seen[places] = seen.get(places, 0) + 1
    for places in itertools.permutations(range(len(weights)), count):
        chance, left = 1.0, sum(weights)
        for place in places:
            chance, left = chance * weights[place] / left, left - weights[place]
        sigma = math.sqrt(draws * chance * (1 - chance)) or 1.0
        assert abs(seen.get(places, 0) - draws * chance) < 5 * sigma, places
        assert chance or places not in seen


@quick
@given(st.lists(st.sampled_from([0.0, 1e-200, 1e-3, 1.0]), max_size=12), st.integers(0, 15), seeds)
def test_a_weighted_draw_takes_nothing_twice_and_nothing_of_weight_zero(weights, count, seed):
    places = weighted_sample(weights, count, random.Random(seed))
    positive = sum(weight > 0 for weight in weights)
    assert len(set(places)) == len(places) == min(count, positive)
    assert all(weights[place] > 0 for place in places)
    assert places == weighted_sample(weights, count, random.Random(seed))


def test_medium_draws_the_task_between_and_fresh_the_newest():
    won, lost = Trajectory([turn(1.0)], Stop.DONE, success=True), Trajectory([turn(0.0)], Stop.DONE)
    tasks = {"easy": 15, "half": 8, "rare": 1}
    played = [Group(name, [won] * n + [lost] * (16 - n)) for name, n in tasks.items()]
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=0.25, gate="old", priority=["medium"])
    _, drawn, metrics = lived(algorithm, [played] * 4)
    tasks_drawn = [s.item.task for replay in drawn for s, _ in replay.drawn]
    assert set(tasks_drawn) == {"half", "rare"}
    assert metrics[1]["replay/never_drawn"] == 15
    assert metrics[1]["replay/task_success"] < 0.55
    assert 0 < metrics[1]["replay/priority"] < 1
    ages = {}
    for words in ((), ("fresh",)):
        algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=0.25, gate="old", max_age=30, priority=words)
        ages[words] = lived(algorithm, [played] * 30)[2][-1]["replay/age"]
    assert ages["fresh",] < 6 < ages[()]


def test_rare_draws_every_won_task_alike_however_many_of_its_episodes_won():
    won, lost = Trajectory([turn(1.0)], Stop.DONE, success=True), Trajectory([turn(0.0)], Stop.DONE)
    played = [Group(name, [won] * n + [lost] * (8 - n)) for name, n in {"often": 6, "once": 1}.items()]
    shares = {}
    for words in ((), ("rare",)):
        algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=0.25, gate="old", priority=words)
        lived(algorithm, [played])
        rng = random.Random(3)
        tasks = [s.item.task for _ in range(2000) for s, _ in algorithm.imitation.draw(1, rng, num_played=4).drawn]
        assert len(tasks) == 2000
        shares[words] = tasks.count("once") / 2000
    assert abs(shares[()] - 1 / 7) < 0.04
    assert abs(shares["rare",] - 1 / 2) < 0.05


def test_family_draws_every_family_alike_however_many_wins_it_has():
    won, lost = Trajectory([turn(1.0)], Stop.DONE, success=True), Trajectory([turn(0.0)], Stop.DONE)
    numbers = {"easy 1": 6, "easy 2": 3, "easy 3": 6, "hard 1": 1}
    played = [
        Group(task, [won] * n + [lost] * (8 - n), info={"family": task.split()[0]}) for task, n in numbers.items()
    ]
    shares = {}
    for words in ((), ("family",), ("family", "rare")):
        algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=0.25, gate="old", priority=words)
        lived(algorithm, [played])
        rng = random.Random(3)
        tasks = [s.item.task for _ in range(2000) for s, _ in algorithm.imitation.draw(1, rng, num_played=4).drawn]
        shares[words] = [tasks.count(task) / len(tasks) for task in numbers]
    assert shares[()] == pytest.approx([6 / 16, 3 / 16, 6 / 16, 1 / 16], abs=0.04)
    assert shares["family",] == pytest.approx([6 / 30, 3 / 30, 6 / 30, 1 / 2], abs=0.04)
    assert shares["family", "rare"] == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2], abs=0.04)


@quick
@given(seeds)
def test_a_uniform_draw_uses_the_random_stream_as_ever(seed):
    rng = random.Random(seed)
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=0.5)
    memory = algorithm.imitation
    for n in range(3):
        played = random_step(rng)
        memory.keep(played, algorithm.advantages(played), n)
    memory.observe(random_step(rng), 3)
    one, other = random.Random(seed), random.Random(seed)
    replay = memory.draw(3, one, num_played=8)
    baseline = memory.history.percentile(50)
    eligible = [s for s in memory.buffer.items if s.reward > baseline]
    assert [s for s, _ in replay.drawn] == other.sample(eligible, min(4, len(eligible)))
    assert one.getstate() == other.getstate()


def test_a_checkpoint_of_before_loads_and_what_it_lacks_is_unknown():
    rng = random.Random(5)
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=100.0, baseline="siblings", priority=["hard"])
    lived(algorithm, [random_step(rng) for _ in range(3)])
    saved = algorithm.state_dict()
    del saved["running"], saved["imitation"]["outcomes"]
    for entry, *_ in saved["imitation"]["buffer"]["items"]:
        for name in ("group_mean", "group_std", "group_success", "surprisal"):
            del entry[name]
    fresh = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=100.0, baseline="siblings", priority=["hard"])
    fresh.load_state_dict(saved)
    before, after = algorithm.imitation.buffer.items, fresh.imitation.buffer.items
    assert [s.item.surprisal for s in after] == [s.item.surprisal for s in before]
    assert {s.item.group_mean for s in after} == {None}
    assert fresh.imitation.draw(3, rng, num_played=5).drawn == []  # nothing is known to compare with
    fresh.imitation.observe([group(-5.0, -5.0)], 3)
    assert len(fresh.imitation.draw(3, rng, num_played=50).drawn) == len(after)


def test_a_priority_switched_on_at_a_resume_knows_the_surprisal_of_what_was_stored_before():
    rng = random.Random(5)
    plain = spear(dr_grpo(), bonus=None, imitation=1.0)
    lived(plain, [random_step(rng) for _ in range(3)])
    resumed = spear(dr_grpo(), bonus=None, imitation=1.0, priority=["confident"])
    resumed.load_state_dict(plain.state_dict())
    items = [s.item for s in resumed.imitation.buffer.items]
    assert len(items) > 3
    for item in items:
        kept = [turn for turn, why in zip(item.trajectory.turns, item.dropped, strict=True) if not why]
        tokens = [logprob for turn in kept for logprob in turn.completion.logprobs]
        assert item.surprisal == pytest.approx(-fmean(tokens))


# -- schedules that follow the run --------------------------------------------------------------------------------

rates = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@quick
@given(rates, st.floats(0.05, 1), st.floats(0.05, 1))
def test_bonus_and_imitation_follow_the_running_success(successes, fade, rise):
    algorithm = spear(grpo(), bonus=BySuccess(1.0, 0.0, fade), imitation=BySuccess(0.0, 0.7, rise))
    running = 0.0
    for n, success in enumerate(successes):
        assert algorithm.bonus.weight(n) == pytest.approx(max(0.0, 1 - running / fade), abs=1e-12)
        assert algorithm.imitation.weight(n) == pytest.approx(0.7 * min(1.0, running / rise), abs=1e-12)
        metrics = algorithm.observed({"rollout/success": success}, n)
        assert metrics["rollout/bonus_weight"] == pytest.approx(max(0.0, 1 - running / fade), abs=1e-12)
        running = success if n == 0 else 0.8 * running + 0.2 * success
        assert metrics["rollout/running_success"] == pytest.approx(running)


@quick
@given(st.floats(0, 3), st.lists(st.one_of(st.none(), st.floats(0, 3)), max_size=12), st.floats(0.05, 1))
def test_imitation_weakens_while_the_entropy_is_below_a_share_of_the_first(first, later, share):
    algorithm = spear(grpo(), imitation=ByEntropy(2.0, share))
    entropies = [first, *later]
    steps = [[group(1.0, 0.0)]] * len(entropies)
    _, _, metrics = lived(algorithm, steps, Teller(entropies))
    for n, found in enumerate(metrics):
        known = [e for e in entropies[:n] if e is not None]
        full = share * fmean(known[:5]) if known else 0.0
        expected = 2.0 * min(1.0, known[-1] / full) if full > 0 else 2.0
        assert found["replay/weight"] == pytest.approx(expected)


@quick
@given(st.lists(st.lists(st.floats(-3, 0), min_size=1, max_size=4), min_size=1, max_size=8), st.booleans(), seeds)
def test_where_updates_report_no_entropy_it_is_that_of_the_tokens_that_the_policy_wrote(steps, exact, seed):
    """Theirs where the generator says it, else their mean -log p: a run inside verl has no other."""
    rng = random.Random(seed)
    known = [[rng.uniform(0, 2) for _ in logprobs] for logprobs in steps]

    def played(logprobs, nats):
        told = Completion([1] * len(logprobs), logprobs, entropies=nats if exact else None)
        episodes = [Trajectory([Turn([0], told, reward=r)], Stop.DONE, success=r > 0) for r in (0.0, 1.0)]
        return [Group("a", episodes)]

    algorithm = spear(grpo(), imitation=ByEntropy(2.0, 0.8))
    expected = [fmean(nats) if exact else -fmean(logprobs) for logprobs, nats in zip(steps, known, strict=True)]
    metrics = lived(algorithm, list(map(played, steps, known)), Teller())[2]
    assert [found["rollout/entropy"] for found in metrics] == pytest.approx(expected)
    for n, found in enumerate(metrics):
        full = 0.8 * fmean(expected[:n][:5]) if n else 0.0
        now = max(expected[n - 1], 0.0)
        assert found["replay/weight"] == pytest.approx(2.0 * min(1.0, now / full) if full > 0 else 2.0)


def test_a_run_keeps_to_the_entropy_that_its_first_step_had(tmp_path):
    """The two are not the same number, so that one must not be compared with the other; a resume keeps it too."""
    for names, kept in ((["policy", "rollout"], "policy"), (["rollout"], "rollout")):
        running = Running()
        for metrics in ({f"{name}/entropy": 1.0 for name in names}, {"policy/entropy": 7.0, "rollout/entropy": 3.0}):
            running.observe({"rollout/success": 0.0} | metrics, floor=0.0)
        assert running.entropy_name == f"{kept}/entropy"
        assert running.first_entropies == [1.0, 7.0 if kept == "policy" else 3.0]


def test_a_first_step_in_which_nothing_trains_does_not_decide_which_entropy_a_run_has():
    algorithm = spear(dr_bot(grpo()), imitation=ByEntropy(2.0, 0.8))
    _, _, metrics = lived(algorithm, [[group(0.0, 0.0)], [group(1.0, 0.0)], [group(1.0, 0.0)]], Teller([0.9, 0.36]))
    assert metrics[0]["policy/turns_trained"] == 0
    assert (algorithm.running.entropy_name, algorithm.running.first_entropies) == ("policy/entropy", [0.9, 0.36])


@quick
@given(st.floats(0, 2), st.lists(st.one_of(st.none(), st.floats(0, 2)), max_size=30), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_floor_adds_an_entropy_bonus_that_grows_with_what_is_lacking_and_ends_at_it(first, later, floor):
    entropies = [first, *later]
    base = replace(grpo(), loss=ClippedSurrogate(entropy_bonus=0.01), entropy_floor=floor)
    engine, _, metrics = lived(base, [[group(1.0, 0.0)]] * len(entropies), Teller(entropies))
    weight = 0.0
    for entropy, [term], found in zip(entropies, engine.updates, metrics, strict=True):
        size = found["policy/advantage"]  # as measured: a weight may end exactly at the least one
        assert size == pytest.approx(1 / math.sqrt(2), rel=1e-5)  # of a win and of a loss by GRPO
        assert term.loss.entropy_bonus == pytest.approx(0.01 + weight, rel=1e-5)
        assert found.get("policy/entropy_weight") == (pytest.approx(weight, rel=1e-5) if floor else None)
        if entropy is not None and floor:
            lack = min(2 * (floor - entropy) / floor, 1.0)  # the whole bound at half of the floor and below
            weight = max(min(max(weight * 1.5, 0.001 * size), 0.1 * size * lack), 0.0)
    for _ in range(40):
        base.running.observe({"rollout/success": 0.0, "policy/entropy": -1.0}, floor=0.5)
    assert base.running.entropy_weight == 0.1
    base.running.observe({"rollout/success": 0.0, "policy/entropy": 0.5}, floor=0.5)
    assert base.running.entropy_weight == 0.0  # at once: a bonus that fades over steps overshoots


def test_replay_has_no_part_in_the_floors_bonus():
    algorithm = spear(replace(grpo(), entropy_floor=5.0), bonus=None, imitation=1.0, fraction=1.0)
    engine, _, _ = lived(algorithm, [[group(1.0, 0.0)]] * 3, Teller([0.1] * 3))
    found = {term.name: term.loss.entropy_bonus for term in engine.updates[-1]}
    assert found == {"policy": pytest.approx(0.0015 / math.sqrt(2), rel=1e-5), "replay": 0.0}


@quick
@given(st.lists(st.floats(0, 2), min_size=1, max_size=20))
def test_the_floor_auto_is_half_of_what_the_run_starts_with_and_none_before_that_is_known(entropies):
    auto = replace(grpo(), entropy_floor="auto")
    _, _, metrics = lived(auto, [[group(1.0, 0.0)]] * len(entropies), Teller(entropies))
    assert not any(found["policy/entropy_weight"] for found in metrics[:5])
    if len(entropies) > 5:
        fixed = replace(grpo(), entropy_floor=fmean(entropies[:5]) / 2)
        for found in metrics[4:]:
            assert found["policy/entropy_weight"] == pytest.approx(fixed.running.entropy_weight)
            fixed.observed(found, 0)


@quick
@given(st.floats(0.01, 100), st.integers(1, 60))
def test_a_floors_bonus_never_outweighs_the_rewards_whatever_their_unit(unit, steps):
    """In every unit of rewards it is the same share of the advantages, a tenth at most: no floor can break a run."""
    weights = {}
    for reward in (1.0, unit):
        algorithm = replace(dr_grpo(), entropy_floor=5.0)
        _, _, metrics = lived(algorithm, [[group(reward, 0.0)]] * steps, Teller([0.1] * steps))
        assert all(found["policy/entropy_weight"] <= 0.1 * found["policy/advantage"] + 1e-9 for found in metrics)
        weights[reward] = metrics[-1]["policy/entropy_weight"] / reward
    assert weights[unit] == pytest.approx(weights[1.0], rel=1e-5)


def test_what_a_run_has_measured_is_in_its_checkpoint():
    algorithm, copy = (spear(grpo(), imitation=ByEntropy(1.0, 1.0), bonus=BySuccess(1.0, 0.0)) for _ in range(2))
    algorithm = replace(algorithm, entropy_floor=2.0)
    lived(algorithm, [random_step(random.Random(n)) for n in range(7)], Teller([2.0, 1.5, 1.0, 0.7, 0.4, 0.3, 0.2]))
    copy.load_state_dict(algorithm.state_dict())
    assert copy.running == algorithm.running != Running()
    assert (copy.imitation.weight(7), copy.bonus.weight(7)) == (
        algorithm.imitation.weight(7),
        algorithm.bonus.weight(7),
    )
    assert copy.imitation.outcomes == algorithm.imitation.outcomes
    assert copy.imitation.weight(7) < 1


# -- stale rows ---------------------------------------------------------------------------------------------------


@quick
@given(seeds, st.floats(1, 8), st.sampled_from([TokenMean(), SequenceMean(), FixedLength(7)]))
def test_a_row_beyond_the_bound_does_not_train_and_still_counts_in_the_reduction(seed, bound, reduction):
    tokens = references.random_tokens(seed)
    rows = range(len(tokens.mask))
    moments = []
    for b in rows:
        own = [t for row, t in tokens.training if row == b]
        squares = [math.exp(2 * (tokens.logprobs[b][t] - tokens.old_logprobs[b][t])) for t in own]
        moments.append(fmean(squares) if own else 0.0)
    assume(all(abs(moment - bound) > 1e-6 for moment in moments))
    options = {"reduction": reduction, "kl": 0.3, "entropy_bonus": 0.1}
    inputs, kept = references.loss_inputs(tokens), torch.tensor([[float(m <= bound)] for m in moments])
    out = ClippedSurrogate(**options, max_second_moment=bound)(inputs)
    gradients = torch.autograd.grad(out.loss, (inputs.logprobs, inputs.entropy))
    free = references.loss_inputs(tokens)
    expected = torch.autograd.grad(ClippedSurrogate(**options)(free).loss, (free.logprobs, free.entropy))
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs * kept)
    assert out.metrics["held_back"].item() == pytest.approx(1 - kept.mean().item())


def test_only_the_replay_loss_has_the_bound():
    made = spear(grpo(), imitation=1.0, max_second_moment=2.0)
    assert (made.loss.max_second_moment, made.imitation.loss.max_second_moment) == (0.0, 2.0)


# -- settings -----------------------------------------------------------------------------------------------------

ON = [
    'algorithm.imitation.priority=["medium", "hard", "rare", "confident", "fresh", "family"]',
    "algorithm.imitation.baseline=siblings",
    "algorithm.imitation.per_family=true", "algorithm.bonus.mode=success", "algorithm.bonus.target=0.9",
    "algorithm.imitation.schedule=entropy", "algorithm.imitation.entropy_share=1", "algorithm.entropy_floor=1",
    "algorithm.imitation.max_second_moment=1.5",
]  # fmt: skip


PAPER = "algorithm.imitation.profile=paper"


def test_every_switch_is_off_in_the_papers_profile_and_reaches_the_algorithm():
    off, on = algorithm_of(load(None, [PAPER])), algorithm_of(load(None, [PAPER, *ON]))
    assert (off.imitation.baseline, off.imitation.priority, off.entropy_floor) == ("percentile", (), 0.0)
    assert off.imitation.loss.max_second_moment == 0
    assert (on.imitation.baseline, on.imitation.priority) == (
        "siblings",
        ("medium", "hard", "rare", "confident", "fresh", "family"),
    )
    assert (on.bonus.weight, on.imitation.weight) == (BySuccess(1.0, 0.0, 0.9), ByEntropy(1.0, 1.0))
    assert on.bonus.weight.running is on.imitation.weight.running is on.running
    assert (on.entropy_floor, on.imitation.loss.max_second_moment) == (1.0, 1.5)
    by_success = [
        "algorithm.imitation.schedule=success",
        "algorithm.imitation.target=0.2",
        "algorithm.imitation.weight=3",
    ]
    assert algorithm_of(load(None, by_success)).imitation.weight == BySuccess(0.0, 3.0, 0.2)
    fading = ["algorithm.imitation.schedule=fading", *by_success[1:]]
    assert algorithm_of(load(None, fading)).imitation.weight == BySuccess(3.0, 0.0, 0.2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (['algorithm.imitation.priority=["fresh"]', "algorithm.imitation.draw=when_full"], "draw=every_step"),
        (['algorithm.imitation.priority=["newest"]'], "unknown priority 'newest'"),
        (["algorithm.imitation.max_second_moment=0.5"], "1 or more, or 0 for no bound"),
        (["algorithm.bonus.target=0"], "above 0"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said_in_one_sentence(given, said):
    with pytest.raises(ConfigError, match=r"^algorithm[.]") as caught:
        algorithm_of(load(None, given))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def plain_loss(inputs):
    return ClippedSurrogate()(inputs)


def test_a_loss_that_cannot_be_bounded_or_rewarded_is_refused():
    base = replace(grpo(), loss=plain_loss)
    with pytest.raises(SettingError, match="max_second_moment"):
        spear(base, imitation=1.0, covariance=None, max_second_moment=2.0)
    with pytest.raises(SettingError, match="replay_loss"):
        spear(grpo(), imitation=1.0, replay_loss=plain_loss, max_second_moment=2.0)
    with pytest.raises(ValueError, match="entropy_bonus"):
        replace(base, entropy_floor=1.0)
    with pytest.raises(SettingError, match="'newest'"):
        spear(grpo(), imitation=1.0, priority=["newest"])


def test_verl_says_in_one_sentence_what_it_cannot_do():
    with pytest.raises(ConfigError, match=r"^algorithm[.]entropy_floor"):
        require_expressible(algorithm_of(load(None, ["algorithm.entropy_floor=1"])))


def test_verl_takes_the_switches_that_live_in_the_core():
    own = [setting for setting in ON if "entropy_floor" not in setting]
    for schedule in ("steps", "success", "fading", "entropy"):
        require_expressible(algorithm_of(load(None, [*own, f"algorithm.imitation.schedule={schedule}"])))


# -- the bonus ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "pays"),
    [("lookup", True), ("tool_math", True), ("household", False), ("sokoban", False), ("webshop", False)],
)
def test_the_bonus_pays_experts_where_tools_serve_an_answer_and_not_where_every_action_is_a_tool_call(env, pays):
    config = load(None, [f"task.env={env}"])
    renderer = ChatRenderer(tiny_tokenizer(["".join(map(chr, range(32, 127)))]))
    bonus = algorithm_of(config).bonus
    tasks = tasks_of(config, "train", count=12)
    shown = [demonstration(task, renderer=renderer, tagged=True, seed=0) for task in tasks]
    calling = [t for t in shown if t.num_tool_turns and t.stop is Stop.DONE]
    assert len(calling) >= 3
    assert all((bonus.of(t) > 0) is pays for t in calling)


# -- profiles -----------------------------------------------------------------------------------------------------


EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def settings_of(profile: dict) -> dict[str, object]:
    config = Config()
    update(config, {"algorithm": profile})
    return {key: value for key, value in flat(config).items() if value != flat(Config())[key]}


def test_without_a_word_the_profile_is_spear_and_its_table_is_under_the_defaults():
    assert load(None).algorithm.imitation.profile == "spear"
    expected = flat(resolved(Config())) | settings_of(PROFILES["spear"])
    assert flat(load(None)) == expected


def test_the_papers_profile_has_every_switch_as_published():
    config = load(None, [PAPER])
    own = config.algorithm.imitation
    assert (own.admit_by_score, own.skip_invalid, own.scale_by_rows) == (True, False, False)
    assert (own.baseline, own.priority, own.schedule, own.max_second_moment) == ("percentile", [], "steps", 0)
    bonus = config.algorithm.bonus
    assert (bonus.mode, bonus.count, config.algorithm.entropy_floor) == ("cosine", "turns", 0)


@pytest.mark.parametrize("base", BASES)
def test_the_papers_profile_is_spear_by_its_own_keywords(base):
    """`spear(base)` is the paper's method but for three keywords; what a name adds to it is OURS, and nothing else."""
    own = [f"algorithm.name=spear-{base}", "run.steps=200", "algorithm.max_length=1024"]  # as ALGORITHMS has them
    published = {"skip_invalid": False, "scale_by_rows": False, "admit_by_score": True}
    assert algorithm_of(load(None, [PAPER, *own])) == spear(ALGORITHMS[base](), **published)
    assert algorithm_of(load(None, own)) == spear(ALGORITHMS[base](), **OURS)


@pytest.mark.parametrize("base", ["grpo", "gigpo", "dr-bot-grpo", "dr-bot-gigpo"])
def test_a_name_is_what_the_declared_plan_measured_as_ours(base):
    """But for the bonus, which the plan switches off, and the step part, which a plan of its own measured."""
    plan, measured = tomllib.loads((EXPERIMENTS / "cpu_tasks.toml").read_text()), Config()
    for part in (plan["settings"], plan["arms"]["ours"], {"algorithm": {"name": f"spear-{base}"}}):
        update(measured, part)
    found = algorithm_of(resolved(measured))
    own = algorithm_of(load(None, [f"algorithm.name=spear-{base}"]))
    not_asked = {"history": own.imitation.history, "step_parts": own.imitation.step_parts}
    assert replace(found, bonus=own.bonus, imitation=replace(found.imitation, **not_asked)) == own
    assert (own.imitation.step_parts is not None) == ("gigpo" in base)


@pytest.mark.parametrize("name", [name for name in presets() if not name.startswith("paper-")])
def test_presets_of_real_models_replay_a_quarter_with_the_papers_weight_and_yield_at_once(name):
    config = load(name)
    own, is_real = config.algorithm.imitation, not config.engine.model.startswith("tiny")
    assert (own.fraction, own.weight, own.entropy_share) == ((0.25, 1.0, 1.0) if is_real else (1.0, 2.0, 0.8))


@pytest.mark.parametrize("name", presets())
def test_over_any_preset_the_papers_profile_is_the_papers_and_what_is_set_beside_it_counts(name):
    """Also over presets that have a floor, priorities or baselines per family of their own."""
    config = load(name, [PAPER])
    got = flat(config)
    assert {key: got[key] for key in settings_of(PROFILES["paper"])} == settings_of(PROFILES["paper"])
    assert (config.algorithm.imitation.priority, config.algorithm.imitation.per_family) == ([], False)
    assert config.algorithm.entropy_floor == 0
    beside = load(name, [PAPER, "algorithm.entropy_floor=0.3", 'algorithm.imitation.priority=["fresh"]']).algorithm
    assert (beside.entropy_floor, beside.imitation.priority, beside.imitation.max_age) == (0.3, ["fresh"], 5)
    block = {"algorithm": {"imitation": {"profile": "paper", "max_age": 7}}}
    assert load(name, block=block).algorithm.imitation.max_age == 7


@pytest.mark.parametrize("name", PROFILES)
def test_a_file_with_all_settings_of_a_profile_is_read_back_to_the_same(tmp_path, name):
    assert not [key for key in settings_of(PROFILES[name]) if flat(Config())[key] is None]
    config = load(None, [f"algorithm.imitation.profile={name}", "algorithm.imitation.scale_by_rows=true"])
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(str(tmp_path / "config.toml")) == config


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("paper-")])
def test_the_papers_presets_have_the_papers_profile(name):
    own = load(name).algorithm.imitation
    assert (own.profile, own.admit_by_score, own.skip_invalid) == ("paper", True, False)


def test_what_a_user_or_a_file_sets_wins_over_the_profile_even_at_its_default(tmp_path, monkeypatch):
    table = {
        "entropy_floor": 0.3,
        "bonus": {"target": 0.9},
        "imitation": {"baseline": "siblings", "priority": ["fresh"]},
    }
    monkeypatch.setitem(PROFILES, "spear", table)
    plain = load(None)
    assert (plain.algorithm.imitation.baseline, plain.algorithm.bonus.target) == ("siblings", 0.9)
    said = load(None, ["algorithm.imitation.baseline=percentile", "algorithm.imitation.priority=[]"]).algorithm
    assert (said.imitation.baseline, said.imitation.priority, said.entropy_floor) == ("percentile", [], 0.3)
    file = tmp_path / "own.toml"
    file.write_text("[algorithm.bonus]\ntarget = 0.5\n[algorithm]\nentropy_floor = 0.0\n")
    written = load(str(file)).algorithm
    assert (written.bonus.target, written.entropy_floor, written.imitation.baseline) == (0.5, 0.0, "siblings")
    assert load(None, block={"algorithm": {"entropy_floor": 0.0}}).algorithm.entropy_floor == 0
    assert load(str(file), ["algorithm.imitation.profile=paper"]).algorithm.imitation.skip_invalid is False
    file.write_text(to_toml(plain))
    monkeypatch.setitem(PROFILES, "spear", {})
    assert load(str(file)) == plain  # a stored configuration holds final values


# -- through the trainer ------------------------------------------------------------------------------------------


def rows_of(run_dir) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows]


@pytest.mark.slow
def test_a_run_with_every_switch_resumes_bit_for_bit(tmp_path):
    small = ["run.threads=1", "run.trajectories_every=0", "eval.tasks=0", "sft.episodes=160", "sft.epochs=1"]
    small += ["algorithm.name=spear-grpo", *ON]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_from(load("lookup", [*small, f"run.dir={whole}", "run.steps=7"]))
    # Step counts that default to run.steps are given, as this run has another number at first.
    counts = ["algorithm.bonus.steps=7", "algorithm.imitation.warm_steps=3"]
    train_from(load("lookup", [*small, *counts, f"run.dir={stopped}", "run.steps=4"]))
    train_from(load("lookup", [*small, *counts, f"run.dir={stopped}", "run.steps=7", "run.resume=true"]))
    rows = rows_of(whole)
    assert rows == rows_of(stopped)
    assert any(row["replay/fired"] for row in rows)
    assert any(row.get("replay/held_back") for row in rows)
    assert any(row["policy/entropy_weight"] for row in rows)
    assert any(0 < row["replay/weight"] < 2 for row in rows)
