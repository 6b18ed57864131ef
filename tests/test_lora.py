"""Adapters: only they are trained, plain peft reads them, and a run with one is as exact as any other."""

from __future__ import annotations

import copy
import json
import random
from types import SimpleNamespace

import pytest
import torch

from conftest import killed_run, logged, random_batch
from spear_rl.engines.base import Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.load import model_by_name, model_in_folder
from spear_rl.engines.models.lora import merged_weights, with_adapter
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.errors import ConfigError
from spear_rl.functional import clipped_surrogate
from spear_rl.rollout import Sampling
from test_agreement import AGREE, random_model

peft = pytest.importorskip("peft")

KINDS = ["GPTNeoX", "Llama", "GPT2"]
SMALL = [
    "run.steps=5", "run.checkpoint_every=2", "sft.episodes=32", "sft.epochs=1", "eval.tasks=8", "rollout.num_tasks=4",
    "engine.lora_rank=4", "optim.learning_rate=1e-3",
]  # fmt: skip


def adapted(kind: str, tokenizer, **options) -> HFEngine:
    """An engine that trains an adapter of rank 4 on the model of `kind`."""
    adapter = with_adapter(random_model(kind, AGREE[kind]), rank=4, alpha=8, targets=(), name="base", seed=3)
    options = {"learning_rate": 1e-2, "sampling": Sampling(max_new_tokens=4)} | options
    return HFEngine(adapter.get_base_model(), tokenizer, adapter=adapter, **options)


def learn(engine: HFEngine, steps: int = 3) -> HFEngine:
    batch = random_batch(random.Random(0), rows=5, vocabulary=250)
    for _ in range(steps):
        engine.update([Term("policy", batch, clipped_surrogate)])
    engine.sync()
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_is_trained(kind, dtype, tokenizer):
    engine = adapted(kind, tokenizer, dtype=dtype)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    learn(engine)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    num_trained = sum(m.numel() for m in engine._masters.trained)
    assert num_trained == sum(p.numel() for name, p in before.items() if "lora_" in name)


def test_fixed_weights_reach_the_device_in_the_precision_they_are_used_in(tokenizer, monkeypatch):
    adapter = with_adapter(random_model("Llama", AGREE["Llama"]), rank=4, alpha=8, targets=(), name="base")
    model, sent = adapter.get_base_model(), {}
    move = model.to
    monkeypatch.setattr(
        model, "to", lambda device: (sent.update((n, p.dtype) for n, p in model.named_parameters()), move(device))[1]
    )
    HFEngine(model, tokenizer, adapter=adapter, dtype=torch.bfloat16)
    assert {dtype for name, dtype in sent.items() if "lora_" not in name} == {torch.bfloat16}
    assert {dtype for name, dtype in sent.items() if "lora_" in name} == {torch.float32}, "masters are exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_peft_loads_what_was_saved(kind, dtype, tokenizer, tmp_path):
    engine = learn(adapted(kind, tokenizer, dtype=dtype))
    engine.save(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob("model*"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    model = peft.PeftModel.from_pretrained(random_model(kind, AGREE[kind]), tmp_path)
    ids = torch.randint(3, 250, (2, 9))
    with torch.no_grad():
        got, expected = model(input_ids=ids).logits, engine.model(input_ids=ids).logits.float()
    near = 1e-6 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, expected, rtol=near, atol=near)
    assert (random_model(kind, AGREE[kind])(input_ids=ids).logits - expected).abs().max() > 10 * near
    exact = engine._masters.exact_weights() or dict(engine.model.named_parameters())
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, exact[name]), "saved as it is learned, in float32"


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_that_peft_merges(kind, tokenizer):
    engine = learn(adapted(kind, tokenizer))
    merged = dict(merged_weights(engine.model, engine._masters.exact_weights()))
    expected = copy.deepcopy(engine._adapter).merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-7)


def test_vllm_starts_with_the_merged_weights(tokenizer, monkeypatch):
    from spear_rl.engines.vllm import VLLMGenerator

    engine, loaded = learn(adapted("Llama", tokenizer)), {}
    monkeypatch.setattr("spear_rl.engines.vllm._imported", lambda: SimpleNamespace(LLM=lambda **_: None))
    monkeypatch.setattr(VLLMGenerator, "load", lambda self, weights: loaded.update(weights))
    VLLMGenerator(engine.model, tokenizer).close()
    assert loaded.keys() == random_model("Llama", AGREE["Llama"]).state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_train_an_adapter_as_padded_ones_do(kind, tokenizer):
    batch = random_batch(random.Random(0), rows=5, vocabulary=250)
    padded, packed = (learn(adapted(kind, tokenizer, packed=p, learning_rate=1e-3), 1) for p in (False, True))
    assert packed.packed
    torch.testing.assert_close(packed.scored(batch)[0], padded.scored(batch)[0], rtol=1e-3, atol=1e-4)
    for a, b in zip(packed._masters.trained, padded._masters.trained, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-3, atol=1e-5)


