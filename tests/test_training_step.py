"""Replay and filters through the real training step and the real engine, not beside them."""

from __future__ import annotations

import inspect
import random
from functools import partial
from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import RecordingEngine
from spear_rl.algorithms import CovarianceClip, dr_bot, dr_grpo, gigpo, grpo, spear, with_covariance_clip
from spear_rl.engines.base import EpisodeBatch, Term
from spear_rl.envs import ENVIRONMENTS
from spear_rl.functional.losses import token_mean
from spear_rl.rollout import ChatRenderer, Observation, Sampling, StepResult, Task, collect_groups, growing_chat
from spear_rl.train import step as step_module
from spear_rl.train.step import minibatches, train_step

TASKS = ENVIRONMENTS["lookup"]("train", num_digits=3)


class Evenly:
    """One turn; an untrained policy earns the reward about every other time."""

    def reset(self) -> Observation:
        return Observation("red code ?", state_key="start")

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("right"), reward=float(len(action) % 2), done=True, used_tool=True)

    def close(self) -> None:
        pass


EVEN_TASKS = [Task(f"evenly/{number}", Evenly) for number in range(64)]


def collector(generator, tokenizer, *, num_tasks: int = 4, group_size: int = 4, tasks=TASKS):
    def collect(step: int):
        return collect_groups(
            tasks[4 * step : 4 * step + num_tasks],
            group_size=group_size,
            generator=generator,
            renderer=ChatRenderer(tokenizer),
            max_turns=3,
            step=step,
            layout=partial(growing_chat, detail="short"),
        )

    return collect


def run(algorithm, engine, tokenizer, *, steps: int, rng: random.Random | None = None, **options):
    rng = rng or random.Random(0)
    collect = collector(engine, tokenizer, **options)
    return [train_step(s, collect=collect, algorithm=algorithm, engine=engine, rng=rng) for s in range(steps)]


def scripted(algorithm, tokenizer, *, steps: int, seed: int = 0, **options):
    rng = random.Random(seed)
    engine = RecordingEngine(tokenizer, [rng.choice(["look", "0", "1", "2"]) for _ in range(997)])
    return run(algorithm, engine, tokenizer, steps=steps, **options), engine


def test_ratios_are_one_right_after_collection(make_engine, tokenizer):
    algorithm = spear(grpo(), imitation=1.0, fraction=1.0, skip_invalid=False)
    engine = make_engine(learning_rate=0.0, sampling=Sampling(max_new_tokens=2))
    metrics = run(algorithm, engine, tokenizer, steps=6, group_size=8, tasks=EVEN_TASKS)
    assert all(m["policy/ratio"] == pytest.approx(1.0, abs=1e-5) for m in metrics)
    replayed = [m for m in metrics if m["replay/fired"]]
    assert replayed, "no weight ever moved, so what is replayed is still on-policy"
    assert all(m["replay/ratio"] == pytest.approx(1.0, abs=1e-5) for m in replayed)
    assert all(m["replay/clip_fraction"] == 0 for m in replayed)


def test_ratios_move_away_from_one_once_the_weights_have_moved(make_engine, tokenizer):
    algorithm = spear(grpo(), imitation=1.0, fraction=1.0, skip_invalid=False)
    engine = make_engine(learning_rate=1e-2, sampling=Sampling(max_new_tokens=2))
    metrics = run(algorithm, engine, tokenizer, steps=6, group_size=8, tasks=EVEN_TASKS)
    assert all(m["policy/ratio"] == pytest.approx(1.0, abs=1e-4) for m in metrics)
    assert any(abs(m["replay/ratio"] - 1) > 1e-3 for m in metrics if m["replay/fired"])


@pytest.mark.parametrize("seed", range(3))
def test_nothing_older_than_the_age_limit_is_ever_replayed(tokenizer, seed):
    algorithm = spear(grpo(), imitation=1.0, fraction=1.0, max_age=2)
    ages = []
    original = algorithm.imitation.draw

    metrics, engine = scripted(algorithm, tokenizer, steps=9, seed=seed)
    for step, (update, m) in enumerate(zip(engine.updates, metrics, strict=True)):
        if m["replay/fired"]:
            ages.append(m["replay/age"])
            assert update[-1].name == "replay", step
    assert ages
    assert max(ages) <= 2
    assert all(8 - stored.step <= 2 + 1 for stored in algorithm.imitation.buffer.items)
    assert original(20, random.Random(0), num_played=8).trajectories == []


