"""Engines: what generates, scores and trains. Importing this imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from spear_rl.errors import ConfigError

if TYPE_CHECKING:
    from spear_rl.engines.base import EngineFactory, EngineSettings, TrainableEngine


def hf_engine(**settings: Unpack[EngineSettings]) -> TrainableEngine:
    """The engine of `engine.name=hf`, with vLLM for generation if engine.generator says so."""
    from spear_rl.engines.hf import HFEngine
    from spear_rl.engines.memory import kv_slots, memory_guard

    model, tokenizer, adapter = settings["load"]()
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    sampling, sampler = settings["sampling"], None
    if tokenizer.eos_token_id is None:
        raise ConfigError("engine.model: its tokenizer has no end token, so no completion would end")
    if settings["generator"] == "vllm":
        from spear_rl.engines.vllm import VLLMGenerator

        if processor is not None:
            raise ConfigError("engine.generator=vllm: images are not supported; set engine.generator=native")
        share = settings["vllm_memory"]
        with memory_guard("starting vLLM", f"set engine.vllm_memory (it is {share}) to what the GPU has left"):
            sampler = VLLMGenerator(
                model,
                tokenizer,
                sampling=sampling,
                dtype=settings["dtype"],
                gpu_memory_utilization=share,
                max_model_len=settings["max_context"] + sampling.max_new_tokens,
                seed=settings["seed"],
                trust_remote_code=settings["trust_remote_code"],
            )
    num_slots, slot_tokens = kv_slots(settings["max_context"], sampling.max_new_tokens, settings["num_episodes"])
    return HFEngine(
        model,
        tokenizer,
        sampling=sampling,
        learning_rate=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        micro_batch_tokens=settings["micro_batch_tokens"] or None,
        max_kept_tokens=settings["micro_batch_tokens"] or None,  # set to bound the memory
        device=settings["device"],
        dtype=settings["dtype"],
        packed={"auto": None, "packed": True, "padded": False}[settings["attention"]],
        checkpointing=settings["checkpointing"],
        num_slots=num_slots,
        slot_tokens=slot_tokens,
        adapter=adapter,
        sampler=sampler,
        processor=processor,
        seed=settings["seed"],
    )


ENGINES: dict[str, EngineFactory] = {"hf": hf_engine}
"""`engine.name` -> its factory; a user's own is package.module:function."""
