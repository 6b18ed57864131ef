"""The objective: which reduction an algorithm has, mini-batches by rows, several passes over a batch."""

from __future__ import annotations

import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import RecordingEngine, logged, random_batch
from spear_rl.algorithms import ALGORITHMS, FixedLength, SequenceMean, TokenMean, dr_bot, dr_grpo, grpo, spear
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import load
from spear_rl.app.resume import CONFIG, stored
from spear_rl.engines.base import Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.errors import ConfigError
from spear_rl.train.step import train_step
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

# -- reductions


def made(*overrides: str):
    return algorithm_of(load(None, ["rollout.max_new_tokens=33", "rollout.layout=turns", *overrides]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_own_reduction_is_the_published_one_of_its_base(name):
    wrapped = "dr-bot" in name
    own = FixedLength(33) if wrapped else SequenceMean() if name in ("grpo", "spear-grpo") else TokenMean()
    algorithm = made(f"algorithm.name={name}")
    assert algorithm.loss.reduction == own
    assert not algorithm.imitation or algorithm.imitation.loss.reduction == own


@pytest.mark.parametrize("name", ["grpo", "spear-grpo", "spear-dr-bot-grpo", "gigpo", "dr-grpo"])
def test_every_reduction_is_reachable_for_the_policy_and_for_replay_alike(name):
    choices = {"token_mean": TokenMean(), "sequence_mean": SequenceMean(), "fixed_length": FixedLength(33)}
    for choice, reduction in choices.items():
        algorithm = made(f"algorithm.name={name}", f"algorithm.reduction={choice}")
        assert algorithm.loss.reduction == reduction
        assert not algorithm.imitation or algorithm.imitation.loss.reduction == reduction
    long = made(f"algorithm.name={name}", "algorithm.reduction=fixed_length", "algorithm.max_length=7")
    assert long.loss.reduction == FixedLength(7)


def test_a_reduction_that_does_not_exist_or_has_no_place_is_one_sentence():
    with pytest.raises(ConfigError, match=r"algorithm\.reduction cannot be 'mean'.*sequence_mean \(the mean over rows"):
        load(None, ["algorithm.reduction=mean"])
    own = ["algorithm.name=outside_package.algorithms:plain", "algorithm.reduction=token_mean"]
    with pytest.raises(ConfigError, match=r"algorithm\.reduction=token_mean: neither its advantages"):
        algorithm_of(load(None, own))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_grpos_gradient_is_that_of_a_mean_of_sequence_means_whatever_the_micro_batches(tokenizer, seed):
    """Against one row at a time through the plain model, without masks or padding."""
    rng = random.Random(seed)
    batch = random_batch(rng, rows=rng.randint(1, 7), vocabulary=250)
    plain = tiny_model("tiny-xs", tokenizer, seed=0)
    means = []
    for row in range(len(batch)):
        length = int(batch.attention[row].sum())
        ids = batch.input_ids[row, :length]
        scores = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        losses = []
        for t in range(1, length):
            if batch.mask[row, t]:
                ratio, a = (scores[t - 1] - batch.old_logprobs[row, t]).exp(), batch.advantages[row, t]
                losses.append(-torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a))
        means.append(sum(losses) / len(losses))
    expected = sum(means) / len(means)
    expected.backward()
    for size in (1, 50, 10**9):
        options = {"learning_rate": 0.0, "max_grad_norm": 1e9, "micro_batch_tokens": size}
        engine = HFEngine(tiny_model("tiny-xs", tokenizer, seed=0), tokenizer, **options)
        metrics = engine.update([Term("policy", batch, grpo().loss)])
        assert metrics["policy/loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
        for mine, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=2e-5)


def test_a_long_row_weighs_as_much_as_a_short_one_in_a_sequence_mean_and_more_in_a_token_mean():
    for reduction, sign in ((SequenceMean(), 0.0), (TokenMean(), 1.0)):
        values = torch.tensor([[1.0] * 8, [-1.0] + [0.0] * 7])
        mask = torch.tensor([[True] * 8, [True] + [False] * 7])
        assert torch.sign(reduction(values, mask)).item() == sign


# -- mini-batches by rows, epochs


def a_step_of(lengths: list[int], rng: random.Random) -> list[Group]:
    """One group; an episode of n turns, each a row of its own, for every n of `lengths`."""
    episodes, token = [], iter(range(1, 10**6))
    for number, length in enumerate(lengths):
        turns = []
        for _ in range(length):
            ids = [next(token), next(token)]
            logprobs = [rng.uniform(-3, 0) for _ in ids]
            turns.append(Turn([next(token)], Completion(ids, logprobs), reward=float(number % 2), used_tool=True))
        episodes.append(Trajectory(turns, Stop.DONE, success=bool(number % 2)))
    return [Group("task", episodes)]


def updates_of(algorithm, groups, tokenizer, *, steps: int = 2, seed: int = 0, **options) -> list[list[Term]]:
    engine, rng = RecordingEngine(tokenizer, ["0"]), random.Random(seed)
    for step in range(steps):
        engine.updates.clear()
        train_step(step, collect=lambda _: groups, algorithm=algorithm, engine=engine, rng=rng, **options)
    return engine.updates


def rows_of(update: list[Term], name: str) -> list[tuple[int, ...]]:
    return [tuple(row) for term in update if term.name == name for row in term.batch.input_ids.tolist()]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=9),
    most=st.integers(1, 50),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_mini_batches_by_rows_and_epochs_train_every_row_once_per_pass(tokenizer, lengths, most, epochs, seed):
    groups = a_step_of(lengths, random.Random(seed))
    updates = updates_of(grpo(), groups, tokenizer, steps=1, minibatch_rows=most, epochs=epochs, seed=seed)
    total = sum(lengths)
    count = -(-total // most)
    assert len(updates) == count * epochs
    sizes = [len(update[0].batch) for update in updates]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    old = {
        tuple(t.prompt_ids + t.completion.token_ids): t.completion.logprobs
        for e in groups[0].trajectories
        for t in e.turns
    }
    for start in range(0, len(updates), count):
        passed = [row for update in updates[start : start + count] for row in rows_of(update, "policy")]
        assert sorted(passed) == sorted(old)
    for update in updates:
        for row, logprobs in zip(update[0].batch.input_ids.tolist(), update[0].batch.old_logprobs, strict=True):
            assert logprobs[1:].tolist() == pytest.approx(old[tuple(row)])


def test_every_pass_is_divided_anew(tokenizer):
    updates = updates_of(grpo(), a_step_of([6, 6], random.Random(0)), tokenizer, steps=1, minibatch_rows=4, epochs=3)
    passes = [tuple(map(tuple, (rows_of(u, "policy") for u in updates[n : n + 3]))) for n in (0, 3, 6)]
    assert len(set(passes)) == 3


@pytest.mark.parametrize("update", ["joint", "separate"])
def test_replayed_rows_train_in_every_pass(tokenizer, update):
    algorithm = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=1.0, update=update)
    updates = updates_of(algorithm, a_step_of([3, 5, 4, 4], random.Random(1)), tokenizer, minibatch_rows=5, epochs=2)
    names = [[term.name for term in terms] for terms in updates]
    joint, alone = ["policy", "replay"], [["policy"]] * 8 + [["replay"]] * 4
    assert names == ([joint] * 8 if update == "joint" else alone)
    replayed = [row for terms in updates for row in rows_of(terms, "replay")]
    assert sorted(replayed) == sorted(2 * list(dict.fromkeys(replayed)))
    assert len(replayed) == 2 * (5 + 4)  # the turns of the two episodes that won