@pytest.mark.parametrize("seed", range(5))
def test_replayed_rows_passed_both_gates_and_carry_todays_advantage(tokenizer, seed):
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=1.0, history_size=8)
    metrics, engine = scripted(algorithm, tokenizer, steps=8, seed=seed)
    fired = 0
    for update, m in zip(engine.updates, metrics, strict=True):
        for term in update:
            if term.name == "replay":
                fired += 1
                values = term.batch.advantages[term.batch.mask]
                torch.testing.assert_close(values, torch.full_like(values, 1.0 - m["replay/baseline"]))
                assert (values > 0).all()
    assert fired
    assert all(stored.item.advantage > 0 for stored in algorithm.imitation.buffer.items)


def test_a_baseline_as_good_as_the_memory_silences_replay(tokenizer):
    algorithm = spear(grpo(), imitation=1.0, percentile=100.0)
    algorithm.imitation.history.add([1.0])
    metrics, engine = scripted(algorithm, tokenizer, steps=5)
    assert len(algorithm.imitation.buffer) > 0
    assert all(m["replay/fired"] == 0 for m in metrics)
    assert all(term.name == "policy" for update in engine.updates for term in update)


def test_when_full_fires_only_when_enough_qualify_then_empties_the_buffer(tokenizer):
    algorithm = spear(grpo(), bonus=None, imitation=1.0, capacity=4, draw_when="when_full", max_age=100)
    metrics, _ = scripted(algorithm, tokenizer, steps=12)
    fired = [m for m in metrics if m["replay/fired"]]
    assert fired
    assert len(fired) < len(metrics)
    for m in metrics:
        assert m["replay/fired"] == (m["replay/eligible"] > 6)
        assert m["replay/trajectories"] == (4 if m["replay/fired"] else 0)
    after = [metrics[i + 1]["replay/buffer_size"] for i, m in enumerate(metrics[:-1]) if m["replay/fired"]]
    assert all(size <= 8 for size in after)


def test_every_step_draws_a_share_of_what_was_played(tokenizer):
    algorithm = spear(grpo(), bonus=None, imitation=1.0, fraction=0.25, max_age=100)
    metrics, _ = scripted(algorithm, tokenizer, steps=8)
    for m in metrics:
        assert m["replay/trajectories"] == min(round(0.25 * m["rollout/episodes"]), m["replay/eligible"])


def test_covariance_clipping_with_equal_advantages_clips_nothing(make_engine, tokenizer):
    clip = CovarianceClip(fraction=0.5, low=0.0)
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=1.0, covariance=clip, skip_invalid=False)
    engine = make_engine(sampling=Sampling(max_new_tokens=2))
    metrics = run(algorithm, engine, tokenizer, steps=6, group_size=8, tasks=EVEN_TASKS)
    fired = [m for m in metrics if m["replay/fired"]]
    assert fired
    assert all(m["replay/covariance_clip_fraction"] == 0 for m in fired)


def test_covariance_clipping_holds_tokens_back_where_advantages_differ(make_engine, tokenizer):
    algorithm = with_covariance_clip(grpo(), CovarianceClip(fraction=0.3, low=0.0, high=1e9))
    metrics = run(
        algorithm, make_engine(sampling=Sampling(max_new_tokens=2)), tokenizer, steps=4, group_size=8, tasks=EVEN_TASKS
    )
    assert any(m["policy/covariance_clip_fraction"] > 0 for m in metrics)


def test_joint_replay_shares_the_optimizer_step_and_separate_replay_has_its_own(tokenizer):
    for update, sizes in (("joint", {1, 2}), ("separate", {1})):
        algorithm = spear(grpo(), imitation=1.0, fraction=1.0, update=update)
        metrics, engine = scripted(algorithm, tokenizer, steps=6)
        assert {len(terms) for terms in engine.updates} == sizes
        extra = sum(m["replay/fired"] for m in metrics) if update == "separate" else 0
        assert len(engine.updates) == 6 + extra


def test_the_weight_of_replay_follows_its_schedule(tokenizer):
    algorithm = spear(grpo(), imitation=lambda step: 0.1 * step, fraction=1.0, scale_by_rows=False)
    _, engine = scripted(algorithm, tokenizer, steps=6)
    for step, update in enumerate(engine.updates):
        for term in update[1:]:
            assert term.weight == pytest.approx(0.1 * step)


