"""The verbs that train: a whole run, or a cold start alone; and the files they write."""

import json
import os
import platform
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spear_rl.app.build.cautions import RewardWatch, cautions
from spear_rl.app.build.rollout import Player, counted, episodes_in, eval_sampling_of, tasks_of
from spear_rl.app.build.training import algorithm_of, engine_of, policy_in_folder
from spear_rl.app.build.warnings import RunWatch
from spear_rl.app.config import Config, resolved
from spear_rl.app.resume import CONFIG, Start, resumes, settings_text, start_of
from spear_rl.engines.base import NonFiniteLossError, TrainableEngine
from spear_rl.engines.device import chosen_device
from spear_rl.engines.generation.choice import Choice
from spear_rl.engines.models.hub import used_commits
from spear_rl.errors import ConfigError, MissingExtraError, UserError
from spear_rl.io.files import is_leftover, remove_folder, write_whole, writing
from spear_rl.io.jsonl import flush_rows, mend_rows
from spear_rl.io.lock import locked
from spear_rl.io.record import PACKAGES, RECORD, about, new_start, read_record, versions
from spear_rl.io.signals import Stop
from spear_rl.rollout.env import Task
from spear_rl.settings.fields import flat
from spear_rl.train.callbacks import WARNINGS, Callback, Event
from spear_rl.train.checkpoint import (
    COLD_START,
    MANIFEST,
    checked_manifest,
    discard_cold_start,
    remove_leftovers,
    write_folder,
)
from spear_rl.train.cold_start import ColdStart, seed_replay, warmup_then_cosine
from spear_rl.train.critic import critic_engine
from spear_rl.train.episode_files import BUFFER, DRAWS, EVALUATIONS, TRAJECTORIES, remove_later, write_evaluation
from spear_rl.train.evaluate import Evaluation, evaluation, merged
from spear_rl.train.loop import MAX_WEIGHT, Trainer, WriteEpisodes
from spear_rl.train.sampling_correction import corrected
from spear_rl.train.step import CollectFn
from spear_rl.train.trackers import RunInfo, Trackers
from spear_rl.types import Group, Metrics


def evaluated(
    config: Config, engine: TrainableEngine, player: Player, tasks: Sequence[Task], *, step: int,
    on_played: Callable[[list[Group]], object] | None = None,
) -> Evaluation:  # fmt: skip
    """Success on `tasks`, of eval.samples episodes each; `on_played` is called with the episodes."""
    groups = played(config, engine, player, tasks, step=step, num_episodes=config.eval.samples)
    if on_played:
        on_played(groups)
    return evaluation(groups, k=config.eval.samples)


