"""From a configuration to the algorithm and the engine; `rollout` has the parts that need no torch."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spear_rl.algorithms import (
    Algorithm,
    ByEntropy,
    BySuccess,
    CovarianceClip,
    SettingError,
    answered_tool_bonus,
    distinct_tool_bonus,
    named,
    tool_bonus,
)
from spear_rl.algorithms.wrapping import AlgorithmError
from spear_rl.app.build.rollout import Player, expert_texts, runner_of, sampling_of, tasks_of
from spear_rl.app.build.threads import use_threads
from spear_rl.app.config import AlgorithmConfig, Config, Rollout, value_of
from spear_rl.engines import ENGINES
from spear_rl.engines.base import TrainableEngine, missing_members
from spear_rl.engines.device import chosen_device, chosen_dtype, free_bytes
from spear_rl.engines.generation.choice import Choice, faster_generator
from spear_rl.engines.memory import GIB, OVERHEAD, kv_slots, memory_guard, training_bytes
from spear_rl.engines.models.hub import pin
from spear_rl.engines.models.load import (
    base_name,
    is_function,
    model_by_name,
    model_from_function,
    model_in_folder,
    model_under_adapter,
    with_saved_weights,
)
from spear_rl.engines.models.lora import adapter_base, adapter_in_folder, is_adapter, with_adapter
from spear_rl.engines.models.positions import check_positions, position_limit
from spear_rl.engines.models.prepare import check_tokens
from spear_rl.errors import ConfigError, UserError
from spear_rl.functional.losses import FixedLength, Reduce, Schedule, SequenceMean, TokenMean, constant, cosine
from spear_rl.io.escaping import in_words
from spear_rl.io.record import read_record
from spear_rl.settings.names import loaded
from spear_rl.train.checkpoint import MANIFEST, checked_manifest

__all__ = ["Player", "algorithm_of", "engine_of", "runner_of", "sampling_of", "tasks_of"]

OWN = [
    *("invalid_penalty", "format_bonus", "divide_by_std", "discount", "step_weight"),
    *("episode_weight", "depth", "depth_power", "distance_discount"),
    *("clip_low", "clip_high", "dual_clip", "entropy_bonus", "entropy_floor", "kl"),
]
"""Settings of a base: fields, under the same names, of an algorithm and of its advantages and loss."""
PPO = ["level", "gamma", "lam", "bootstrap", "learning_rate", "value_clip", "warmup_steps"]
"""Settings of `algorithm.ppo`: fields, under the same names, of the advantages and the critic."""
SAME = [
    *("capacity", "max_age", "fraction", "gate", "percentile", "reweight", "require_tool", "age_decay", "update"),
    *("keep_step_part", "admit_by_score", "skip_invalid", "scale_by_rows", "unit", "divide_by_std"),
    *("baseline", "priority", "max_second_moment", "join_lost"),
]
"""Settings of self-imitation that are keywords of `spear` under the same names."""
BONUSES = {"turns": tool_bonus, "distinct": distinct_tool_bonus, "answered": answered_tool_bonus}
"""`algorithm.bonus.count` -> what is paid."""


def algorithm_of(config: Config) -> Algorithm:
    """The named algorithm with its settings.

    One at its default leaves the algorithm's own value, which for ours is the same; a changed one is written into the
    record that has it, or refused. Settings of a wrapper that the name does not have are not looked at.
    """
    settings, default = config.algorithm, AlgorithmConfig()
    changed = {name: getattr(settings, name) for name in OWN if getattr(settings, name) != getattr(default, name)}
    changed |= {n: getattr(settings.ppo, n) for n in PPO if getattr(settings.ppo, n) != getattr(default.ppo, n)}
    covariance = settings.covariance
    clip = CovarianceClip(
        kind=covariance.on_policy,
        fraction=covariance.fraction,
        low=covariance.low,
        high=covariance.high,
        beta=covariance.beta,
    )
    if settings.reduction != "own":
        changed["reduction"] = _reduction(settings)
    if covariance.on_policy != "none":
        changed |= {"covariance": clip, "generator": torch.Generator().manual_seed(config.run.seed)}
    try:
        return named(
            settings.name,
            settings=changed,
            anchor=settings.anchor if settings.anchor != default.anchor else None,
            dr_bot_options=asdict(settings.filters)
            | {"max_length": settings.max_length, "keep_groups": settings.keep_groups},
            spear_options=_spear_options(
                config, replace(clip, kind=covariance.replay, joint_means=covariance.joint_means)
            ),
        )
    except SettingError as error:
        part = "replay" if covariance.on_policy == "none" else "on_policy"
        section, own = (default.ppo, f"ppo.{error.name}") if error.name in PPO else (default, error.name)
        key, way_out = {
            "covariance": (f"covariance.{part}", f"set algorithm.covariance.{part}=none"),
            "keep_step_part": ("imitation.keep_step_part", "set algorithm.name to one with gigpo"),
            "priority": ("imitation.priority", "set algorithm.imitation.draw=every_step"),
            "max_second_moment": ("imitation.max_second_moment", "leave it out"),
            "join_lost": ("imitation.join_lost", "leave it out"),
            "bonus": ("bonus.mode", "set algorithm.bonus.mode=none to keep the base's"),
        }.get(error.name, (own, f"leave it out (unset it is {str(getattr(section, error.name, None)).lower()})"))
        value = str(value_of(settings, key)).lower()
        raise ConfigError(
            f"algorithm.{key}={value}: {error.sentence}; with algorithm.name={settings.name} {way_out}"
        ) from error
    except AlgorithmError as error:
        raise ConfigError(f"algorithm.name={settings.name}: {error}") from error


def _reduction(settings: AlgorithmConfig) -> Reduce:
    known: dict[str, Reduce] = {"sequence_mean": SequenceMean(), "token_mean": TokenMean()}
    return known.get(settings.reduction) or FixedLength(settings.max_length)


def _spear_options(config: Config, clip: CovarianceClip) -> dict[str, Any]:
    bonus, imitation = config.algorithm.bonus, config.algorithm.imitation
    weights: dict[str, Schedule | None] = {
        "none": None,
        "constant": constant(1.0),
        "cosine": cosine(1.0, 0.0, bonus.steps),
    }
    weights["success"] = BySuccess(1.0, 0.0, bonus.target)
    growing: dict[str, Schedule] = {
        "steps": cosine(0.0, imitation.weight, imitation.warm_steps),
        "success": BySuccess(0.0, imitation.weight, imitation.target),
        "fading": BySuccess(imitation.weight, 0.0, imitation.target),
        "entropy": ByEntropy(imitation.weight, imitation.entropy_share),
    }
    return {
        "bonus": weights[bonus.mode],
        "bonus_of": BONUSES[bonus.count],
        "imitation": growing[imitation.schedule] if imitation.enabled else None,
        "history_size": imitation.history,
        "covariance": clip,
        "draw_when": imitation.draw,
        "baseline_per_family": imitation.per_family,
        "seed": config.run.seed,
    } | {name: getattr(imitation, name) for name in SAME}


def engine_of(
    config: Config, *, folder: Path | None = None, on_choice: Callable[[Choice], object] | None = None
) -> TrainableEngine:
    """The engine that engine.name says, with the policy of a checkpoint `folder` or of engine.model.

    Args:
        on_choice: called with what engine.generator=auto takes.
    """
    _quiet()
    settings, name = config.engine, config.engine.name
    if name not in ENGINES and ":" not in name:
        known = f"it is one of: {', '.join(ENGINES)}; or your own: package.module:function"
        raise ConfigError(f"engine.name cannot be {name!r}; {known}")
    make = ENGINES.get(name) or loaded(name, kind="engine", example="my_package.my_engine:make")
    device = chosen_device(settings.device)
    dtype = chosen_dtype(settings.dtype, device)
    record = read_record(Path(config.run.dir)) if config.run.resume else {}
    pin(record.get("models", {}))
    model, tokenizer, adapter = _model_of(config, folder)
    use_threads(config, model, device, folder)
    check_context(config, model.config)
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    generator: str = settings.generator
    if generator == "auto":
        choice = _chosen(config, model, device, dtype, record.get("generator"))
        generator = choice.name
        if on_choice:
            on_choice(choice)
    if processor is not None and generator == "vllm":
        raise ConfigError("engine.generator=vllm: it is not given pictures here; set engine.generator=native")
    check_tokens(model, tokenizer, folder or settings.model)
    sampler = _vllm_of(config, model, tokenizer, dtype) if generator == "vllm" else None
    num_slots, slot_tokens = _slots_of(config, model, device, dtype)
    with memory_guard("loading the model", "set engine.dtype=bfloat16 or take a smaller model"):
        try:
            engine = make(
                model=model,
                tokenizer=tokenizer,
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
                num_slots=num_slots,
                slot_tokens=slot_tokens,
                adapter=adapter,
                sampler=sampler,
                processor=processor,
                seed=config.run.seed,
            )
        except BaseException as error:  # also SystemExit, which would end the run as if it had succeeded
            passes = (UserError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError)
            if name in ENGINES or isinstance(error, passes):
                raise
            raise ConfigError(f"engine.name={name}: calling it raised {in_words(error)}") from error
    if missing := missing_members(engine):
        raise ConfigError(f"engine.name={name}: it returned {type(engine).__name__}, which lacks {', '.join(missing)}")
    return engine


def check_context(config: Config, model_config: Any) -> None:
    """Refuse a rollout.max_context that the model has no positions for; the default or a resumed run's warns."""
    rollout = config.rollout
    check_positions(
        model_config,
        config.engine.model,
        max_context=rollout.max_context,
        max_new_tokens=rollout.max_new_tokens,
        lenient=bool(config.run.resume) or rollout.max_context == Rollout().max_context,
    )


