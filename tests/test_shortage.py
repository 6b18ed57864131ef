"""What a machine can lack, as a user meets it: memory, a GPU, packages. One sentence, exit code 2, nothing lost."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import logged, random_batch
from spear_rl.engines.base import NonFiniteLossError, Term
from spear_rl.engines.device import chosen_device, chosen_dtype
from spear_rl.engines.generation.continuous import SlotStream
from spear_rl.engines.generation.padded import Decoder
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.memory import memory_guard
from spear_rl.errors import ShortOfMemoryError, UserError
from spear_rl.functional import clipped_surrogate

SMALL = [
    "run.steps=3", "run.checkpoint_every=1", "sft.episodes=16", "sft.epochs=1", "eval.tasks=4", "rollout.num_tasks=2",
]  # fmt: skip
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.fixture
def run_out(monkeypatch):
    """From the n-th call of a method on, there is no memory left for it."""

    def install(owner: type, name: str, *, after: int = 0):
        method, calls = getattr(owner, name), []

        def failing(*args, **kwargs):
            calls.append(name)
            if len(calls) > after:
                raise FULL
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)
        return calls

    return install


def assert_one_sentence(code: int, text: str, *parts: str) -> None:
    assert code == 2, text
    assert "Traceback" not in text
    error = text[text.index("error:") :]
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


def test_too_little_memory_to_learn_names_smaller_settings_and_the_run_goes_on_exactly(spear, tmp_path, monkeypatch):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert spear("train", "lookup", f"run.dir={whole}", *SMALL)[0] == 0
    backward, calls = torch.autograd.backward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > 6:  # the cold start takes four
            raise FULL
        return backward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", failing)
        code, text = spear("train", "lookup", f"run.dir={run}", *SMALL)
    assert_one_sentence(
        code, text, ": out of memory while learning from the policy rows",
        "engine.micro_batch_tokens=2048 (it is 4096) or engine.checkpointing=true or in a new run engine.lora_rank=16",
        "the weights were not changed", "run.resume=true",
    )  # fmt: skip
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "engine.micro_batch_tokens=2048")
    assert code == 0, text
    assert logged(run) == logged(whole)


def test_too_little_memory_in_the_cold_start_is_said_and_the_run_can_begin_again(spear, tmp_path, run_out, monkeypatch):
    run = tmp_path / "run"
    calls = run_out(HFEngine, "_accumulate")
    code, text = spear("train", "lookup", f"run.dir={run}", *SMALL, "engine.micro_batch_tokens=900")
    assert calls == ["_accumulate"]
    assert_one_sentence(code, text, "out of memory while learning from the sft rows", "engine.micro_batch_tokens=450")
    monkeypatch.undo()
    settings = ["run.resume=true", "run.steps=1", "engine.checkpointing=true"]
    code, text = spear("train", "lookup", f"run.dir={run}", *SMALL, *settings)
    assert code == 0, text


@pytest.mark.parametrize("attention", ["padded", "packed"])
def test_too_little_memory_to_generate_names_what_makes_it_smaller(spear, tmp_path, run_out, attention):
    owner, name = (Decoder, "completions") if attention == "padded" else (SlotStream, "_admit")
    run_out(owner, name, after=3)
    settings = [f"engine.attention={attention}", "sft.episodes=0"]
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, *settings)
    assert_one_sentence(code, text, "out of memory while generating: lower rollout.num_tasks or rollout.group_size")


def test_after_running_out_of_memory_an_engine_is_as_it_was(make_engine, monkeypatch):
    engine, other = make_engine(), make_engine()
    batch = random_batch(random.Random(0), rows=4, vocabulary=250)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", lambda *_: (_ for _ in ()).throw(FULL))
        with pytest.raises(ShortOfMemoryError):
            engine.update([Term("policy", batch, clipped_surrogate)])
    for e in (engine, other):
        e.update([Term("policy", batch, clipped_surrogate)])
    for a, b in zip(engine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "error", [FULL, MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
              RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")],
)  # fmt: skip
def test_every_way_of_running_out_of_memory_is_known_and_nothing_else_taken_for_it(error):
    saying = pytest.raises(ShortOfMemoryError, match="out of memory while thinking: think less")
    with saying, memory_guard("thinking", "think less"):
        raise error
    with pytest.raises(NonFiniteLossError), memory_guard("thinking", "think less"):
        raise NonFiniteLossError("nan")


def test_a_gpu_that_is_not_there_is_one_sentence(spear, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, "engine.device=cuda")
    assert_one_sentence(code, text, "engine.device=cuda: torch", "sees no GPU here", "set engine.device=cpu")
    assert not (tmp_path / "run").exists()
    assert chosen_device("auto") == torch.device("cpu")


def test_a_precision_that_is_not_there_is_one_sentence(spear, tmp_path, monkeypatch):
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, "engine.dtype=float16")
    assert_one_sentence(code, text, "engine.dtype cannot be 'float16'", "bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an old one")
    with pytest.raises(
        UserError, match=r"engine\.dtype=bfloat16: an old one has no bfloat16; set engine\.dtype=float32"
    ):
        chosen_dtype("bfloat16", torch.device("cuda"))
    assert chosen_dtype("auto", torch.device("cuda")) == torch.float32
    assert chosen_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(
    ("package", "setting"), [("peft", "engine.lora_rank=4"), ("vllm", "engine.generator=vllm")]
)  # fmt: skip
def test_a_missing_package_is_named_with_the_command_that_installs_it(spear, tmp_path, monkeypatch, package, setting):
    from importlib import util

    found = util.find_spec
    for module in ("models.lora", "vllm"):
        monkeypatch.setattr(
            f"spear_rl.engines.{module}.find_spec", lambda name: None if name == package else found(name)
        )
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, setting)
    extra = {"peft": "lora", "vllm": "vllm"}[package]
    assert_one_sentence(code, text, f"pip install 'spear-rl[{extra}]'")
    assert not (tmp_path / "run").exists()


def folder_with(tokenizer, path, **changes):
    """A small Llama with a tokenizer that lacks something."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=264 + 64, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=2048,
        sliding_window=changes.pop("sliding_window", None),
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").unlink(missing_ok=True) if "chat_template" in changes else None
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k not in changes}))
    return path


