"""From a configuration to the parts of a training: algorithm and engine; `playing` has those that need no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spear_rl.algorithms import (
    BASES,
    Algorithm,
    CovarianceClip,
    distinct_tool_bonus,
    spear,
    tool_bonus,
    with_covariance_clip,
)
from spear_rl.config import Config
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.lora import adapter_base, adapter_in_folder, is_adapter, with_adapter
from spear_rl.engines.models import model_by_name, model_in_folder, model_under_adapter, tiny_name
from spear_rl.engines.place import chosen_device, chosen_dtype
from spear_rl.engines.shortage import memory_for
from spear_rl.engines.tiny import TINY_SIZES
from spear_rl.errors import ConfigError
from spear_rl.functional.inputs import fixed_length_mean
from spear_rl.functional.schedules import constant, cosine
from spear_rl.playing import Player, expert_texts, runner_of, sampling_of, tasks_of

__all__ = ["Player", "algorithm_of", "engine_of", "runner_of", "sampling_of", "tasks_of"]


def algorithm_of(config: Config) -> Algorithm:
    """The named base with its settings, wrapped by SPEAR if the name says so."""
    settings, wrapped = config.algorithm, config.algorithm.name.startswith("spear-")
    base = BASES[settings.name.removeprefix("spear-")]()
    loss: Any = base.loss
    own = {"clip_low": settings.clip_low, "clip_high": settings.clip_high, "dual_clip": settings.dual_clip}
    loss = partial(loss, **{name: value for name, value in own.items() if value is not None})
    loss = partial(loss, entropy_bonus=settings.entropy_bonus, kl_coefficient=settings.kl)
    advantages: Any = base.advantages
    if settings.divide_by_std is not None and "divide_by_std" in advantages.keywords:
        advantages = partial(advantages, divide_by_std=settings.divide_by_std)
    if "gigpo" in settings.name:
        advantages = partial(advantages, gamma=settings.discount, step_weight=settings.step_weight)
    filters = base.filters
    if "dr-bot" in settings.name:
        loss = partial(loss, reduce=partial(fixed_length_mean, length=settings.max_length))
        filters = tuple(partial(f, keep=settings.keep_groups) if isinstance(f, partial) else f for f in filters)
    base = replace(
        base,
        advantages=advantages,
        loss=loss,
        filters=filters,
        invalid_penalty=settings.invalid_penalty,
        format_bonus=settings.format_bonus,
    )
    covariance = settings.covariance
    clip = CovarianceClip(
        kind=covariance.on_policy,
        fraction=covariance.fraction,
        low=covariance.low,
        high=covariance.high,
        beta=covariance.beta,
    )
    if covariance.on_policy != "none":
        base = with_covariance_clip(base, clip, seed=config.run.seed)
    return _spear_of(config, base, replace(clip, kind=covariance.replay)) if wrapped else base


def _spear_of(config: Config, base: Algorithm, clip: CovarianceClip) -> Algorithm:
    bonus, imitation = config.algorithm.bonus, config.algorithm.imitation
    weights = {"none": None, "constant": constant(1.0), "cosine": cosine(1.0, 0.0, bonus.steps)}
    return spear(
        base,
        bonus=weights[bonus.mode],
        bonus_of=tool_bonus if bonus.count == "turns" else distinct_tool_bonus,
        imitation=cosine(0.0, imitation.weight, imitation.warm_steps) if imitation.enabled else None,
        capacity=imitation.capacity,
        max_age=imitation.max_age,
        history_size=imitation.history,
        covariance=clip,
        draw_when=imitation.draw,
        keep_step_part=imitation.keep_step_part,
        baseline_per_family=imitation.per_family,
        seed=config.run.seed,
        fraction=imitation.fraction,
        gate=imitation.gate,
        percentile=imitation.percentile,
        reweight=imitation.reweight,
        require_tool=imitation.require_tool,
        age_decay=imitation.age_decay,
        update=imitation.update,
    )


def engine_of(config: Config, *, folder: Path | None = None) -> HFEngine:
    """The policy: from a checkpoint `folder`, or as engine.model says."""
    _quiet()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    settings = config.engine
    device = chosen_device(settings.device)
    dtype = chosen_dtype(settings.dtype, device)
    model, tokenizer, adapter = _model_of(config, folder)
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    if processor is not None and settings.generator == "vllm":
        raise ConfigError("engine.generator=vllm: it is not given pictures here; set engine.generator=native")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"engine.model: the tokenizer of {settings.model} has no end token, so no answer would end")
    sampler = _vllm_of(config, model, tokenizer, dtype) if settings.generator == "vllm" else None
    with memory_for("loading the model", lambda: "set engine.dtype=bfloat16 or take a smaller model"):
        return HFEngine(
            model,
            tokenizer,
            sampling=sampling_of(config),
            learning_rate=config.optim.learning_rate,
            weight_decay=config.optim.weight_decay,
            max_grad_norm=config.optim.max_grad_norm,
            micro_batch_tokens=settings.micro_batch_tokens or None,
            max_kept_tokens=settings.micro_batch_tokens or None,  # who sets it wants to bound the memory
            device=device,
            dtype=dtype,
            packed={"auto": None, "packed": True, "padded": False}[settings.attention],
            checkpointing=settings.checkpointing,
            num_slots=min(config.rollout.num_tasks * config.rollout.group_size, 256),
            slot_tokens=min(config.rollout.max_context, 2048) + config.rollout.max_new_tokens + 2,
            adapter=adapter,
            sampler=sampler,
            processor=processor,
            seed=config.run.seed,
        )


def policy_in_folder(config: Config, folder: Path) -> Any:
    """The model that an engine saved, with its adapter if it has one."""
    return _model_of(config, folder)[0]


def _model_of(config: Config, folder: Path | None) -> tuple[Any, Any, Any]:
    """(model, tokenizer or a vision-language model's processor, the adapter around the model or None)."""
    settings, seed = config.engine, config.run.seed
    if folder is not None:
        rank = adapter_base(folder)[1] if is_adapter(folder) else 0
        if config.run.resume and rank != settings.lora_rank:
            raise ConfigError(f"engine.lora_rank={settings.lora_rank}: the run began with {rank}, which cannot change")
        if not rank:
            return *model_in_folder(folder), None
        model, tokenizer = model_under_adapter(folder)
        adapter = adapter_in_folder(model, folder)
        return adapter.get_base_model(), tokenizer, adapter
    model, tokenizer = model_by_name(settings.model, texts=partial(expert_texts, config), seed=seed)
    if not settings.lora_rank:
        return model, tokenizer, None
    adapter = with_adapter(
        model,
        rank=settings.lora_rank,
        alpha=2 * settings.lora_rank,
        targets=settings.lora_targets,
        name=tiny_name(settings.model, seed) if settings.model in TINY_SIZES else settings.model,
        seed=seed,
    )
    return adapter.get_base_model(), tokenizer, adapter


def _vllm_of(config: Config, model: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    from spear_rl.engines.vllm import VLLMGenerator

    rollout, share = config.rollout, config.engine.vllm_memory
    with memory_for("starting vLLM", lambda: f"set engine.vllm_memory (it is {share}) to what the GPU has left"):
        return VLLMGenerator(
            model,
            tokenizer,
            sampling=sampling_of(config),
            dtype=dtype,
            gpu_memory_utilization=share,
            max_model_len=rollout.max_context + rollout.max_new_tokens,
            seed=config.run.seed,
        )


def _quiet() -> None:
    """The console has a progress bar of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