def test_one_pass_is_what_a_step_was_without_the_setting(tokenizer):
    groups, algorithm = a_step_of([3, 5, 4, 4], random.Random(1)), dr_bot(grpo())
    plain = updates_of(algorithm, groups, tokenizer, num_minibatches=4)
    for same in ({"num_minibatches": 4, "epochs": 1}, {"minibatch_rows": 4}):
        other = updates_of(algorithm, groups, tokenizer, **same)
        assert [rows_of(u, "policy") for u in other] == [rows_of(u, "policy") for u in plain]


def test_two_ways_to_divide_rows_are_refused_in_one_sentence(spear, tmp_path):
    code, text = spear(
        "train", "lookup", f"run.dir={tmp_path / 'run'}", "optim.minibatch_rows=8", "optim.num_minibatches=2"
    )
    assert code == 2
    assert "optim.minibatch_rows=8 and num_minibatches=2 both say how rows are divided" in " ".join(text.split())
    assert not (tmp_path / "run").exists()


SMALL = [
    "sft.episodes=128", "sft.epochs=4", "eval.tasks=4", "rollout.num_tasks=4", "rollout.group_size=4", "run.threads=1",
    "run.checkpoint_every=2", "algorithm.name=spear-grpo", "algorithm.imitation.warm_steps=1", "run.seed=5",
    "algorithm.bonus.steps=6", "optim.minibatch_rows=5", "optim.epochs=2", "optim.decay=constant",
    "optim.warmup_steps=4", "rollout.max_response_tokens=6", "eval.samples=2", "algorithm.covariance.low=0",
]  # fmt: skip