def played(
    config: Config, engine: TrainableEngine, player: Player, tasks: Sequence[Task], *, step: int, num_episodes: int
) -> list[Group]:
    """`num_episodes` per task, sampled as evaluations are, with a random stream of its own."""
    generator = engine.evaluation_generator(eval_sampling_of(config), seed=config.run.seed + 7919)
    # At once no more than in a training step, which bounds the memory, but at least one episode per task.
    most = max(config.rollout.num_tasks * config.rollout.group_size // max(len(tasks), 1), 1)
    rounds = [
        player.groups(tasks, generator, group_size=size, step=step, max_turns=config.eval.max_turns)
        for size in (min(most, num_episodes - done) for done in range(0, num_episodes, most))
    ]
    engine.sync()
    return merged(rounds)


def train_from(config: Config, callbacks: Sequence[Callback] = (), *, stop: Stop | None = None) -> dict[str, Any]:
    """A whole run: cold start, RL, evaluations, checkpoints, metrics in `run.trackers`.

    Args:
        stop: asks for a stop, which raises Stopped once the last whole step is saved; e.g. of `stop_on_signals`.

    Returns:
        The summary, which is also in run.dir/summary.json.
    """
    config, stop = counted(resolved(config)), stop or Stop()
    config.run.resume = resumes(config)
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
        choices: list[Choice] = []
        engine = engine_of(config, folder=start.checkpoint or start.cold_start, on_choice=choices.append)
        if algorithm.critic:
            critic_engine(engine)  # refuses before the cold start, not after it
        with Player(config, engine.tokenizer, processor=engine.processor) as player:
            trainer = Trainer(
                run_dir=run_dir,
                engine=engine,
                algorithm=algorithm,
                collect=_collect(config, engine, player, panel),
                evaluate=lambda step: _evaluated(config, engine, player, held_out, step, f"step_{step:06d}"),
                learning_rate=_learning_rate(config),
                rng=random.Random(f"replay/{config.run.seed}"),
                num_minibatches=config.optim.num_minibatches,
                minibatch_rows=config.optim.minibatch_rows,
                epochs=config.optim.epochs,
                checkpoint_every=config.run.checkpoint_every,
                trajectories_every=config.run.trajectories_every,
                write_episodes=_episode_writer(config, engine.tokenizer),
                eval_every=config.eval.every,
                callbacks=[
                    trackers,
                    *callbacks,
                    partial(_discard_after_checkpoint, run_dir),
                    *([RewardWatch(config, callbacks)] if is_new else []),
                    RunWatch(config, run_dir, [trackers, *callbacks]),
                ],
                settings=settings,
                stop=stop,
            )
            # A resume that fails leaves the folder as it was, so it is opened only after the state is restored.
            if start.checkpoint is None:
                cold = _cold_start(config, engine, start, settings, stop)
                _open(config, settings, start, trackers, callbacks, choices)
                if config.sft.episodes:
                    cold_start_from(config, cold, player, panel, callbacks)
                    trainer.seconds["time/sft"] = cold.seconds
            _prepare(config, trainer, start.checkpoint)
            if start.checkpoint is not None:
                _open(config, settings, start, trackers, callbacks, choices)
            trainer.run(config.run.steps)
        summary = _summary(config, trainer.step, trainer.before, trainer.latest, trainer.seconds)
        _close(run_dir, summary)
    return summary


def _episode_writer(config: Config, tokenizer: Any) -> WriteEpisodes | None:
    """Records episodes as parquet; None for JSON lines, or where none are kept."""
    if not config.run.trajectories_every or config.run.trajectories_format == "jsonl":
        return None
    try:
        from spear_rl.io.episodes.parts import EpisodeWriter
    except ImportError as error:
        raise MissingExtraError(
            "run.trajectories_format=parquet needs pyarrow: pip install 'spear-rl[train]', or say jsonl"
        ) from error

    def pieces(ids: list[int]) -> list[str]:
        tokens, texts = tokenizer.convert_ids_to_tokens(ids), tokenizer.batch_decode([[number] for number in ids])
        # A tokenizer that marks spaces so drops one at the beginning of a text, and every token is one here.
        begins = [isinstance(token, str) and token.startswith("\u2581") for token in tokens]
        return [f" {text.lstrip(' ')}" if space else text for text, space in zip(texts, begins, strict=True)]

    folder = Path(config.run.dir) / TRAJECTORIES
    return EpisodeWriter(folder, config.run.trajectories_max_mb * 10**6, pieces).write


def _prepare(config: Config, trainer: Trainer, checkpoint: Path | None) -> None:
    """Bring the trainer to the start of RL or to its checkpoint, whose weights were loaded with the engine."""
    engine, reference = trainer.engine, trainer.run_dir / "reference"
    engine.reset_optimizer(config.optim.learning_rate)
    if critic := trainer.algorithm.critic:
        critic_engine(engine).hold_critic(critic.learning_rate or config.optim.learning_rate)
    if getattr(trainer.algorithm.loss, "kl", 0.0):
        if checkpoint is None:
            write_folder(reference, engine.save, {"step": 0})
        elif (reference / MANIFEST).exists():  # earlier versions wrote none
            checked_manifest(reference)
        engine.set_reference(policy_in_folder(config, reference))
    if checkpoint is not None:
        trainer.restore(checkpoint)
    elif (imitation := trainer.algorithm.imitation) and (path := config.algorithm.imitation.from_):
        seed_replay(imitation, episodes_in(config, path, engine.tokenizer, key="algorithm.imitation.from"), engine)


def sft_from(config: Config, callbacks: Sequence[Callback] = (), *, stop: Stop | None = None) -> dict[str, Any]:
    """A cold start alone: run.dir/model is the result, a plain transformers folder for engine.model.

    Args:
        stop: as for `train_from`; the last whole update is saved.
    """
    config, stop = counted(resolved(config)), stop or Stop()
    config.run.resume = resumes(config)
    if not config.sft.episodes:
        raise ConfigError(
            "sft.episodes is 0: say how many expert episodes to learn from, e.g. sft.episodes=256, or sft.from"
        )
    run_dir = Path(config.run.dir)
    settings, trackers = settings_text(config, "sft"), Trackers(config.run.trackers, callbacks)
    with locked(run_dir), trackers.tracking():
        start, held_out = start_of(config, verb="sft"), _held_out(config)
        start.notes.extend(cautions(config, with_rl=False))
        choices: list[Choice] = []
        engine = engine_of(config, folder=start.cold_start, on_choice=choices.append)
        cold = _cold_start(config, engine, start, settings, stop)
        _open(config, settings, start, trackers, callbacks, choices)
        with Player(config, engine.tokenizer, processor=engine.processor) as player:
            if cold.before is None:
                cold.before = _evaluated(config, engine, player, held_out, 0, "sft_before")
            cold_start_from(config, cold, player, tasks_of(config, "train"), [trackers, *callbacks])
            after = _evaluated(config, engine, player, held_out, 0, "sft_after")
        with stop.shielded():
            summary = _summary(config, 0, cold.before, after, {"time/sft": cold.seconds})
            summary |= {"algorithm": "sft", "loss": cold.metrics["sft/loss"]}
            trackers(Event("end", 0))
            _close(run_dir, summary)
            write_folder(run_dir / "model", engine.save, {"step": 0, "settings": settings})  # last: it says all is done
            discard_cold_start(run_dir)
    return summary


def _evaluated(
    config: Config, engine: TrainableEngine, player: Player, panels: Mapping[str, Sequence[Task]], step: int, name: str
) -> Evaluation | None:
    """An evaluation of a run on its panels by split, if it has any; the episodes are kept under `name`."""
    found: dict[str, Evaluation] = {}
    for split, tasks in panels.items():
        prefix = "" if split == config.eval.split else "also_" + re.sub(r"[^\w.-]", "_", f"{split[:100]}_")
        path = Path(config.run.dir) / EVALUATIONS / f"{prefix}{name}.jsonl"
        keep = partial(write_evaluation, path, step=step, split=split)
        on_played = keep if config.run.trajectories_every else None
        found[split] = evaluated(config, engine, player, tasks, step=step, on_played=on_played)
    main = found.pop(config.eval.split, None)
    also = {split: other.rate | {"reward": other.reward, "turns": other.turns} for split, other in found.items()}
    return replace(main, also=also) if main else None


def _held_out(config: Config) -> dict[str, Sequence[Task]]:
    """Split -> its tasks to evaluate on: that of eval.split first."""
    asked = {config.eval.split: "eval.split"} | dict.fromkeys(config.eval.also, "eval.also")
    count = config.eval.tasks
    return {split: tasks_of(config, split, count=count, key=key) for split, key in asked.items()} if count else {}


def _cold_start(config: Config, engine: TrainableEngine, start: Start, settings: str, stop: Stop) -> ColdStart:
    """A cold start to begin, or to go on with from its checkpoint, whose weights were loaded with the engine."""
    folder, seconds = Path(config.run.dir) / COLD_START, config.sft.checkpoint_seconds
    cold = ColdStart(folder, engine, MAX_WEIGHT, settings=settings, checkpoint_seconds=seconds, stop=stop)
    engine.reset_optimizer(config.sft.learning_rate)
    if start.cold_start is not None:
        cold.restore(start.cold_start)
    return cold


def cold_start_from(
    config: Config, cold: ColdStart, player: Player, panel: Sequence[Task], callbacks: Sequence[Callback]
) -> None:
    """Supervised learning on sft.episodes expert episodes of the training panel."""

    def tell(done: int, total: int, metrics: Metrics) -> None:
        for callback in callbacks:
            callback(Event("sft", done, total, metrics))

    try:
        cold.run(
            lambda: player.demonstrations(panel, config.sft.episodes),
            epochs=config.sft.epochs,
            batch_size=config.sft.batch_size,
            learning_rate=config.sft.learning_rate,
            rng=random.Random(f"sft/{config.run.seed}"),
            on_update=tell,
        )
    except NonFiniteLossError as error:
        raise UserError(f"cold start: {error}; lower sft.learning_rate (it is {config.sft.learning_rate:g})") from error


def _discard_after_checkpoint(run_dir: Path, event: Event) -> None:
    """A callback: the checkpoint of a cold start goes once there is one of RL."""
    if event.kind == "checkpoint":
        discard_cold_start(run_dir)


def _open(
    config: Config, settings: str, start: Start, trackers: Trackers, callbacks: Sequence[Callback],
    choices: Sequence[Choice],
) -> None:  # fmt: skip
    """Prepare run.dir for writing and start the trackers, once settings and checkpoint are known to be sound."""
    run_dir, notes = Path(config.run.dir), [*start.notes, *(choice.sentence for choice in choices)]
    is_resumed = start.checkpoint is not None
    with writing(f"run.dir: {run_dir}"):
        for folder in (run_dir, run_dir / "checkpoints", run_dir / COLD_START):
            remove_leftovers(folder)
        for name in filter(is_leftover, os.listdir(run_dir)):
            (run_dir / name).unlink()
        if not is_resumed and (run_dir / "reference").is_dir():
            remove_folder(run_dir / "reference")
        if is_resumed:
            discard_cold_start(run_dir)
        notes += mend_rows(run_dir / "metrics.jsonl", from_step=start.step, complete=is_resumed)
        notes += mend_rows(run_dir / "eval.jsonl", from_step=start.eval_step)
        for name in (DRAWS, BUFFER, WARNINGS):
            notes += mend_rows(run_dir / name, from_step=start.step)
        remove_later(run_dir, start.step, eval_step=start.eval_step)
        write_whole(run_dir / CONFIG, settings)
    record = read_record(run_dir)
    record["starts"].append(new_start(start.step) | {"threads": torch.get_num_threads()})
    if commits := record.get("models", {}) | used_commits():
        record["models"] = commits
    for choice in choices:
        record["generator"] = asdict(choice)
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
    cap = config.engine.importance_cap
    return player.rollouts(panel, engine, corrected=partial(corrected, engine=engine, cap=cap) if cap else None)


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
        **({"also_after": after.also} if after and after.also else {}),
        "seconds": {name.removeprefix("time/"): round(value, 2) for name, value in seconds.items()},
        "versions": versions(*PACKAGES),
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads(), "device": name},
    }
