"""engine.generator=auto: the rule, and that a run says, records and keeps what it took."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers

from spear_rl.app import doctor
from spear_rl.app.config import load
from spear_rl.engines.generation import choice
from spear_rl.engines.generation.choice import NATIVE_UP_TO, Choice, faster_generator
from spear_rl.engines.memory import GIB
from spear_rl.io.record import read_record
from spear_rl.rollout.generator import Sampling

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
QWEN = {
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "3b": (2048, 11008, 36, 16, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
}
"""Qwen2.5 by size: width, inner width, layers, heads, key-value heads, tied embeddings."""


def qwen(size: str):
    hidden, inner, layers, heads, kv_heads, tied = QWEN[size]
    config = transformers.Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=151936 if size != "7b" else 152064, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.Qwen2ForCausalLM(config)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB with our kernels."""
    monkeypatch.setattr(choice, "has_kernel", lambda device, dtype: dtype == BF16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (70 * GIB, 80 * GIB))


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM that has Qwen2 and Gemma 2."""
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    archs = {"Qwen2ForCausalLM", "Gemma2ForCausalLM"}
    module.ModelRegistry = SimpleNamespace(get_supported_archs=lambda: archs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(choice, "find_spec", lambda name: module.__spec__)
    return module


def taken(model, **changed) -> Choice:
    given = {"device": GPU, "dtype": BF16, "padded": False, "sampling": Sampling(), "vllm_memory": 0.3}
    return faster_generator(model, **(given | changed))


@pytest.mark.parametrize(("size", "name"), [("0.5b", "native"), ("1.5b", "native"), ("3b", "vllm"), ("7b", "vllm")])
def test_size_decides_where_both_can(gpu, vllm, size, name):
    model = qwen(size)
    found = taken(model)
    count = sum(p.numel() for p in model.parameters())
    assert (count <= NATIVE_UP_TO) == (name == "native")
    assert found.name == name
    assert f"{count / 1e9:.2f} billion" in found.reason
    assert found.sentence.startswith(f"engine.generator=auto takes {name}: ")


def test_native_is_taken_where_vllm_cannot_be(gpu, vllm, monkeypatch):
    model = qwen("3b")
    assert taken(model).name == "vllm"
    assert "GPU" in taken(model, device=torch.device("cpu")).reason
    assert "top_p" in taken(model, sampling=Sampling(temperature=0.7, top_p=0.9)).reason
    assert taken(model, sampling=Sampling(temperature=1.0, top_p=0.9)).name == "vllm"
    assert "engine.vllm_memory=0.05" in taken(model, vllm_memory=0.05).reason
    vllm.ModelRegistry.get_supported_archs = lambda: {"LlamaForCausalLM"}
    assert "does not have Qwen2ForCausalLM" in taken(model).reason
    del vllm.ModelRegistry
    assert "cannot be imported" in taken(model).reason
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert "spear-rl[vllm]" in taken(model).reason


def test_vllm_is_taken_at_any_size_where_ours_would_go_batch_by_batch(gpu, vllm):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        windows = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, num_key_value_heads=2, head_dim=8))
    assert taken(windows).name == "vllm"
    assert "batch by batch" in taken(windows).reason
    assert taken(qwen("0.5b"), padded=True).name == "vllm"
    assert taken(qwen("0.5b"), dtype=torch.float32).name == "vllm"


def test_a_model_that_reads_pictures_stays_with_ours(gpu, vllm):
    model = qwen("3b")
    model.config.vision_config = object()
    assert "pictures" in taken(model).reason


def test_the_doctor_says_what_auto_takes_and_counts_its_memory(gpu, vllm, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    frees = {}
    for size in ("1.5b", "3b"):
        qwen(size).config.save_pretrained(tmp_path / size)
        config = load(None, [f"engine.model={tmp_path / size}", "engine.generator=auto"])
        rows = dict(doctor.engine(config))
        footprint, frees[size], _ = doctor.estimate(config)
        assert (footprint.slots > 0) == (size == "1.5b"), "vLLM's cache is in its own share"
        assert ("vLLM, in this process (auto: " in rows["generation"]) == (size == "3b")
        assert "billion" in rows["generation"]
    assert frees["1.5b"] - frees["3b"] == int(0.3 * 80 * GIB)


def test_a_run_says_and_records_what_it_took_and_a_resume_keeps_it(spear, tmp_path, monkeypatch):
    run = tmp_path / "run"
    settings = ["run.threads=1", "sft.episodes=0", "eval.tasks=0", "eval.every=0", f"run.dir={run}"]
    code, text = spear("train", "lookup", "engine.generator=auto", "run.steps=1", *settings)
    assert code == 0, text
    assert "engine.generator=auto takes native: without a GPU" in text
    recorded = json.loads((run / "run.json").read_text())["generator"]
    assert recorded["name"] == "native"
    assert recorded["reason"] in text

    def refuse(*_: object, **__: object) -> Choice:
        raise AssertionError("a resume must not choose again")

    monkeypatch.setattr("spear_rl.app.build.training.faster_generator", refuse)
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=2")
    assert code == 0, text
    assert recorded["reason"] in text
    assert read_record(run)["generator"] == recorded
    code, text = spear("show", run)
    assert code == 0, text
    assert f"engine.generator=auto took native: {recorded['reason']}" in text


def test_an_evaluation_says_what_it_took(spear, tmp_path, tokenizer):
    from spear_rl.engines.models.tiny import tiny_model

    tiny_model("tiny-xs", tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, text = spear("eval", tmp_path, "--env", "lookup", "--tasks", 2, "--set", "engine.generator=auto")
    assert code == 0, text
    assert "engine.generator=auto takes native: without a GPU" in text


def test_a_resume_that_took_vllm_asks_for_vllm_again(spear, tmp_path, monkeypatch):
    run = tmp_path / "run"
    settings = ["run.threads=1", "sft.episodes=0", "eval.tasks=0", "eval.every=0", f"run.dir={run}"]
    assert spear("train", "lookup", "engine.generator=auto", "run.steps=1", *settings)[0] == 0
    record = json.loads((run / "run.json").read_text())
    record["generator"] = {"name": "vllm", "reason": "it was faster there"}
    (run / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr("spear_rl.engines.vllm.find_spec", lambda name: None)
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=2")
    assert code == 2, text
    assert "spear-rl[vllm]" in text
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=2", "engine.generator=native")
    assert code == 0, text


@pytest.mark.parametrize("damage", [None, 3, "vllm", {"name": "other", "reason": "x"}, {"reason": "x"}, []])
def test_a_damaged_choice_counts_as_none(tmp_path, damage):
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{}], "trackers": {}, "generator": damage}))
    assert read_record(tmp_path) == {"starts": [{}], "trackers": {}}