def test_the_bonus_fades_and_never_reaches_the_buffer(tokenizer):
    algorithm = spear(grpo(), bonus=lambda step: 1.0 - 0.25 * step, imitation=1.0, max_age=100)
    metrics, _ = scripted(algorithm, tokenizer, steps=4)
    tool_turns = [m["rollout/tool_turns"] for m in metrics]
    for step, m in enumerate(metrics):
        assert m["rollout/bonus"] == pytest.approx((1.0 - 0.25 * step) * 0.1 * tool_turns[step])
    for stored in algorithm.imitation.buffer.items:
        trajectory = stored.item.trajectory
        assert trajectory.bonus == 0
        assert stored.reward == trajectory.reward == sum(turn.reward for turn in trajectory.turns)
    assert set(algorithm.imitation.history.means) <= {0.0, 0.25, 0.5, 0.75, 1.0}


def test_with_bonus_and_imitation_off_spear_asks_the_engine_for_the_very_same_updates(tokenizer):
    for base in (grpo, lambda: dr_bot(gigpo())):
        plain, wrapped = base(), spear(base(), bonus=None, imitation=None)
        results = [scripted(algorithm, tokenizer, steps=5) for algorithm in (plain, wrapped)]
        timeless = [[{k: v for k, v in m.items() if "time/" not in k} for m in metrics] for metrics, _ in results]
        assert timeless[0] == timeless[1]
        for one, other in zip(results[0][1].updates, results[1][1].updates, strict=True):
            assert torch.equal(one[0].batch.advantages, other[0].batch.advantages)


@pytest.mark.parametrize("seed", range(4))
def test_the_ledger_accounts_for_every_turn(tokenizer, seed):
    algorithm = dr_bot(grpo())
    metrics, engine = scripted(algorithm, tokenizer, steps=6, seed=seed)
    for m in metrics:
        dropped = sum(value for name, value in m.items() if name.startswith("policy/dropped_"))
        assert m["policy/turns"] == m["policy/turns_trained"] + dropped
        assert m["policy/turns"] == m["rollout/turns"] * m["rollout/episodes"]
    assert any(m.get("policy/dropped_flat_group") for m in metrics)
    assert len(engine.updates) <= 6


def test_a_step_with_nothing_to_learn_from_takes_no_optimizer_step(tokenizer):
    engine = RecordingEngine(tokenizer, ["9"])
    metrics = run(dr_bot(grpo()), engine, tokenizer, steps=2)
    assert engine.updates == []
    assert metrics[0]["policy/turns_trained"] == 0
    assert metrics[0]["policy/dropped_flat_group"] == 16


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_minibatches_deal_out_every_row_once(tokenizer, count):
    algorithm = spear(grpo(), imitation=1.0, fraction=1.0)
    _, engine = scripted(algorithm, tokenizer, steps=4)
    terms = next(update for update in engine.updates if len(update) == 2)
    dealt = minibatches(terms, count, random.Random(1))
    for term in terms:
        parts = [t.batch for update in dealt for t in update if t.name == term.name]
        rows = sorted(tuple(row) for part in parts for row in part.input_ids.tolist())
        assert rows == sorted(tuple(row) for row in term.batch.input_ids.tolist())
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any),
    count=st.integers(2, 9),
    seed=st.integers(0, 2**32),
)
def test_a_minibatch_has_whole_episodes_but_for_its_first_and_last_one(sizes, count, seed):
    owners = torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)])
    ids = torch.arange(len(owners))[:, None]
    term = Term("policy", EpisodeBatch(ids, ids > -1, ids > -1, ids.float(), ids.float(), owners), token_mean)
    dealt = [update[0].batch for update in minibatches([term], count, random.Random(seed))]
    assert torch.cat([part.input_ids for part in dealt]).flatten().sort().values.tolist() == ids.flatten().tolist()
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    order = torch.cat([part.episodes for part in dealt]).tolist()
    assert len([first for first, _ in groupby(order)]) == len(set(order)), "an episode's rows follow one another"
    assert all(torch.equal(owners[part.input_ids.flatten()], part.episodes) for part in dealt)


def test_a_training_step_is_read_on_one_screen():
    assert len(inspect.getsource(step_module.train_step).splitlines()) <= 60
