"""The verbs that train: a whole run, or a cold start alone; and the files they write."""

import json
import os
import platform
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spear_rl.app.build.cautions import RewardWatch, cautions
from spear_rl.app.build.rollout import Player, sampling_of, tasks_of
from spear_rl.app.build.training import algorithm_of, engine_of, policy_in_folder
from spear_rl.app.config import Config, resolved
from spear_rl.app.resume import CONFIG, Start, settings_text, start_of
from spear_rl.engines.base import NonFiniteLossError, TrainableEngine
from spear_rl.engines.device import chosen_device
from spear_rl.errors import ConfigError, UserError
from spear_rl.io.files import is_leftover, remove_folder, write_whole, writing
from spear_rl.io.jsonl import flush_rows, mend_rows
from spear_rl.io.lock import locked
from spear_rl.io.record import PACKAGES, RECORD, about, new_start, read_record, versions
from spear_rl.rollout.env import Task
from spear_rl.settings.fields import flat
from spear_rl.train.callbacks import Callback, Event
from spear_rl.train.checkpoint import MANIFEST, checked_manifest, remove_leftovers, write_folder
from spear_rl.train.cold_start import cold_start, warmup_then_cosine
from spear_rl.train.evaluate import Evaluation, evaluation, merged
from spear_rl.train.loop import MAX_WEIGHT, Trainer
from spear_rl.train.sampling_correction import corrected
from spear_rl.train.step import CollectFn, timed
from spear_rl.train.trackers import RunInfo, Trackers
from spear_rl.types import Metrics


def evaluated(
    config: Config, engine: TrainableEngine, player: Player, tasks: Sequence[Task], *, step: int, num_episodes: int = 1
) -> Evaluation:
    """Play `num_episodes` per task, with a random stream of its own."""
    sampling = sampling_of(config, temperature=config.eval.temperature)
    generator = engine.evaluation_generator(sampling, seed=config.run.seed + 7919)
    # One episode per task at a time bounds the memory.
    rounds = [
        player.groups(tasks, generator, group_size=1, step=step, max_turns=config.eval.max_turns)
        for _ in range(num_episodes)
    ]
    engine.sync()
    return evaluation(merged(rounds))


