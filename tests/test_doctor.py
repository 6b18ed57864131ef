"""`spear doctor`: its estimates against what tensors really take, and its advice."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import transformers

from conftest import random_batch
from spear_rl import sandbox
from spear_rl.app import doctor
from spear_rl.app.build.training import engine_of
from spear_rl.app.config import Config, load
from spear_rl.engines.base import Term
from spear_rl.engines.device import free_bytes
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.memory import GIB, Footprint, activation_bytes, fitting_tokens, footprint
from spear_rl.engines.models.load import model_in_folder
from spear_rl.engines.models.lora import with_adapter
from spear_rl.functional import clipped_surrogate
from test_agreement import AGREE, random_model

WIDE = {
    "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip
MEASURED = {
    "Llama": WIDE,
    "Qwen2": WIDE,
    "Qwen3": WIDE | {"head_dim": 32},
    "Gemma": WIDE | {"head_dim": 32},
    "GPTNeoX": WIDE | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Olmo2": WIDE,
}


def measured_bytes(config, dtype: torch.dtype, num_layers: int, tokens: int) -> int:
    """What autograd really saves of a forward pass through a model with weights, those left out."""
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * num_layers
    model = transformers.AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.randint(3, 60, (1, tokens)), use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MEASURED)
def test_estimated_activations_are_near_those_that_are_really_kept(kind, dtype):
    config = getattr(transformers, f"{kind}Config")(**MEASURED[kind])
    measured = (measured_bytes(config, dtype, 4, 256) - measured_bytes(config, dtype, 2, 256)) / 2 / 256
    assert activation_bytes(config, dtype) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_estimated_weights_and_optimizer_are_the_tensors_there_are(tokenizer, dtype, lora_rank):
    model, adapter = random_model("Llama", AGREE["Llama"]), None
    count, expected = doctor._num_weights(model, lora_rank, [])
    if lora_rank:
        adapter = with_adapter(model, rank=lora_rank, alpha=8, targets=(), name="base")
    engine = HFEngine(model, tokenizer, dtype=dtype, adapter=adapter, packed=True, num_slots=3)
    engine.update([Term("policy", random_batch(random.Random(0), rows=3, vocabulary=250), clipped_surrogate)])
    engine.sync()
    engine.generate([[5, 6, 7]])
    taken = footprint(
        model.config, num_weights=count, num_trained=expected, dtype=dtype, kept_tokens=1024, num_slots=3,
        slot_tokens=512,
    )  # fmt: skip
    weights = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    moments = [t for state in engine._optimizer.state.values() for t in state.values() if t.numel() > 1]
    trained = engine._masters.trained
    copies = [] if dtype == torch.float32 else trained
    held = sum(t.numel() * t.element_size() for t in [*moments, *copies, *(t.grad for t in trained)])
    assert taken.weights == weights
    assert taken.optimizer == held
    slots = engine._slots.slots
    assert taken.slots == sum(t.numel() * t.element_size() for pair in slots.layers for t in pair)


@pytest.mark.parametrize(("max_context", "num_tasks"), [(90, 2), (700, 3), (5000, 2)])
def test_the_engine_and_the_doctor_count_the_same_kv_cache(folder, max_context, num_tasks):
    settings = [f"rollout.max_context={max_context}", f"rollout.num_tasks={num_tasks}", "rollout.group_size=2"]
    config = config_for(folder, "engine.attention=packed", "rollout.max_new_tokens=7", *settings)
    engine = engine_of(config)
    engine.generate([[5, 6, 7]])
    held = sum(t.numel() * t.element_size() for pair in engine._slots.slots.layers for t in pair)
    assert doctor.estimate(config)[0].slots == held


def test_adapters_on_named_layers_alone_are_counted_as_such():
    model = random_model("Llama", AGREE["Llama"])
    named = doctor._num_weights(model, 4, ["q_proj", "v_proj"])[1]
    assert named == 2 * 4 * (32 + 32) + 2 * 4 * (32 + 16)
    adapter = with_adapter(model, rank=4, alpha=8, targets=["q_proj", "v_proj"], name="base")
    assert named == sum(p.numel() for p in adapter.parameters() if p.requires_grad)


def config_for(folder, *settings: str) -> Config:
    return load(None, [f"engine.model={folder}", "engine.device=cpu", *settings])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model whose training takes most of its memory for activations."""
    path = tmp_path_factory.mktemp("model")
    shape = {"num_hidden_layers": 8, "hidden_size": 128, "vocab_size": len(tokenizer)}
    config = transformers.LlamaConfig(**(AGREE["Llama"] | shape))
    config.max_position_embeddings = 8192
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_advice_names_the_setting_that_makes_it_fit_and_it_does(folder):
    wanted = config_for(folder, "engine.micro_batch_tokens=65536")
    taken, free, most = doctor.estimate(wanted, free=1 << 40)
    assert doctor.advice(wanted, taken, free, most).startswith("fits: ")
    half = taken.total // 2
    taken, free, most = doctor.estimate(wanted, free=half)
    assert 1024 <= most < 65536
    assert doctor.advice(wanted, taken, free, most) == f"does not fit: set engine.micro_batch_tokens={most}"
    taken, free, most = doctor.estimate(config_for(folder, f"engine.micro_batch_tokens={most}"), free=half)
    assert taken.total <= half