def test_an_adapter_starts_as_its_base_and_depends_on_its_seed_alone(tokenizer):
    engine, batch = adapted("Llama", tokenizer), random_batch(random.Random(0), rows=3, vocabulary=250)
    base = HFEngine(random_model("Llama", AGREE["Llama"]), tokenizer)
    torch.testing.assert_close(engine.scored(batch)[0], base.scored(batch)[0])
    torch.manual_seed(99)
    again = adapted("Llama", tokenizer)
    for a, b in zip(engine._masters.trained, again._masters.trained, strict=True):
        assert torch.equal(a, b)


def test_the_reference_of_an_adapter_is_the_policy_it_began_as(tokenizer):
    from functools import partial

    engine, batch = adapted("Llama", tokenizer), random_batch(random.Random(0), rows=4, vocabulary=250)
    engine.set_reference()
    loss = partial(clipped_surrogate, kl_coefficient=0.1)
    metrics = [engine.update([Term("policy", batch, loss)]) for _ in range(3)]
    assert metrics[0]["policy/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["policy/reference_kl"] > 1e-4
    base = HFEngine(random_model("Llama", AGREE["Llama"]), tokenizer)
    frozen = [engine._scores(engine._reference, piece)[0] for piece in engine._micro_batches(batch)]
    expected = [base._scores(base.model, piece)[0] for piece in base._micro_batches(batch)]
    for a, b in zip(frozen, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_that_are_not_there_are_one_sentence_that_names_those_that_are(tokenizer):
    with pytest.raises(
        ConfigError, match=r"engine\.lora_targets: q_prj .* its linear layers are dense, .*query_key_value"
    ):
        with_adapter(tiny_model("tiny-xs", tokenizer), rank=2, alpha=4, targets=["q_prj"], name="tiny-xs")


def test_a_run_with_an_adapter_resumes_bit_for_bit_and_evaluates(spear, tmp_path):
    settings = [*SMALL, "algorithm.kl=0.05", "algorithm.name=spear-grpo", "algorithm.imitation.warm_steps=2"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert spear("train", "lookup", f"run.dir={whole}", *settings)[0] == 0
    killed_run(part, *settings, "algorithm.bonus.steps=5", steps=5)  # schedules as in the whole run
    code, text = spear("train", f"run.dir={part}", "run.resume=true", "run.steps=5")
    assert code == 0, text
    assert logged(part) == logged(whole)
    assert logged(part, "eval.jsonl") == logged(whole, "eval.jsonl")
    assert logged(part)[0]["policy/reference_kl"] == pytest.approx(0.0, abs=1e-5)
    assert logged(part)[-1]["policy/reference_kl"] > 0
    results = {}
    for seed in (0, 11):  # the seed of sampling must not make another model under the adapter
        code, text = spear("eval", part, "--seed", seed, "--out", tmp_path / "eval.json", "--temperature", "0")
        assert code == 0, text
        results[seed] = json.loads((tmp_path / "eval.json").read_text())["solved"]
    assert results[0] == results[11]
    code, text = spear("train", f"run.dir={part}", "run.resume=true", "run.steps=6", "engine.lora_rank=8")
    assert code == 2
    assert "engine.lora_rank=8: the run began with 4, which cannot change" in text


def test_a_cold_started_adapter_is_a_model_to_start_from(spear, tmp_path):
    code, text = spear("sft", "lookup", f"run.dir={tmp_path / 'sft'}", *SMALL)
    assert code == 0, text
    model = tmp_path / "sft" / "model"
    for rank in (0, 2):
        run = tmp_path / f"rank{rank}"
        settings = ["sft.episodes=0", f"engine.model={model}", f"engine.lora_rank={rank}", "run.steps=2", "run.seed=4"]
        code, text = spear("train", "lookup", f"run.dir={run}", *SMALL, *settings)
        assert code == 0, text
        assert spear("train", f"run.dir={run}", "run.resume=true", "run.steps=3")[0] == 0
        assert spear("eval", run, "--tasks", "2")[0] == 0
    plain, _ = model_in_folder(sorted((tmp_path / "rank0" / "checkpoints").iterdir())[-1])
    assert not any("lora" in name for name, _ in plain.named_parameters())


def test_a_damaged_adapter_is_one_sentence(spear, tmp_path):
    code, _ = spear("sft", "lookup", f"run.dir={tmp_path / 'sft'}", *SMALL, "sft.episodes=4", "eval.tasks=0")
    assert code == 0
    model = tmp_path / "sft" / "model"
    (model / "checkpoint.json").unlink()  # would say first that a file was changed
    for name, content, part in (
        ("adapter_model.safetensors", b"spoilt", "does not load onto"),
        ("adapter_config.json", b"{", "is not an adapter's config"),
    ):
        (model / name).write_bytes(content)
        code, text = spear("eval", model, "--env", "lookup")
        assert code == 2, text
        assert part in text
        assert "Traceback" not in text


def saved_by_peft(folder, tokenizer, *, more: int = 0, settings: dict) -> torch.Tensor:
    """A base and an adapter on it with `more` new tokens, saved by peft alone; the logits of the two."""
    base, words = tiny_model("tiny-xs", tokenizer, seed=1), copy.deepcopy(tokenizer)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    if more:
        words.add_tokens([f"<new{number}>" for number in range(more)])
        base.resize_token_embeddings(base.config.vocab_size + more)
    base.name_or_path = str(folder / "base")
    known = {"r": 4, "target_modules": ["query_key_value"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**(known | settings)))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "adapter")
    words.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None]).logits


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"use_dora": True}, 0),
        ({"rank_pattern": {"query_key_value": 8}, "use_rslora": True}, 0),
        ({"modules_to_save": ["embed_out"]}, 0),
        ({"target_modules": ["embed_in", "query_key_value"]}, 0),
        ({"target_modules": ["embed_out", "query_key_value"]}, 0),
        ({"modules_to_save": ["embed_in", "embed_out"]}, 3),
        ({}, 3),
    ],
)
def test_any_lora_adapter_of_peft_is_the_model_that_peft_makes_of_it(tmp_path, tokenizer, settings, more):
    expected = saved_by_peft(tmp_path, tokenizer, more=more, settings=settings)
    model, words = model_by_name(str(tmp_path / "adapter"), texts=list, seed=0)
    model.save_pretrained(tmp_path / "again")
    words.save_pretrained(tmp_path / "again")
    for own in (model, model_in_folder(tmp_path / "again")[0]):
        with torch.no_grad():
            torch.testing.assert_close(own.eval()(torch.arange(40)[None]).logits, expected, rtol=1e-4, atol=1e-4)
        assert all(parameter.requires_grad for parameter in own.parameters())