def test_a_tokenizer_without_chat_template_or_padding_plays_a_whole_run_and_says_so(spear, tokenizer, tmp_path, caplog):
    model = folder_with(tokenizer, tmp_path / "model", chat_template=None, pad_token=None)
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="no chat template; using plain"):
        code, text = spear("train", "lookup", f"run.dir={run}", *SMALL, f"engine.model={model}")
    assert code == 0, text
    assert caplog.text.count("the tokenizer has no padding token") == 1
    assert len(logged(run)) == 3
    with pytest.warns(UserWarning, match="no chat template"):
        code, text = spear("eval", run, "--tasks", "2")
    assert code == 0, text


def test_a_tokenizer_without_an_end_token_is_one_sentence(spear, tokenizer, tmp_path):
    model = folder_with(tokenizer, tmp_path / "model", eos_token=None)
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, f"engine.model={model}")
    assert_one_sentence(code, text, "has no end token")
    assert not (tmp_path / "run").exists()


def test_a_window_is_padded_unless_packing_is_asked_for(spear, tokenizer, tmp_path):
    model = folder_with(tokenizer, tmp_path / "model", sliding_window=8)
    settings = [f"run.dir={tmp_path / 'run'}", *SMALL, f"engine.model={model}"]
    code, text = spear("train", "lookup", *settings, "engine.attention=packed")
    assert_one_sentence(code, text, "engine.attention=packed: LlamaForCausalLM", "set engine.attention=padded")
    assert not (tmp_path / "run").exists()
    code, text = spear("train", "lookup", *settings, "run.steps=1")
    assert code == 0, text


@pytest.mark.parametrize("content", ["", "{}", '{"model_type": "no_such"}', "not json"])
def test_a_broken_folder_is_one_sentence(spear, tmp_path, content):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(content)
    for command in (["train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL], ["doctor"]):
        code, text = spear(*command, f"engine.model={tmp_path / 'model'}")
        assert_one_sentence(code, text, "engine.model:")