def test_a_run_with_epochs_row_mini_batches_and_a_token_budget_resumes_bit_for_bit(spear, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert spear("train", "lookup", f"run.dir={whole}", *SMALL, "run.steps=6")[0] == 0
    assert spear("train", "lookup", f"run.dir={parts}", *SMALL, "run.steps=4")[0] == 0
    code, text = spear("train", f"run.dir={parts}", "run.resume=true", "run.steps=6")
    assert code == 0, text
    assert logged(parts) == logged(whole)
    weights = [folder / "checkpoints" / "step_000006" / "model.safetensors" for folder in (whole, parts)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert any(row["replay/fired"] for row in logged(whole))
    rates = [row["policy/learning_rate"] for row in logged(whole)]
    assert rates == pytest.approx([1e-3 * min((step + 1) / 4, 1) for step in range(6)])  # by RL steps, not passes


def test_a_run_of_grpo_begun_before_there_were_reductions_keeps_its_token_mean(spear, tmp_path):
    for name, own in (("spear-grpo", "token_mean"), ("spear-dr-bot-grpo", "own"), ("gigpo", "own")):
        run = tmp_path / name
        small = ["run.steps=1", "sft.episodes=0", "eval.tasks=0", "rollout.num_tasks=1", "rollout.group_size=2"]
        assert spear("train", "lookup", f"run.dir={run}", *small, f"algorithm.name={name}")[0] == 0
        config = run / CONFIG
        for file in (config, *run.glob("checkpoints/*/checkpoint.json")):
            assert "reduction = " in file.read_text()
        config.write_text(re.sub(r'reduction = "own"\n', "", config.read_text()))
        assert stored(run).config.algorithm.reduction == "own"  # the checkpoint's settings say so
        for folder in run.glob("checkpoints/*"):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        assert stored(run).config.algorithm.reduction == own


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["grpo", "spear-grpo"])
def test_sequence_mean_grpo_learns_lookup(spear, tmp_path, name, seed):
    run = tmp_path / "run"
    code, text = spear(
        "train", "lookup", f"run.dir={run}", f"algorithm.name={name}", f"run.seed={seed}", "eval.tasks=0"
    )
    assert code == 0, text
    success = [row["rollout/success"] for row in logged(run)]
    assert sum(success[-5:]) / 5 > sum(success[:2]) / 2 + 0.1
    assert sum(success[-5:]) / 5 > 0.8
