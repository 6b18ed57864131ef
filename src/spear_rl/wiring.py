"""From a configuration to the parts it names: algorithm, tasks, engine, player."""

from __future__ import annotations

import inspect
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
from spear_rl.engines.models import model_by_name, model_in_folder
from spear_rl.envs import ENVIRONMENTS
from spear_rl.errors import ConfigError
from spear_rl.functional.inputs import fixed_length_mean
from spear_rl.functional.schedules import constant, cosine
from spear_rl.rollout.collect import collect_groups, demonstration
from spear_rl.rollout.env import Task
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.layout import LAYOUTS
from spear_rl.rollout.renderer import ChatRenderer
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
    if name not in ENVIRONMENTS:
        raise ConfigError(f"task.env: there is no environment {name!r}; there are: {', '.join(ENVIRONMENTS)}")
    known = [p.name for p in inspect.signature(ENVIRONMENTS[name]).parameters.values() if p.name != "split"]
    for option in options:
        if option not in known:
            raise ConfigError(f"task.options.{option}: {name} has no such option; it has: {', '.join(known)}")
    try:
        panel = ENVIRONMENTS[name](split, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"task.options: {error}") from error
    if not len(panel):
        raise ConfigError(f"task.options leave no task in the {split} panel of {name}: widen them")
    return panel if count is None else panel[:count]


class Player:
    """Plays tasks the way a configuration says, with any generator."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config, self._renderer = config, ChatRenderer(tokenizer)
        self._layout = partial(LAYOUTS[config.rollout.layout], detail=config.rollout.detail)

    def groups(self, tasks: Sequence[Task], generator: Generator, *, group_size: int, step: int) -> list[Group]:
        rollout = self._config.rollout
        return collect_groups(
            tasks,
            group_size=group_size,
            generator=generator,
            renderer=self._renderer,
            max_turns=rollout.max_turns,
            step=step,
            layout=self._layout,
            max_context=rollout.max_context,
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
    if folder is not None:
        model, tokenizer = model_in_folder(folder)
    else:
        texts = partial(_texts, tasks_of(config, "train"), config)
        model, tokenizer = model_by_name(config.engine.model, texts=texts, seed=config.run.seed)
    return HFEngine(
        model,
        tokenizer,
        sampling=sampling_of(config),
        learning_rate=config.optim.learning_rate,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
        micro_batch_tokens=config.engine.micro_batch_tokens,
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
