"""The training loop: RL steps, evaluations, checkpoints. Its parts come as arguments; it reads no configuration."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spear_rl.algorithms.base import Algorithm, Replay
from spear_rl.engines.base import NonFiniteLossError, TrainableEngine
from spear_rl.errors import DiskError, ShortOfMemoryError, UserError
from spear_rl.io.jsonl import flush_rows
from spear_rl.train.callbacks import Callback, Event
from spear_rl.train.checkpoint import checkpoints, load_state, save_checkpoint
from spear_rl.train.episode_files import TRAJECTORIES, DrawLog, step_file, write_trajectories
from spear_rl.train.evaluate import Evaluation
from spear_rl.train.step import CollectFn, timed, train_step
from spear_rl.train.stored_state import restoring
from spear_rl.types import Metrics

MAX_WEIGHT = 1e4
"""A policy with a larger weight, or ten times the largest it started with, has diverged and is not saved."""

METRICS = {
    "time/step": "Seconds of the whole step, evaluations and checkpoints not included.",
    "time/eval": "Seconds spent on evaluations so far; in summary.json under seconds.",
    "policy/learning_rate": "The learning rate of this step.",
}
"""What a `Trainer` adds to those of `train_step`."""


@dataclass
class Trainer:
    """One run: its parts and its progress."""

    run_dir: Path
    engine: TrainableEngine
    algorithm: Algorithm
    collect: CollectFn
    evaluate: Callable[[int], Evaluation | None]
    learning_rate: Callable[[int], float]
    rng: random.Random
    num_minibatches: int = 1
    minibatch_rows: int = 0
    epochs: int = 1
    checkpoint_every: int = 10
    trajectories_every: int = 0
    eval_every: int = 0
    callbacks: Sequence[Callback] = ()
    step: int = 0
    """The next step to take."""
    before: Evaluation | None = None
    """Of the policy before RL."""
    latest: Evaluation | None = None
    seconds: Metrics = field(default_factory=dict)
    settings: str = ""
    """The run's settings as TOML, for its checkpoints."""
    _evaluated_step: int = field(default=-1, init=False)
    _draw_log: DrawLog = field(init=False)

    def __post_init__(self) -> None:
        max_age = self.algorithm.imitation.buffer.max_age if self.algorithm.imitation else 0
        self._draw_log = DrawLog(self.run_dir, has_texts=bool(self.trajectories_every), max_age=max_age)

    def run(self, steps: int) -> None:
        """Continue until `steps` steps are done."""
        try:
            self._run(steps)
        except ShortOfMemoryError as error:
            raise ShortOfMemoryError(f"step {self.step}: {error}. {self._way_back()} and the new setting") from error
        except DiskError as error:
            raise DiskError(f"step {self.step}: {error}; free space or restore access. {self._way_back()}") from error
        except NonFiniteLossError as error:
            rate = self.learning_rate(max(self.step - 1, 0))
            raise UserError(
                f"step {self.step}: {error}. {self._way_back()} and a smaller optim.learning_rate (it is {rate:g}); if "
                "that policy is spoilt too, delete it to go on from the one before"
            ) from error

    def _way_back(self) -> str:
        """What is saved after a failure, and how to continue."""
        saved: list[Path] = []
        with suppress(OSError):
            saved = checkpoints(self.run_dir / "checkpoints")
        if not saved:
            return "No checkpoint was saved yet: begin again with run.resume=true"
        behind = self.step - int(saved[-1].name.removeprefix("step_"))
        lost = f"steps since then ({behind}) are taken again" if behind > 0 else "nothing is lost"
        return f"{saved[-1].name} is saved, {lost}: go on with run.resume=true"

    def _run(self, steps: int) -> None:
        is_new = self.step == 0 and not checkpoints(self.run_dir / "checkpoints")
        if self.step == 0 and self.before is None:
            self._evaluate()
            self.before = self.latest
        if is_new:
            self.save()
        while self.step < steps:
            self._take_step(steps)
            is_last = self.step == steps
            if is_last or (self.eval_every and self.step % self.eval_every == 0):
                self._evaluate()
            if is_last or self.step % self.checkpoint_every == 0:
                self.save()
        self._notify(Event("end", self.step, steps))

    def _take_step(self, steps: int) -> None:
        step = self.step
        path, drawn = step_file(self.run_dir, TRAJECTORIES, step), list[Replay]()
        is_dumped = self.trajectories_every and step % self.trajectories_every == 0
        self.engine.set_learning_rate(self.learning_rate(step))
        metrics: Metrics = {}
        with timed("time/step", metrics):
            metrics |= train_step(
                step,
                collect=self.collect,
                algorithm=self.algorithm,
                engine=self.engine,
                rng=self.rng,
                num_minibatches=self.num_minibatches,
                minibatch_rows=self.minibatch_rows,
                epochs=self.epochs,
                on_played=partial(write_trajectories, path) if is_dumped else None,
                on_drawn=drawn.append,
            )
        self._draw_log.write(step, drawn)
        for name in ("time/step", "time/rollout", "time/update"):
            self.seconds[name] = self.seconds.get(name, 0.0) + metrics[name]
        self.step += 1
        self._notify(Event("step", step, steps, metrics | {"policy/learning_rate": self.learning_rate(step)}))

    def _evaluate(self) -> None:
        spent: Metrics = {}
        with timed("time/eval", spent):
            self.latest = self.evaluate(self.step)
        self.seconds["time/eval"] = self.seconds.get("time/eval", 0.0) + spent["time/eval"]
        self._evaluated_step = self.step
        if self.latest is not None:
            self._notify(Event("eval", self.step, metrics=self.latest.as_dict()))

    def _notify(self, event: Event) -> None:
        for callback in self.callbacks:
            callback(event)

    def save(self) -> None:
        """Write everything needed to resume bit for bit, unless the policy has diverged."""
        self.engine.check_weights(MAX_WEIGHT)
        state: dict[str, Any] = {
            "engine": self.engine.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "rng": list(self.rng.getstate()),
            "torch_rng": torch.get_rng_state(),
            "seconds": self.seconds,
            "before": self.before.as_dict() if self.before else None,
            "latest": self.latest.as_dict() if self.latest else None,
        }
        flush_rows(self.run_dir)
        save_checkpoint(
            self.run_dir / "checkpoints",
            step=self.step,
            save_model=self.engine.save,
            state=state,
            settings=self.settings,
            evaluation=self.latest.rate if self.latest and self._evaluated_step == self.step else None,
        )
        self._notify(Event("checkpoint", self.step))

    def restore(self, checkpoint: Path) -> None:
        """Load a checkpoint's state; its weights were loaded with the engine."""
        step, state = load_state(checkpoint)
        with restoring(checkpoint):
            if (state["algorithm"]["imitation"] is None) != (self.algorithm.imitation is None):
                raise ValueError("one has a replay buffer and the other has none")
            self.engine.load_state_dict(state["engine"])
            self.algorithm.load_state_dict(state["algorithm"])
            version, internal, gauss = state["rng"]
            self.rng.setstate((version, tuple(internal), gauss))
            torch.set_rng_state(state["torch_rng"])
            self.seconds = state["seconds"]
            self.before = Evaluation(**state["before"]) if state["before"] else None
            self.latest = Evaluation(**state["latest"]) if state["latest"] else None
        self.step = step