def policy_in_folder(config: Config, folder: Path) -> Any:
    """The model that an engine saved, with its adapter if it has one."""
    return _model_of(config, folder)[0]


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause garbage collection: loading 150,000 tokens of a vocabulary triggers seven full ones that free nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@paused_collection()
def _model_of(config: Config, folder: Path | None) -> tuple[Any, Any, Any]:
    """(model, tokenizer or a vision-language model's processor, the adapter around the model or None)."""
    settings, seed, trusted = config.engine, config.run.seed, config.engine.trust_remote_code
    own = model_from_function(settings.model, seed=seed) if is_function(settings.model) else None
    if own and settings.revision:
        raise ConfigError(f"engine.revision={settings.revision}: {settings.model} is not of the hub; leave it out")
    if folder is not None:
        rank = adapter_base(folder)[1] if is_adapter(folder) else 0
        if config.run.resume and rank != settings.lora_rank:
            raise ConfigError(f"engine.lora_rank={settings.lora_rank}: the run began with {rank}, which cannot change")
        if not rank and own:
            return with_saved_weights(own[0], folder), own[1], None
        if not rank:
            return *model_in_folder(folder, trust_remote_code=trusted), None
        model, tokenizer = own or model_under_adapter(folder, trust_remote_code=trusted)
        adapter = adapter_in_folder(model, folder)
        return adapter.get_base_model(), tokenizer, adapter
    if (Path(settings.model) / MANIFEST).is_file():  # a checkpoint, or what `spear sft` wrote
        checked_manifest(Path(settings.model))
    texts, revision = partial(expert_texts, config), settings.revision
    model, tokenizer = own or model_by_name(
        settings.model, texts=texts, seed=seed, revision=revision, trust_remote_code=trusted
    )
    if not settings.lora_rank:
        return model, tokenizer, None
    name, commit = base_name(settings.model, revision, seed=seed)
    adapter = with_adapter(
        model,
        rank=settings.lora_rank,
        alpha=2 * settings.lora_rank,
        targets=settings.lora_targets,
        name=name,
        revision=commit,
        seed=seed,
    )
    return adapter.get_base_model(), tokenizer, adapter


