"""From a configuration to the parts it names. Beside config.py and cli.py, nothing else reads a configuration."""

from __future__ import annotations

import inspect
import json
import platform
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
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
from spear_rl.config import Config, load, to_toml
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models import model_by_name, model_in_folder
from spear_rl.envs import ENVIRONMENTS
from spear_rl.errors import CheckpointError, ConfigError
from spear_rl.functional.inputs import fixed_length_mean
from spear_rl.functional.schedules import constant, cosine
from spear_rl.rollout.collect import collect_groups, demonstration
from spear_rl.rollout.env import Task
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.layout import LAYOUTS
from spear_rl.rollout.renderer import ChatRenderer
from spear_rl.train.callbacks import Callback, Event, drop_rows
from spear_rl.train.checkpoint import checkpoints
from spear_rl.train.cold_start import cold_start, warmup_then_cosine
from spear_rl.train.evaluate import Evaluation, evaluation
from spear_rl.train.loop import TaskOrder, Trainer
from spear_rl.train.step import timed
from spear_rl.types import Group, Metrics, Trajectory


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
        advantages = partial(advantages, discount=settings.discount, step_weight=settings.step_weight)
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


def evaluated(config: Config, engine: HFEngine, player: Player, tasks: Sequence[Task], *, step: int) -> Evaluation:
    """One episode of every task, from a random stream of its own."""
    sampling = sampling_of(config, temperature=config.eval.temperature)
    generator = engine.evaluation_generator(sampling, seed=config.run.seed + 7919)
    groups = player.groups(tasks, generator, group_size=1, step=step)
    engine.sync()
    return evaluation(groups)


