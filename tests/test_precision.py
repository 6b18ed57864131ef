"""Half precision on the CPU: whole runs with float32 masters, exact to resume, and what their checkpoints hold."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from conftest import killed_run, logged, random_batch
from spear_rl.engines.base import Term
from spear_rl.engines.models.master_weights import MasterWeights
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.functional import clipped_surrogate
from spear_rl.train.checkpoint import load_state

SMALL = [
    "run.checkpoint_every=2", "sft.episodes=64", "sft.epochs=2", "eval.tasks=8", "rollout.num_tasks=4",
    "algorithm.name=spear-grpo", "algorithm.imitation.warm_steps=2", "algorithm.bonus.steps=5", "algorithm.kl=0.01",
]  # fmt: skip


@pytest.mark.parametrize("attention", ["padded", pytest.param("packed", marks=pytest.mark.slow)])
def test_a_killed_run_in_half_precision_resumes_bit_for_bit(spear, tmp_path, attention):
    settings = [*SMALL, "engine.dtype=bfloat16", f"engine.attention={attention}"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    code, text = spear("train", "lookup", f"run.dir={whole}", *settings, "run.steps=5")
    assert code == 0, text
    killed_run(part, *settings, steps=5)
    code, text = spear("train", f"run.dir={part}", "run.resume=true", "run.steps=5")
    assert code == 0, text
    assert logged(part) == logged(whole)
    assert logged(part, "eval.jsonl") == logged(whole, "eval.jsonl")
    folders = [run / "checkpoints" / "step_000005" for run in (whole, part)]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    for name, weight in weights[0].items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[1][name])
    assert not torch.equal(weight, weight.to(torch.bfloat16).float()), "as they are learned, not as they are computed"
    assert "spear" not in (folders[0] / "config.json").read_text(), "transformers must load it without us"


def test_a_checkpoint_loads_without_running_code_and_holds_what_streams_need(spear, tmp_path):
    run = tmp_path / "run"
    settings = [*SMALL, "run.steps=2", "engine.attention=packed", "engine.importance_cap=2"]
    code, text = spear("train", "lookup", f"run.dir={run}", *settings)
    assert code == 0, text
    step, state = load_state(run / "checkpoints" / "step_000002")
    assert step == 2
    # A stream a step; what evaluations use is not counted.
    assert state["engine"]["num_streams"] == 2
    assert state["engine"]["optimizer"]["state"]


def test_gradients_of_several_terms_and_pieces_gather_in_float32(make_engine):
    """Their sum is that of the parts: nothing is lost between micro-batches."""
    engine = make_engine(dtype=torch.bfloat16, max_grad_norm=1e9, micro_batch_tokens=16)
    batches = [random_batch(random.Random(seed), rows=4, vocabulary=250) for seed in (1, 2)]
    terms = [
        Term("policy", batches[0], clipped_surrogate),
        Term("replay", batches[1], partial(clipped_surrogate, clip_low=0.1), 0.5),
    ]
    parts = []
    for term in terms:
        other = make_engine(dtype=torch.bfloat16, max_grad_norm=1e9)
        other.update([term])
        parts.append([m.grad for m in other._masters.trained])
    engine.update(terms)
    for whole, a, b in zip([m.grad for m in engine._masters.trained], *parts, strict=True):
        assert whole.dtype == torch.float32
        torch.testing.assert_close(whole, a + b, rtol=0.05, atol=0.02 * float((a + b).abs().max()) + 1e-8)


def test_masters_of_a_float32_model_are_its_own_parameters(tokenizer):
    model = tiny_model("tiny-xs", tokenizer)
    masters = MasterWeights(model, torch.float32)
    assert [id(m) for m in masters.trained] == [id(p) for p in model.parameters()]
    assert masters.exact_weights() == {}


def test_a_half_precision_model_from_a_folder_can_be_trained_in_float32(tokenizer):
    model = tiny_model("tiny-xs", tokenizer).to(torch.bfloat16)
    masters = MasterWeights(model, torch.float32)
    assert all(m.dtype == torch.float32 for m in masters.trained)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_tied_weights_stay_tied_in_half_precision(make_engine):
    engine = make_engine(dtype=torch.bfloat16)
    engine.update([Term("policy", random_batch(random.Random(0), rows=3, vocabulary=250), clipped_surrogate)])
    assert engine.model.get_input_embeddings().weight is engine.model.get_output_embeddings().weight
    assert len(engine._masters.trained) == len(list(engine.model.parameters()))


def test_a_tied_head_is_saved_tied_with_its_exact_weights(make_engine, tmp_path):
    from spear_rl.engines.models.load import model_in_folder

    engine = make_engine(dtype=torch.bfloat16)
    engine.update([Term("policy", random_batch(random.Random(0), rows=3, vocabulary=250), clipped_surrogate)])
    engine.save(tmp_path)
    model, _ = model_in_folder(tmp_path)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    exact = engine._masters.exact_weights()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, exact[name])