def test_advice_is_checkpointing_where_activations_alone_are_too_many_then_an_adapter_then_to_give_up(folder):
    def asked(free: int, *settings: str) -> str:
        config = config_for(folder, *settings)
        taken, free, most = doctor.estimate(config, free=free)
        assert most == 0
        return doctor.advice(config, taken, free, most)

    taken, _, _ = doctor.estimate(config_for(folder), free=1 << 40)
    fixed = taken.total - taken.activations - taken.logits
    assert asked(fixed + 1) == "does not fit: set engine.checkpointing=true and ask again"
    assert asked(fixed - 1) == "does not fit: set engine.lora_rank=16 and ask again"
    assert asked(fixed + 1, "engine.checkpointing=true") == "does not fit: set engine.lora_rank=16 and ask again"
    assert asked(1 << 20, "engine.lora_rank=16") == "does not fit: take a smaller model or a larger machine"


def test_the_frozen_reference_of_a_kl_term_takes_the_weights_once_more_and_no_optimizer(folder):
    alone, _, _ = doctor.estimate(config_for(folder), free=1 << 40)
    beside, _, _ = doctor.estimate(config_for(folder, "algorithm.kl=0.01"), free=1 << 40)
    assert (beside.weights, beside.optimizer) == (2 * alone.weights, alone.optimizer)


def test_checkpointing_and_adapters_are_estimated_to_take_less(folder):
    plain, _, _ = doctor.estimate(config_for(folder, "engine.micro_batch_tokens=8192"), free=1 << 40)
    checked, _, _ = doctor.estimate(
        config_for(folder, "engine.micro_batch_tokens=8192", "engine.checkpointing=true"), free=1 << 40
    )
    adapted, _, _ = doctor.estimate(
        config_for(folder, "engine.micro_batch_tokens=8192", "engine.lora_rank=4"), free=1 << 40
    )
    assert checked.activations < plain.activations / 3
    assert adapted.optimizer < plain.optimizer / 3


def test_an_automatic_setting_always_fits_where_anything_does(folder):
    for free in (200 << 20, 1 << 30, 1 << 34):
        config = config_for(folder)
        taken, free, most = doctor.estimate(config, free=free)
        assert (
            most == 0
            or taken.total <= free
            or taken.activations
            == pytest.approx(4096 * 8 * activation_bytes(doctor.model_config(str(folder)), torch.float32), rel=0.01)
        ), "on a CPU a micro-batch is never below 4096 tokens by itself"


@pytest.mark.parametrize("settings", [["engine.model=tiny"], ["quickstart"], ["engine.model=smollm2"]])
def test_the_doctor_examines_built_in_models_without_loading_them(spear, settings):
    code, text = spear("doctor", *settings, "engine.device=cpu")
    assert code == 0, text
    assert "fits" in text
    for word in ("python", "memory", "torch", "peft", "attention", "generation", "trained"):
        assert word in text