def train_from(config: Config, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """A whole run: cold start, RL, evaluations, checkpoints, metrics in `run.trackers`.

    Returns:
        The summary, which is also in run.dir/summary.json.
    """
    config = resolved(config)
    run_dir = Path(config.run.dir)
    settings, algorithm = settings_text(config, "train"), algorithm_of(config)
    trackers = Trackers(config.run.trackers, callbacks)
    with locked(run_dir), trackers.tracking():
        start = start_of(config, verb="train")
        panel, held_out = tasks_of(config, "train"), _held_out(config)
        if len(panel) < config.rollout.num_tasks:
            few = f"the train split has {len(panel)} tasks, fewer than rollout.num_tasks={config.rollout.num_tasks}"
            start.notes.append(f"{few}: a step plays some of them in more than one group")
        is_new = start.checkpoint is None
        start.notes.extend(cautions(config) if is_new else ())
        engine = engine_of(config, folder=start.checkpoint)
        with Player(config, engine.tokenizer, processor=engine.processor) as player:
            trainer = Trainer(
                run_dir=run_dir,
                engine=engine,
                algorithm=algorithm,
                collect=_collect(config, engine, player, panel),
                evaluate=lambda step: evaluated(config, engine, player, held_out, step=step) if held_out else None,
                learning_rate=_learning_rate(config),
                rng=random.Random(f"replay/{config.run.seed}"),
                num_minibatches=config.optim.num_minibatches,
                checkpoint_every=config.run.checkpoint_every,
                trajectories_every=config.run.trajectories_every,
                eval_every=config.eval.every,
                callbacks=[trackers, *callbacks, *([RewardWatch(config, callbacks)] if is_new else [])],
                settings=settings,
            )
            # A resume that fails leaves the folder as it was, so it is opened only after the state is restored.
            if start.checkpoint is None:
                _open(config, settings, start, trackers, callbacks)
            _prepare(config, trainer, player, panel, callbacks, start.checkpoint)
            if start.checkpoint is not None:
                _open(config, settings, start, trackers, callbacks)
            trainer.run(config.run.steps)
        summary = _summary(config, trainer.step, trainer.before, trainer.latest, trainer.seconds)
        _close(run_dir, summary)
    return summary


def _prepare(
    config: Config,
    trainer: Trainer,
    player: Player,
    panel: Sequence[Task],
    callbacks: Sequence[Callback],
    checkpoint: Path | None,
) -> None:
    """Bring the trainer to the start of RL or to its checkpoint, whose weights were loaded with the engine."""
    engine, reference = trainer.engine, trainer.run_dir / "reference"
    if checkpoint is None and config.sft.episodes:
        with timed("time/sft", trainer.seconds):
            cold_start_from(config, engine, player, panel, callbacks)
    engine.reset_optimizer(config.optim.learning_rate)
    if getattr(trainer.algorithm.loss, "kl", 0.0):
        if checkpoint is None:
            write_folder(reference, engine.save, {"step": 0})
        elif (reference / MANIFEST).exists():  # earlier versions wrote none
            checked_manifest(reference)
        engine.set_reference(policy_in_folder(config, reference))
    if checkpoint is not None:
        trainer.restore(checkpoint)


def sft_from(config: Config, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """A cold start alone: run.dir/model is the result, a plain transformers folder for engine.model."""
    config = resolved(config)
    if not config.sft.episodes:
        raise ConfigError("sft.episodes is 0: say how many expert episodes to learn from, e.g. sft.episodes=256")
    run_dir = Path(config.run.dir)
    settings, trackers = settings_text(config, "sft"), Trackers(config.run.trackers, callbacks)
    with locked(run_dir), trackers.tracking():
        start, held_out = start_of(config, verb="sft"), _held_out(config)
        start.notes.extend(cautions(config, with_rl=False))
        engine = engine_of(config)
        _open(config, settings, start, trackers, callbacks)
        seconds: Metrics = {}
        with Player(config, engine.tokenizer, processor=engine.processor) as player:
            before = evaluated(config, engine, player, held_out, step=0) if held_out else None
            with timed("time/sft", seconds):
                panel = tasks_of(config, "train")
                metrics = cold_start_from(config, engine, player, panel, [trackers, *callbacks])
            after = evaluated(config, engine, player, held_out, step=0) if held_out else None
        summary = _summary(config, 0, before, after, seconds) | {"algorithm": "sft", "loss": metrics["sft/loss"]}
        trackers(Event("end", 0))
        _close(run_dir, summary)
        write_folder(run_dir / "model", engine.save, {"step": 0, "settings": settings})  # last: it says all is done
    return summary


def _held_out(config: Config) -> Sequence[Task]:
    return tasks_of(config, config.eval.split, count=config.eval.tasks) if config.eval.tasks else []


def cold_start_from(
    config: Config, engine: TrainableEngine, player: Player, panel: Sequence[Task], callbacks: Sequence[Callback]
) -> Metrics:
    """Supervised learning on sft.episodes expert episodes of the training panel."""

    def tell(done: int, total: int, metrics: Metrics) -> None:
        for callback in callbacks:
            callback(Event("sft", done, total, metrics))

    engine.reset_optimizer(config.sft.learning_rate)
    try:
        metrics = cold_start(
            engine,
            player.demonstrations(panel, config.sft.episodes),
            epochs=config.sft.epochs,
            batch_size=config.sft.batch_size,
            learning_rate=config.sft.learning_rate,
            rng=random.Random(f"sft/{config.run.seed}"),
            on_update=tell,
        )
        engine.check_weights(MAX_WEIGHT)
    except NonFiniteLossError as error:
        raise UserError(f"cold start: {error}; lower sft.learning_rate (it is {config.sft.learning_rate:g})") from error
    return metrics


def _open(config: Config, settings: str, start: Start, trackers: Trackers, callbacks: Sequence[Callback]) -> None:
    """Prepare run.dir for writing and start the trackers, once settings and checkpoint are known to be sound."""
    run_dir, notes = Path(config.run.dir), list(start.notes)
    is_resumed = start.checkpoint is not None
    with writing(f"run.dir: {run_dir}"):
        for folder in (run_dir, run_dir / "checkpoints"):
            remove_leftovers(folder)
        for name in filter(is_leftover, os.listdir(run_dir)):
            (run_dir / name).unlink()
        if not is_resumed and (run_dir / "reference").is_dir():
            remove_folder(run_dir / "reference")
        notes += mend_rows(run_dir / "metrics.jsonl", from_step=start.step, complete=is_resumed)
        notes += mend_rows(run_dir / "eval.jsonl", from_step=start.step + 1 if is_resumed else 0)
        write_whole(run_dir / CONFIG, settings)
    record = read_record(run_dir)
    record["starts"].append(new_start(start.step))
    name, now = run_dir.absolute().name, about(record["starts"][-1])
    trackers.start(RunInfo(run_dir, name, config=flat(config), about=now, ids=record["trackers"]))
    _write_json(run_dir / RECORD, record)
    for text in notes:
        for callback in callbacks:
            callback(Event("note", start.step, text=text))


def _close(run_dir: Path, summary: dict[str, Any]) -> None:
    flush_rows(run_dir)
    _write_json(run_dir / "summary.json", summary)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def _learning_rate(config: Config) -> Any:
    optim = config.optim
    if optim.decay == "cosine":
        return warmup_then_cosine(optim.learning_rate, warmup=optim.warmup_steps, steps=config.run.steps)
    return lambda step: optim.learning_rate * min((step + 1) / max(optim.warmup_steps, 1), 1.0)


def _collect(config: Config, engine: TrainableEngine, player: Player, panel: Sequence[Task]) -> CollectFn:
    rollouts, cap = player.rollouts(panel, engine), config.engine.importance_cap
    return (lambda step: corrected(rollouts(step), engine, cap=cap)) if cap else rollouts


def _summary(
    config: Config, steps: int, before: Evaluation | None, after: Evaluation | None, seconds: Metrics
) -> dict[str, Any]:
    device = chosen_device(config.engine.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "algorithm": config.algorithm.name,
        "env": config.task.env,
        "seed": config.run.seed,
        "steps": steps,
        "success_before": before.rate if before else None,
        "success_after": after.rate if after else None,
        "seconds": {name.removeprefix("time/"): round(value, 2) for name, value in seconds.items()},
        "versions": versions(*PACKAGES),
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads(), "device": name},
    }