def _slots_of(config: Config, model: Any, device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """(slots, tokens per slot) of the KV cache, by what the model leaves of a GPU's memory."""
    room = None
    if device.type == "cuda":
        weights = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        algorithm = algorithm_of(config)
        held = training_bytes(weights, trained, dtype) * (2 if algorithm.critic else 1)
        held += weights * dtype.itemsize if getattr(algorithm.loss, "kl", 0.0) else 0
        room = free_bytes(device) - int(OVERHEAD * GIB) - held
    return slots_within(room, config, model.config, dtype)


def slots_within(room: int | None, config: Config, model_config: Any, dtype: torch.dtype) -> tuple[int, int]:
    """(slots, tokens per slot) of the KV cache for this configuration in `room` bytes; None is any number of them."""
    rollout = config.rollout
    return kv_slots(
        model_config,
        dtype,
        max_context=rollout.max_context,
        max_new_tokens=rollout.max_new_tokens,
        num_episodes=rollout.num_tasks * rollout.group_size,
        room=room,
    )


def _chosen(
    config: Config, model: Any, device: torch.device, dtype: torch.dtype, recorded: dict[str, Any] | None
) -> Choice:
    """What engine.generator=auto takes: in a resumed run what it began with."""
    if recorded:
        return Choice(**recorded)
    return faster_generator(
        model,
        device=device,
        dtype=dtype,
        padded=config.engine.attention == "padded",
        sampling=sampling_of(config),
        vllm_memory=config.engine.vllm_memory,
    )


def _vllm_of(config: Config, model: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    from spear_rl.engines.vllm import VLLMGenerator

    longest, share = config.rollout.max_context + config.rollout.max_new_tokens, config.engine.vllm_memory
    with memory_guard("starting vLLM", f"set engine.vllm_memory (it is {share}) to what the GPU has left"):
        return VLLMGenerator(
            model,
            tokenizer,
            sampling=sampling_of(config),
            dtype=dtype,
            gpu_memory_utilization=share,
            max_model_len=min(longest, position_limit(model.config) or longest),
            seed=config.run.seed,
            trust_remote_code=config.engine.trust_remote_code,
        )


def _quiet() -> None:
    """The console has a progress bar of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