def test_the_doctor_examines_a_folder_and_says_which_attention_it_will_have(spear, folder, tmp_path, monkeypatch):
    code, text = spear("doctor", f"engine.model={folder}", "engine.device=cpu", "engine.lora_rank=8")
    assert code == 0, text
    assert "LlamaForCausalLM" in text
    assert "an adapter of rank 8" in text
    assert "fits: " in text
    transformers.Gemma2Config(**(AGREE["Gemma"] | {"num_hidden_layers": 2})).save_pretrained(tmp_path)
    code, text = spear("doctor", f"engine.model={tmp_path}", "engine.device=cpu")
    assert code == 0, text
    assert "padded: Gemma2ForCausalLM does not use plain causal attention" in text


def test_the_doctor_says_what_is_missing(spear, tmp_path, monkeypatch):
    code, text = spear("doctor", "engine.model=tiny", "engine.device=cpu", "engine.generator=vllm")
    assert code == 0
    assert "spear-rl[vllm]" in text or "vLLM, in this process" in text
    for name in ("no/such/folder", tmp_path):
        code, text = spear("doctor", f"engine.model={name}")
        assert code == 2, text
        assert "error: engine.model:" in text
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    code, text = spear("doctor", f"engine.model={tmp_path / 't5'}")
    assert code == 2, text
    assert "no causal language model" in text


def test_tokens_fill_a_share_of_memory_in_whole_steps():
    assert fitting_tokens(10 * GIB, 1 << 20, share=0.5, most=1 << 20) == 5120
    assert fitting_tokens(0, 1 << 20, share=0.5, most=1 << 20) == 1024
    assert fitting_tokens(1 << 50, 1.0, share=0.5, most=4096) == 4096
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 50


def test_a_footprint_is_the_sum_of_its_parts():
    taken = Footprint(1, 2, 3, 4, 5)
    assert taken.total == sum(value for name, value in taken.as_dict().items() if name != "total") == 15


def test_an_engine_on_a_cpu_cuts_batches_alike_whatever_memory_there_is(tokenizer, monkeypatch, folder):
    sizes = []
    for free in (1 << 24, 1 << 40):
        monkeypatch.setattr("spear_rl.engines.models.prepare.free_bytes", lambda device, free=free: free)
        engine = HFEngine(*model_in_folder(folder), micro_batch_tokens=None, max_kept_tokens=None)
        sizes.append((engine._micro_batch_tokens, engine._max_kept_tokens))
    assert sizes == [(4096, 1024), (4096, 65536)]


def test_gpu_memory_is_what_the_driver_says_less_what_others_need(monkeypatch, folder):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
    monkeypatch.setattr("spear_rl.app.doctor.find_spec", lambda name: SimpleNamespace())
    config = load(None, [f"engine.model={folder}", "engine.generator=vllm", "engine.vllm_memory=0.5"])
    _, free, _ = doctor.estimate(config)
    assert free == pytest.approx((60 - 1.2 - 40) * GIB, rel=0.01)
    rows = dict(doctor.engine(config))
    assert rows["device"] == "cuda:0"
    assert rows["dtype"].startswith("bfloat16")
    assert rows["generation"] == "vLLM, in this process"


def test_the_isolation_of_untrusted_code_is_reported():
    told = dict(doctor.sandbox())
    assert told["sandbox backend"] in ("namespaces", "landlock") or "cannot isolate" in told["sandbox"]
    assert {"sandbox oom_score_adj", "sandbox cgroup"} <= set(told) or "sandbox" in told


def test_a_machine_that_cannot_isolate_is_told(monkeypatch):
    def refuse(**_: object) -> None:
        raise sandbox.SandboxUnavailable("this machine cannot isolate untrusted code")

    monkeypatch.setattr(doctor, "Interpreter", refuse)
    assert dict(doctor.sandbox()) == {"sandbox": "this machine cannot isolate untrusted code"}
