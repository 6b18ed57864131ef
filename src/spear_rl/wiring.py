"""From a configuration to the parts it names: algorithm, tasks, engine, player."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
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
from spear_rl.engines.lora import ADAPTER, adapter_in_folder, with_adapter
from spear_rl.engines.models import model_by_name, model_in_folder
from spear_rl.engines.place import chosen_device, chosen_dtype
from spear_rl.envs import ENVIRONMENTS
from spear_rl.errors import ConfigError
from spear_rl.functional.inputs import fixed_length_mean
from spear_rl.functional.schedules import constant, cosine
from spear_rl.rollout.collect import collect_groups, demonstration
from spear_rl.rollout.elsewhere import tasks_elsewhere
from spear_rl.rollout.env import Task, TasksFn
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.layout import LAYOUTS
from spear_rl.rollout.pool import Pool
from spear_rl.rollout.renderer import ChatRenderer
from spear_rl.rollout.runner import InProcess
from spear_rl.rollout.source import loaded_tasks
from spear_rl.types import Group, Trajectory


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


def tasks_of(config: Config, split: str, *, count: int | None = None) -> Sequence[Task]:
    """The panel of a split, or its first `count` tasks."""
    name, options = config.task.env, config.task.options
    tasks = _tasks_fn(config)
    known = [p.name for p in inspect.signature(tasks).parameters.values() if p.name != "split"]
    for option in options if not config.task.python else ():
        if option not in known:
            raise ConfigError(f"task.options.{option}: {name} has no such option; it has: {', '.join(known)}")
    try:
        panel = tasks(split, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"task.options: {error}") from error
    if not len(panel):
        raise ConfigError(f"task.options leave no task in the {split} panel of {name}: widen them")
    return panel if count is None else panel[:count]


def _tasks_fn(config: Config) -> TasksFn:
    """Ours by name, a user's by `package.module:function`, either from another virtual environment if one is given."""
    name, python = config.task.env, config.task.python
    if name not in ENVIRONMENTS and ":" not in name:
        raise ConfigError(
            f"task.env: there is no environment {name!r}; there are: {', '.join(ENVIRONMENTS)}, "
            "or your own as package.module:function"
        )
    if python:
        ours = ENVIRONMENTS.get(name)
        return partial(tasks_elsewhere, python=python, name=f"{ours.__module__}:tasks" if ours else name)
    return ENVIRONMENTS[name] if name in ENVIRONMENTS else loaded_tasks(name)


def runner_of(config: Config) -> Pool | InProcess:
    """Who runs the environments."""
    rollout = config.rollout
    if not rollout.workers:
        return InProcess()
    python = os.path.abspath(config.task.python) if config.task.python else None
    return Pool(num_workers=rollout.workers, python=python, step_timeout=rollout.step_timeout)


class Player:
    """Plays tasks the way a configuration says, with any generator; use it in a `with`, which ends its workers."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config, self._renderer, self._envs = config, ChatRenderer(tokenizer), runner_of(config)
        self._layout = partial(LAYOUTS[config.rollout.layout], detail=config.rollout.detail)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._envs, Pool):
            self._envs.shut()

    def groups(
        self, tasks: Sequence[Task], generator: Generator, *, group_size: int, step: int, max_turns: int = 0
    ) -> list[Group]:
        rollout = self._config.rollout
        return collect_groups(
            tasks,
            group_size=group_size,
            generator=generator,
            renderer=self._renderer,
            max_turns=max_turns or rollout.max_turns,
            step=step,
            layout=self._layout,
            max_context=rollout.max_context,
            envs=self._envs,
        )

    def demonstrations(self, tasks: Sequence[Task], count: int) -> list[Trajectory]:
        """`count` expert episodes over `tasks`, going round as often as needed; each round plays differently."""
        return [
            demonstration(
                tasks[number % len(tasks)],
                renderer=self._renderer,
                layout=self._layout,
                tagged=self._config.rollout.detail == "full",
                seed=self._config.run.seed * 1_000_003 + number,
                envs=self._envs,
            )
            for number in range(count)
        ]


def sampling_of(config: Config, *, temperature: float | None = None) -> Sampling:
    """Training's sampling, or that of an evaluation at another temperature."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        stop=tuple(rollout.stop),
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
    sampler = _vllm_of(config, model, tokenizer, dtype) if settings.generator == "vllm" else None
    return HFEngine(
        model,
        tokenizer,
        sampling=sampling_of(config),
        learning_rate=config.optim.learning_rate,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
        micro_batch_tokens=settings.micro_batch_tokens or None,
        max_kept_tokens=None,
        device=device,
        dtype=dtype,
        packed={"auto": None, "packed": True, "padded": False}[settings.attention],
        checkpointing=settings.checkpointing,
        num_slots=min(config.rollout.num_tasks * config.rollout.group_size, 256),
        slot_tokens=min(config.rollout.max_context, 2048) + config.rollout.max_new_tokens + 2,
        adapter=adapter,
        sampler=sampler,
        seed=config.run.seed,
    )


def _model_of(config: Config, folder: Path | None) -> tuple[Any, Any, Any]:
    """(model, tokenizer, the adapter around the model or None)."""
    settings = config.engine
    has_adapter = folder is not None and (folder / ADAPTER).exists()
    if folder is not None and not has_adapter:
        model, tokenizer = model_in_folder(folder)
    else:
        texts = partial(_texts, tasks_of(config, "train"), config)
        model, tokenizer = model_by_name(settings.model, texts=texts, seed=config.run.seed)
    adapter = None
    if folder is not None and has_adapter:
        adapter = adapter_in_folder(model, folder)
    elif settings.lora_rank:
        adapter = with_adapter(
            model,
            rank=settings.lora_rank,
            alpha=2 * settings.lora_rank,
            targets=settings.lora_targets,
            name=settings.model,
        )
    return (model if adapter is None else adapter.get_base_model()), tokenizer, adapter


def _vllm_of(config: Config, model: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    from spear_rl.engines.vllm import VLLMGenerator

    rollout = config.rollout
    return VLLMGenerator(
        model,
        tokenizer,
        sampling=sampling_of(config),
        dtype=dtype,
        gpu_memory_utilization=config.engine.vllm_memory,
        max_model_len=rollout.max_context + rollout.max_new_tokens,
        seed=config.run.seed,
    )


def _quiet() -> None:
    """The console has a progress bar of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _texts(tasks: Sequence[Task], config: Config, *, num_episodes: int = 400) -> list[str]:
    """What expert episodes of the training panel show and say: the words a tokenizer from scratch should know."""
    texts: list[str] = []
    for number, task in enumerate(tasks[:num_episodes]):
        env = task.make_env()
        texts.append(env.reset().text)
        for action in task.demonstrate(number) if task.demonstrate else []:
            result = env.step(action)
            texts += [action, result.observation.text]
            if result.done:
                break
        env.close()
        if config.rollout.detail == "full":
            texts.append(task.instructions)
    return texts
