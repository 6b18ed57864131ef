"""Importance correction: weights against a formula of their own, nothing where nothing differs, and whole runs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import logged
from spear_rl.algorithms import ALGORITHMS
from spear_rl.engines.base import Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.functional import clipped_surrogate
from spear_rl.rollout import Sampling
from spear_rl.train.checkpoint import load_state
from spear_rl.train.sampling_correction import corrected
from spear_rl.train.step import collate
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

TEMPERATURE = 0.7
SMALL = [
    "run.steps=3", "run.checkpoint_every=1", "sft.episodes=64", "sft.epochs=2", "eval.tasks=4", "rollout.num_tasks=4",
    "algorithm.imitation.warm_steps=1",
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["padded", "packed"])
def engine(request, tokenizer) -> HFEngine:
    model = tiny_model("tiny-xs", tokenizer, seed=0)
    sampling = Sampling(max_new_tokens=4, temperature=TEMPERATURE)
    return HFEngine(model, tokenizer, sampling=sampling, packed=request.param, num_slots=8)


def random_groups(rng: random.Random) -> list[Group]:
    """Episodes of both layouts: conversations that grow in one row, and prompts that each begin anew; odd ones too."""

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(5, 250) for _ in range(rng.randint(low, high))]

    def episode() -> Trajectory:
        turns, grows, prompt = [], rng.random() < 0.5, words(1, 6)
        for _ in range(rng.randint(0, 4)):
            ids = words(0, 5)
            turns.append(Turn(prompt, Completion(ids, [rng.uniform(-9, -0.01) for _ in ids]), reward=rng.random()))
            prompt = [*prompt, *ids, *words(0, 4)] if grows else words(1, 6)
        return Trajectory(turns, Stop.DONE)

    return [Group(f"task {n}", [episode() for _ in range(rng.randint(1, 4))]) for n in range(rng.randint(1, 3))]


def exact(engine: HFEngine, turn: Turn) -> list[float]:
    """Log-probabilities of a turn's answer, from a plain forward over its prompt and itself."""
    written = turn.completion.token_ids
    if not written:
        return []
    ids = torch.tensor([*turn.prompt_ids, *written])
    with torch.no_grad():
        scores = (engine.model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    start = len(turn.prompt_ids)
    return [float(scores[start + k - 1, token]) for k, token in enumerate(written)]


def all_turns(groups: list[Group]) -> list[Turn]:
    return [turn for group in groups for t in group.trajectories for turn in t.turns]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), cap=st.sampled_from([0.5, 1.0, 2.0, 10.0]))
def test_weights_are_the_trainers_probability_over_the_samplers_up_to_the_cap(engine, seed, cap):
    groups = random_groups(random.Random(seed))
    after = corrected(groups, engine, cap=cap)
    assert [g.task_id for g in after] == [g.task_id for g in groups]
    for before, turn in zip(all_turns(groups), all_turns(after), strict=True):
        assert replace(turn, completion=before.completion) == before, "nothing else changes"
        expected = exact(engine, before)
        assert turn.completion.logprobs == pytest.approx(expected, rel=1e-3, abs=1e-4)
        ratios = [math.exp(new) / math.exp(old) for new, old in zip(expected, before.completion.logprobs, strict=True)]
        if turn.completion.token_ids:
            assert turn.completion.weights == pytest.approx([min(r, cap) for r in ratios], rel=2e-3)
            assert max(turn.completion.weights) <= cap


def played_by_the_policy(engine: HFEngine) -> list[Group]:
    prompts = [[5, 6, 7 + n] for n in range(6)]
    turns = [Turn(p, c, reward=n % 2) for n, (p, c) in enumerate(zip(prompts, engine.generate(prompts), strict=True))]
    return [Group("task", [Trajectory([turn], Stop.DONE) for turn in turns])]


def test_where_the_trainer_sampled_itself_nothing_changes(engine, tokenizer):
    groups = played_by_the_policy(engine)
    after = corrected(groups, engine, cap=2.0)
    for before, turn in zip(all_turns(groups), all_turns(after), strict=True):
        assert turn.completion.weights == pytest.approx([1.0] * len(turn.completion.token_ids), abs=1e-4)
        assert turn.completion.logprobs == pytest.approx(before.completion.logprobs, abs=1e-4)
    metrics, gradients = [], []
    for played in (groups, after):
        learner = HFEngine(tiny_model("tiny-xs", tokenizer, seed=0), tokenizer, sampling=engine.sampling)
        trajectories = played[0].trajectories
        batch = collate(trajectories, [[t.reward - 0.5] for t in trajectories], pad_id=learner.pad_id)
        metrics.append(learner.update([Term("policy", batch, clipped_surrogate)]))
        gradients.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3, abs=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-2, atol=1e-5)


def test_a_weight_multiplies_its_own_tokens_advantage_and_no_other():
    turn = Turn([1, 2], Completion([7, 8], [-1.0, -1.0], weights=[0.5, 2.0]))
    plain = Turn([1, 2, 7, 8, 3], Completion([9], [-1.0]))
    batch = collate([Trajectory([turn, plain], Stop.DONE)], [[3.0, -1.0]], pad_id=0)
    assert batch.advantages[0].tolist() == [0, 0, 1.5, 6.0, 0, -1.0]


def test_episodes_without_a_word_are_left_as_they_are(engine):
    groups = [Group("task", [Trajectory([Turn([1], Completion([], []))], Stop.FAILED), Trajectory([], Stop.FAILED)])]
    assert corrected(groups, engine, cap=2.0) == groups
    assert corrected([], engine, cap=2.0) == []


def test_the_replay_buffer_keeps_weights_through_a_checkpoint(engine, tmp_path):
    algorithm, again = (ALGORITHMS["spear-grpo"](spear_options={"skip_invalid": False}) for _ in range(2))
    groups = corrected(played_by_the_policy(engine), engine, cap=2.0)
    groups = [replace(groups[0], trajectories=[replace(t, success=True) for t in groups[0].trajectories])]
    advantages = algorithm.advantages(groups)
    algorithm.imitation.keep(groups, advantages, 0, dropped=algorithm.dropped(groups))
    torch.save(algorithm.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert str(again.state_dict()) == str(algorithm.state_dict())
    assert "'weights': [" in str(again.state_dict())


def test_a_run_with_correction_resumes_bit_for_bit_and_agrees_with_one_without(spear, tmp_path):
    runs = {"without": [], "with": ["engine.importance_cap=2"], "part": ["engine.importance_cap=2", "run.steps=2"]}
    for name, extra in runs.items():
        code, text = spear("train", "lookup", f"run.dir={tmp_path / name}", *SMALL, "algorithm.bonus.steps=3", *extra)
        assert code == 0, text
    assert spear("train", f"run.dir={tmp_path / 'part'}", "run.resume=true", "run.steps=3")[0] == 0
    assert logged(tmp_path / "part") == logged(tmp_path / "with")
    first, plain = logged(tmp_path / "with")[0], logged(tmp_path / "without")[0]
    assert first["rollout/sampler_gap"] < 1e-4
    assert first["policy/loss"] == pytest.approx(plain["policy/loss"], abs=1e-4)
    assert first["policy/grad_norm"] == pytest.approx(plain["policy/grad_norm"], rel=1e-2)
    _, state = load_state(tmp_path / "part" / "checkpoints" / "step_000003")
    assert "weights" in str(state["algorithm"])


def test_a_negative_cap_is_one_sentence(spear, tmp_path):
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", "engine.importance_cap=-1")
    assert code == 2
    assert "engine.importance_cap must be 0 or more" in text