def test_an_adapter_of_another_kind_or_another_base_says_so(tmp_path, tokenizer):
    saved_by_peft(tmp_path, tokenizer, settings={})
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    tiny_model("tiny", tokenizer).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    path.write_text(json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "other")}))
    with pytest.raises(ConfigError, match=r"does not load onto GPTNeoXForCausalLM: .*: size mismatch for"):
        model_by_name(str(tmp_path / "adapter"), texts=list, seed=0)
    path.write_text(json.dumps(settings | {"peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="it is of the kind IA3, and only LoRA is read here"):
        model_by_name(str(tmp_path / "adapter"), texts=list, seed=0)


@pytest.mark.parametrize(("saved", "asked", "said"), [
    (["query_key_value"], ["query_key_value", "dense"], "lacks weights that its adapter_config.json asks for"),
    (["query_key_value", "dense"], ["query_key_value"], "has weights that its adapter_config.json does not ask for"),
])  # fmt: skip
def test_an_adapter_with_other_weights_than_its_config_says_is_refused(
    tmp_path, tokenizer, saved, asked, said, recwarn
):
    saved_by_peft(tmp_path, tokenizer, settings={"target_modules": saved})
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": asked}))
    with pytest.raises(ConfigError, match=rf"{said}, such as .*\.dense\.lora_A"):
        model_by_name(str(tmp_path / "adapter"), texts=list, seed=0)
    assert not [warning for warning in recwarn if "missing adapter keys" in str(warning.message)]


def test_an_adapter_without_weights_says_so(tmp_path, tokenizer):
    saved_by_peft(tmp_path, tokenizer, settings={})
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter has no weights: adapter_model.safetensors is missing"):
        model_by_name(str(tmp_path / "adapter"), texts=list, seed=0)


def test_doctor_examines_an_adapter_on_a_model_from_scratch(tmp_path, tokenizer):
    from spear_rl.app.doctor import empty_model

    adapter = with_adapter(tiny_model("tiny-xs", tokenizer, seed=2), rank=2, alpha=4, targets=(), name="tiny-xs:2")
    adapter.save_pretrained(tmp_path, save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path)
    shapes = [parameter.shape for parameter in tiny_model("tiny-xs", tokenizer).parameters()]
    assert [parameter.shape for parameter in empty_model(str(tmp_path)).parameters()] == shapes