def train_from(config: Config, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """A whole run: cold start, RL, evaluations, checkpoints; its summary, which is also in run.dir/summary.json."""
    run_dir = Path(config.run.dir)
    newest = _prepare(run_dir, config)
    engine = engine_of(config, folder=newest)
    player = Player(config, engine.tokenizer)
    panel = tasks_of(config, "train")
    held_out = tasks_of(config, config.eval.split, count=config.eval.tasks) if config.eval.tasks else []
    order = TaskOrder(panel, num_tasks=config.rollout.num_tasks, seed=config.run.seed)
    seconds: Metrics = {}
    if newest is None and config.sft.episodes:
        with timed("time/sft", seconds):
            cold_start_from(config, engine, player, panel, callbacks)
    engine.reset_optimizer(config.optim.learning_rate)
    if config.algorithm.kl:
        _freeze_reference(engine, run_dir / "reference")
    trainer = Trainer(
        run_dir=run_dir,
        engine=engine,
        algorithm=algorithm_of(config),
        collect=lambda step: player.groups(order(step), engine, group_size=config.rollout.group_size, step=step),
        evaluate=lambda step: evaluated(config, engine, player, held_out, step=step) if held_out else None,
        learning_rate=_learning_rate(config),
        rng=random.Random(f"replay/{config.run.seed}"),
        num_minibatches=config.optim.num_minibatches,
        checkpoint_every=config.run.checkpoint_every,
        trajectories_every=config.run.trajectories_every,
        eval_every=config.eval.every,
        callbacks=callbacks,
        seconds=seconds,
    )
    if newest is not None:
        trainer.restore(newest)
    trainer.run(config.run.steps)
    summary = _summary(config, trainer.step, trainer.before, trainer.latest, trainer.seconds)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def sft_from(config: Config, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """A cold start alone: run.dir/model is the result, a plain transformers folder for engine.model."""
    run_dir = Path(config.run.dir)
    _prepare(run_dir, config)
    engine = engine_of(config)
    player = Player(config, engine.tokenizer)
    held_out = tasks_of(config, config.eval.split, count=config.eval.tasks) if config.eval.tasks else []
    before = evaluated(config, engine, player, held_out, step=0) if held_out else None
    seconds: Metrics = {}
    with timed("time/sft", seconds):
        metrics = cold_start_from(config, engine, player, tasks_of(config, "train"), callbacks)
    after = evaluated(config, engine, player, held_out, step=0) if held_out else None
    engine.model.save_pretrained(run_dir / "model")
    engine.tokenizer.save_pretrained(run_dir / "model")
    summary = _summary(config, 0, before, after, seconds) | {"algorithm": "sft", "loss": metrics["sft/loss"]}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def evaluate_from(model: str, overrides: Sequence[str], *, split: str, num_tasks: int = 0) -> Evaluation:
    """Evaluate a run's newest policy under its own settings, or any model under the defaults and `overrides`."""
    place = Path(model)
    homes = [place, place.parent, place.parent.parent] if place.is_dir() else []
    home = next((folder for folder in homes if (folder / "config.toml").is_file()), None)
    config = load(str(home / "config.toml") if home else None, overrides)
    if split not in ("train", "validation", "test"):
        raise ConfigError(f"--split cannot be {split!r}; it is one of: train, validation, test")
    folder = place if place.is_dir() else None
    if home is not None and home == place:
        saved = [*checkpoints(home / "checkpoints"), *home.glob("model")]
        if not saved:
            raise CheckpointError(f"{home} has no checkpoint yet, so there is nothing to evaluate")
        folder = saved[-1]
    if folder is None:
        config.engine.model = model
    engine = engine_of(config, folder=folder)
    tasks = tasks_of(config, split, count=num_tasks or None)
    return evaluated(config, engine, Player(config, engine.tokenizer), tasks, step=0)


def cold_start_from(
    config: Config, engine: HFEngine, player: Player, panel: Sequence[Task], callbacks: Sequence[Callback]
) -> Metrics:
    """Supervised learning on sft.episodes expert episodes of the training panel."""

    def tell(done: int, total: int, metrics: Metrics) -> None:
        for callback in callbacks:
            callback(Event("sft", done, total, metrics))

    engine.reset_optimizer(config.sft.learning_rate)
    return cold_start(
        engine,
        player.demonstrations(panel, config.sft.episodes),
        epochs=config.sft.epochs,
        batch_size=config.sft.batch_size,
        learning_rate=config.sft.learning_rate,
        set_learning_rate=engine.set_learning_rate,
        rng=random.Random(f"sft/{config.run.seed}"),
        on_update=tell,
    )


def resume_point(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run, or None if it was stopped before it had any to lose."""
    found = checkpoints(run_dir / "checkpoints")
    if found:
        return found[-1]
    if not (run_dir / "config.toml").exists():
        raise CheckpointError(f"run.resume: {run_dir} holds no run; leave out run.resume to start one")
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise CheckpointError(
            f"run.resume: {run_dir} has logged steps but its checkpoints/ is gone; start anew elsewhere"
        )
    return None


def _prepare(run_dir: Path, config: Config) -> Path | None:
    """Make run.dir ready; the checkpoint to go on from, if any."""
    newest = resume_point(run_dir) if config.run.resume else None
    if not config.run.resume and run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(f"run.dir: {run_dir} is not empty; set run.resume=true to go on, or choose another folder")
    step = int(newest.name.removeprefix("step_")) if newest else 0
    run_dir.mkdir(parents=True, exist_ok=True)
    drop_rows(run_dir / "metrics.jsonl", from_step=step)
    drop_rows(run_dir / "eval.jsonl", from_step=step + 1 if newest else 0)
    (run_dir / "config.toml").write_text(to_toml(config), "utf-8")
    return newest


def _learning_rate(config: Config) -> Any:
    optim = config.optim
    if optim.decay == "cosine":
        return warmup_then_cosine(optim.learning_rate, warmup=optim.warmup_steps, steps=config.run.steps)
    return lambda step: optim.learning_rate * min((step + 1) / max(optim.warmup_steps, 1), 1.0)


def _freeze_reference(engine: HFEngine, folder: Path) -> None:
    """The policy RL started from, written down so that a resumed run compares with the same one."""
    if folder.exists():
        engine.set_reference(model_in_folder(folder)[0])
        return
    engine.model.save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)
    engine.set_reference()


def _summary(
    config: Config, steps: int, before: Evaluation | None, after: Evaluation | None, seconds: Metrics
) -> dict[str, Any]:
    names = ("torch", "transformers", "tokenizers")
    return {
        "algorithm": config.algorithm.name,
        "env": config.task.env,
        "seed": config.run.seed,
        "steps": steps,
        "success_before": before.rate if before else None,
        "success_after": after.rate if after else None,
        "seconds": {name.removeprefix("time/"): round(value, 2) for name, value in seconds.items()},
        "versions": {"spear_rl": _version("spear-rl"), "python": platform.python_version()}
        | {name: _version(name) for name in names},
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads()},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from source"
