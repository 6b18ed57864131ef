"""The training loop: RL steps, evaluations, checkpoints. Its parts come as arguments; it reads no configuration."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from spear_rl.algorithms.base import Algorithm
from spear_rl.engines.base import NonFiniteLossError, TrainableEngine
from spear_rl.errors import DiskError, ShortOfMemoryError, UserError
from spear_rl.io.jsonl import flush_rows
from spear_rl.io.signals import Stop, Stopped
from spear_rl.replay.buffer import Replay
from spear_rl.train.callbacks import Callback, Event
from spear_rl.train.checkpoint import checkpoints, load_state, save_checkpoint
from spear_rl.train.episode_files import TRAJECTORIES, BufferLog, DrawLog, step_file, write_trajectories
from spear_rl.train.evaluate import Evaluation
from spear_rl.train.step import CollectFn, note_families, timed, train_step
from spear_rl.train.stored_state import restoring
from spear_rl.types import Group, Metrics

MAX_WEIGHT = 1e4
"""A policy with a larger weight, or ten times the largest it started with, has diverged and is not saved."""

WriteEpisodes = Callable[[int, Sequence[Group], Sequence[Sequence[float]], Sequence[Sequence[str]]], None]
"""Records the episodes of a step, with one advantage per turn and why a turn does not train."""

METRICS = {
    "time/step": "Seconds of the whole step, evaluations and checkpoints not included.",
    "time/eval": "Seconds spent on evaluations so far; in summary.json under seconds.",
    "policy/learning_rate": "The learning rate of this step.",
    "rollout/by_family": "Success of each group of fresh tasks, per family; in metrics.jsonl only.",
}
"""What a `Trainer` adds to those of `train_step`."""


@runtime_checkable
class StatefulCollect(Protocol):
    """A `collect` with a state that a checkpoint holds; a state that it gave does not change later."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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
    stop: Stop = field(default_factory=Stop)
    write_episodes: WriteEpisodes | None = None
    """E.g. `EpisodeWriter.write`; JSON lines if None."""
    _evaluated_step: int = field(default=-1, init=False)
    _saved_step: int = field(default=-1, init=False)
    """-1 also if the checkpoint lacks its evaluation."""
    _before_step: dict[str, Any] | None = field(default=None, init=False)
    """`_played_state` before the episodes that are being played."""
    _draw_log: DrawLog = field(init=False)
    _buffer_log: BufferLog = field(init=False)

    def __post_init__(self) -> None:
        max_age = self.algorithm.imitation.buffer.max_age if self.algorithm.imitation else 0
        is_complete = self.write_episodes is not None and self.trajectories_every == 1  # it has every text already
        has_texts = bool(self.trajectories_every) and not is_complete
        self._buffer_log = BufferLog(self.run_dir)
        self._draw_log = DrawLog(self.run_dir, has_texts=has_texts, max_age=max_age)

    def run(self, steps: int) -> None:
        """Continue until `steps` steps are done, or until a stop: then the last whole step is saved."""
        try:
            self._run_or_stop(steps)
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
        return f"{self._saved()}: go on with run.resume=true"

    def _saved(self) -> str:
        saved: list[Path] = []
        with suppress(OSError):
            saved = checkpoints(self.run_dir / "checkpoints")
        if not saved:
            return "No checkpoint was saved yet"
        behind = self.step - int(saved[-1].name.removeprefix("step_"))
        lost = f"steps since then ({behind}) are taken again" if behind > 0 else "nothing is lost"
        return f"{saved[-1].name} is saved, {lost}"

    def _run_or_stop(self, steps: int) -> None:
        stopped: Stopped | None = None
        try:
            with self.stop.finished():
                self._run(steps)
        except Stopped as error:
            stopped = error
        if stopped:  # outside of the handler: a failure to save is one of its own
            self._save_stopped(stopped)
            raise stopped

    def _run(self, steps: int) -> None:
        while True:
            is_end = self.step in (0, steps)
            is_due = is_end or (self.eval_every and self.step % self.eval_every == 0)
            if is_due and self._evaluated_step != self.step:
                self._evaluate()
            if self._saved_step != self.step and (is_end or self.step % self.checkpoint_every == 0):
                self.save()
            if self.step == steps:
                break
            self._take_step(steps)
        self._notify(Event("end", self.step, steps))

    def _take_step(self, steps: int) -> None:
        step = self.step
        path, drawn = step_file(self.run_dir, TRAJECTORIES, step), list[Replay]()
        is_dumped = self.trajectories_every and step % self.trajectories_every == 0
        write = partial(self.write_episodes, step) if self.write_episodes else partial(write_trajectories, path)
        by_family: dict[str, list[float]] = {}
        imitation = self.algorithm.imitation
        if imitation:
            self._buffer_log.begin(imitation.buffer)
        self.engine.set_learning_rate(self.learning_rate(step))
        metrics: Metrics = {}
        with timed("time/step", metrics):
            metrics |= train_step(
                step,
                collect=self._played if self.stop.is_armed else self.collect,
                algorithm=self.algorithm,
                engine=self.engine,
                rng=self.rng,
                num_minibatches=self.num_minibatches,
                minibatch_rows=self.minibatch_rows,
                epochs=self.epochs,
                on_played=partial(note_families, by_family, write if is_dumped else None),
                on_drawn=drawn.append,
            )
        self._draw_log.write(step, drawn)
        if imitation:
            self._buffer_log.write(step, imitation.buffer)
        for name in ("time/step", "time/rollout", "time/update"):
            self.seconds[name] = self.seconds.get(name, 0.0) + metrics[name]
        self.step += 1
        told: dict[str, Any] = metrics | {"policy/learning_rate": self.learning_rate(step)}
        self._notify(Event("step", step, steps, told | ({"rollout/by_family": by_family} if by_family else {})))

    def _played(self, step: int) -> list[Group]:
        """The episodes of a step; a stop abandons them, as they change nothing but `_played_state`."""
        self._before_step = self._played_state()
        with self.stop.abandoned():
            groups = self.collect(step)
        self._before_step = None
        return groups

    def _played_state(self) -> dict[str, Any]:
        """What playing episodes changes, by reference where it does not: the random streams, and what was played."""
        state: dict[str, Any] = {"engine": self.engine.state_dict(), "torch_rng": torch.get_rng_state()}
        if isinstance(self.collect, StatefulCollect) and (own := self.collect.state_dict()):
            state["collect"] = own
        return state

    def _evaluate(self) -> None:
        spent: Metrics = {}
        with timed("time/eval", spent), self.stop.abandoned():
            found = self.evaluate(self.step)
        self.seconds["time/eval"] = self.seconds.get("time/eval", 0.0) + spent["time/eval"]
        if found is None:
            return
        self.latest, self._evaluated_step, self._saved_step = found, self.step, -1
        if self.step == 0:
            self.before = found
        self._notify(Event("eval", self.step, metrics=found.as_dict()))

    def _notify(self, event: Event) -> None:
        for callback in self.callbacks:
            callback(event)

    def _save_stopped(self, stopped: Stopped) -> None:
        """Save the last whole step, unless it is saved or a second signal gave it up; say where the run stopped."""
        if stopped.at_once:
            stopped.place = f"stopped at once in step {self.step}: {self._saved()}"
        elif self.step == 0 and self._saved_step != 0:
            stopped.place = "stopped before the first step"
        else:
            if self._saved_step != self.step:
                self.save()
            stopped.place = f"stopped at step {self.step}"

    def save(self) -> None:
        """Write everything needed to resume bit for bit, unless the policy has diverged."""
        with self.stop.shielded():
            self._save()

    def _save(self) -> None:
        self.engine.check_weights(MAX_WEIGHT)
        state: dict[str, Any] = {
            **(self._before_step or self._played_state()),
            "algorithm": self.algorithm.state_dict(),
            "rng": list(self.rng.getstate()),
            "seconds": self.seconds,
            "before": self.before.as_dict() if self.before else None,
            "latest": self.latest.as_dict() if self.latest else None,
            "evaluated_step": self._evaluated_step,
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
        self._saved_step = self.step
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
            if isinstance(self.collect, StatefulCollect):
                self.collect.load_state_dict(state.get("collect", {}))
            self.seconds = state["seconds"]
            self.before = Evaluation(**state["before"]) if state["before"] else None
            self.latest = Evaluation(**state["latest"]) if state["latest"] else None
            # Earlier versions saved only after an evaluation that was due.
            self._evaluated_step = int(state.get("evaluated_step", step if self.latest else -1))
        self.step = self._saved_step = step
