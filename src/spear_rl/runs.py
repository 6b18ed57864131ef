"""The verbs that train: a whole run, a cold start; what they read and leave on disk."""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spear_rl.config import Config, resolved, to_toml
from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.place import chosen_device
from spear_rl.errors import CheckpointError, ConfigError, UserError
from spear_rl.playing import Player, sampling_of, tasks_of
from spear_rl.rollout.env import Task
from spear_rl.train.callbacks import Callback, Event, drop_rows
from spear_rl.train.checkpoint import checked_step, checkpoints
from spear_rl.train.cold_start import cold_start, warmup_then_cosine
from spear_rl.train.correction import corrected
from spear_rl.train.evaluate import Evaluation, evaluation, merged
from spear_rl.train.loop import TaskOrder, Trainer
from spear_rl.train.step import timed
from spear_rl.types import Group, Metrics
from spear_rl.versions import versions
from spear_rl.wiring import algorithm_of, engine_of, policy_in_folder


def evaluated(
    config: Config, engine: HFEngine, player: Player, tasks: Sequence[Task], *, step: int, num_episodes: int = 1
) -> Evaluation:
    """`num_episodes` of every task, a panel after the other, from a random stream of its own."""
    sampling = sampling_of(config, temperature=config.eval.temperature)
    generator = engine.evaluation_generator(sampling, seed=config.run.seed + 7919)
    # A panel at a time: all episodes at once would need as many times the memory.
    rounds = [
        player.groups(tasks, generator, group_size=1, step=step, max_turns=config.eval.max_turns)
        for _ in range(num_episodes)
    ]
    engine.sync()
    return evaluation(merged(rounds))


def train_from(config: Config, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """A whole run: cold start, RL, evaluations, checkpoints; its summary, which is also in run.dir/summary.json."""
    config = resolved(config)
    run_dir = Path(config.run.dir)
    newest = _starting_point(run_dir, config)
    panel = tasks_of(config, "train")
    held_out = tasks_of(config, config.eval.split, count=config.eval.tasks) if config.eval.tasks else []
    engine = engine_of(config, folder=newest)
    with Player(config, engine.tokenizer, processor=engine.processor) as player:
        return _trained(config, engine, player, panel, held_out, newest, callbacks)


def _trained(
    config: Config,
    engine: HFEngine,
    player: Player,
    panel: Sequence[Task],
    held_out: Sequence[Task],
    newest: Path | None,
    callbacks: Sequence[Callback],
) -> dict[str, Any]:
    run_dir = Path(config.run.dir)
    _open(run_dir, config, newest)
    order = TaskOrder(panel, num_tasks=config.rollout.num_tasks, seed=config.run.seed)
    seconds: Metrics = {}
    if newest is None and config.sft.episodes:
        with timed("time/sft", seconds):
            cold_start_from(config, engine, player, panel, callbacks)
    engine.reset_optimizer(config.optim.learning_rate)
    if config.algorithm.kl:
        _freeze_reference(config, engine, run_dir / "reference", is_new=newest is None)
    trainer = Trainer(
        run_dir=run_dir,
        engine=engine,
        algorithm=algorithm_of(config),
        collect=partial(_collected, config, engine, player, order),
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
    config = resolved(config)
    run_dir = Path(config.run.dir)
    _starting_point(run_dir, config)
    held_out = tasks_of(config, config.eval.split, count=config.eval.tasks) if config.eval.tasks else []
    engine = engine_of(config)
    _open(run_dir, config, None)
    seconds: Metrics = {}
    with Player(config, engine.tokenizer, processor=engine.processor) as player:
        before = evaluated(config, engine, player, held_out, step=0) if held_out else None
        with timed("time/sft", seconds):
            metrics = cold_start_from(config, engine, player, tasks_of(config, "train"), callbacks)
        after = evaluated(config, engine, player, held_out, step=0) if held_out else None
    engine.save(run_dir / "model")
    summary = _summary(config, 0, before, after, seconds) | {"algorithm": "sft", "loss": metrics["sft/loss"]}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def cold_start_from(
    config: Config, engine: HFEngine, player: Player, panel: Sequence[Task], callbacks: Sequence[Callback]
) -> Metrics:
    """Supervised learning on sft.episodes expert episodes of the training panel."""

    def tell(done: int, total: int, metrics: Metrics) -> None:
        for callback in callbacks:
            callback(Event("sft", done, total, metrics))

    engine.reset_optimizer(config.sft.learning_rate)
    try:
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
    except NonFiniteLossError as error:
        raise UserError(f"cold start: {error}; lower sft.learning_rate (it is {config.sft.learning_rate:g})") from error


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


def _starting_point(run_dir: Path, config: Config) -> Path | None:
    """The checkpoint to go on from, checked, or None for a new run; writes nothing."""
    newest = resume_point(run_dir) if config.run.resume else None
    if newest is not None:
        checked_step(newest)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run.dir: {run_dir} is a file; choose another folder")
    if not config.run.resume and run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(f"run.dir: {run_dir} is not empty; set run.resume=true to go on, or choose another folder")
    return newest


def _open(run_dir: Path, config: Config, newest: Path | None) -> None:
    """Make run.dir ready to be written to, once nothing can be wrong with the settings any more."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir: {run_dir} cannot be made: {error.strerror}; choose another folder") from error
    step = checked_step(newest) if newest else 0
    drop_rows(run_dir / "metrics.jsonl", from_step=step)
    drop_rows(run_dir / "eval.jsonl", from_step=step + 1 if newest else 0)
    (run_dir / "config.toml").write_text(to_toml(config), "utf-8")


def _learning_rate(config: Config) -> Any:
    optim = config.optim
    if optim.decay == "cosine":
        return warmup_then_cosine(optim.learning_rate, warmup=optim.warmup_steps, steps=config.run.steps)
    return lambda step: optim.learning_rate * min((step + 1) / max(optim.warmup_steps, 1), 1.0)


def _collected(config: Config, engine: HFEngine, player: Player, order: TaskOrder, step: int) -> list[Group]:
    """A step's episodes, as the trainer should learn from them."""
    groups = player.groups(order(step), engine, group_size=config.rollout.group_size, step=step)
    return corrected(groups, engine, cap=config.engine.importance_cap) if config.engine.importance_cap else groups


def _freeze_reference(config: Config, engine: HFEngine, folder: Path, *, is_new: bool) -> None:
    """The policy RL started from, written down so that a resumed run compares with the same one."""
    if is_new:
        engine.save(folder)
    engine.set_reference(policy_in_folder(config, folder))


def _summary(
    config: Config, steps: int, before: Evaluation | None, after: Evaluation | None, seconds: Metrics
) -> dict[str, Any]:
    return {
        "algorithm": config.algorithm.name,
        "env": config.task.env,
        "seed": config.run.seed,
        "steps": steps,
        "success_before": before.rate if before else None,
        "success_after": after.rate if after else None,
        "seconds": {name.removeprefix("time/"): round(value, 2) for name, value in seconds.items()},
        "versions": versions("torch", "transformers", "tokenizers"),
        "hardware": _hardware(config),
    }


def _hardware(config: Config) -> dict[str, Any]:
    device = chosen_device(config.engine.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"machine": platform.machine(), "threads": torch.get_num_threads(), "device": name}
