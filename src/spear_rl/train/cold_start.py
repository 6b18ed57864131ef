"""The cold start: supervised learning on expert episodes, with the same rows and engine as RL, and its checkpoints."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spear_rl.algorithms.base import SelfImitation
from spear_rl.engines.base import Term, TrainableEngine
from spear_rl.functional.losses import LossInputs, LossOutput, token_mean
from spear_rl.io.signals import Stop, Stopped
from spear_rl.replay.buffer import Remembered, surprisal, unfit_reason
from spear_rl.rollout.agents.records import Recorded
from spear_rl.train.checkpoint import load_state, save_checkpoint
from spear_rl.train.evaluate import Evaluation
from spear_rl.train.sampling_correction import corrected
from spear_rl.train.step import collate
from spear_rl.train.stored_state import restoring
from spear_rl.types import Group, Metrics, Trajectory

METRICS = {
    "sft/loss": "Minus the mean log-probability of the expert's tokens of this update of the cold start.",
    "sft/grad_norm": "Norm of the gradient of this update of the cold start, before clipping to optim.max_grad_norm.",
    "sft/sampler_gap": "Minus the mean log-probability in the first update, as no policy sampled the expert's tokens.",
    "time/sft": "Seconds of the cold start; in summary.json under seconds.",
}
"""What the updates of a cold start report."""


def imitation_loss(inputs: LossInputs) -> LossOutput:
    """Minus the mean log-probability of the expert's tokens."""
    return LossOutput(-token_mean(inputs.logprobs, inputs.mask), {})


def warmup_then_cosine(peak: float, *, warmup: int, steps: int) -> Callable[[int], float]:
    """Linear to `peak` over `warmup` steps, then half a cosine to a tenth of it at `steps`."""

    def at(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

    return at


def cold_start(
    engine: TrainableEngine,
    demonstrations: Sequence[Trajectory],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    rng: random.Random,
    num_done: int = 0,
    on_update: Callable[[int, int, Metrics], None] = lambda done, total, metrics: None,
) -> Metrics:
    """Train on every demonstration `epochs` times; the metrics of the last update.

    Args:
        rng: of the order, which is drawn again for the `num_done` updates that were made before.
    """
    total = epochs * math.ceil(len(demonstrations) / batch_size)
    rate = warmup_then_cosine(learning_rate, warmup=max(total // 10, 1), steps=total)
    metrics: Metrics = {}
    orders = [rng.sample(demonstrations, len(demonstrations)) for _ in range(epochs)]
    chosen = [order[start : start + batch_size] for order in orders for start in range(0, len(order), batch_size)]
    for number, episodes in enumerate(chosen[num_done:], start=num_done):
        batch = collate(episodes, [[1.0] * len(t.turns) for t in episodes], pad_id=engine.pad_id)
        if batch is None:
            continue
        engine.set_learning_rate(rate(number))
        metrics = engine.update([Term("sft", batch, imitation_loss)])
        on_update(number + 1, total, metrics)
    engine.sync()
    return metrics


def seed_replay(imitation: SelfImitation, found: Sequence[Recorded], engine: TrainableEngine) -> None:
    """Put the won episodes of a file into the buffer, as if they were played at step 0.

    Those without log-probabilities get the policy's, so that their ratios start at 1.
    """
    won = [recorded for recorded in found if recorded.trajectory.success]
    unknown = [recorded.trajectory for recorded in won if not recorded.has_logprobs]
    [scored] = corrected([Group("", unknown)], engine, cap=1.0)
    now = iter(scored.trajectories)
    kept = []
    for recorded in won:
        t = recorded.trajectory
        if not recorded.has_logprobs:
            turns = [replace(turn, completion=replace(turn.completion, weights=None)) for turn in next(now).turns]
            t = replace(t, turns=turns)
        dropped = [unfit_reason(turn) if imitation.skip_invalid else "" for turn in t.turns]
        count, known = len(t.turns), surprisal(t, dropped) if imitation.priority else 0.0
        parts = [1.0] * count, dropped, [0.0] * count
        kept.append(Remembered(t, *parts, recorded.family, recorded.task, surprisal=known))
    size_of = (lambda r: r.dropped.count("")) if imitation.unit == "turns" else (lambda r: 1)
    imitation.buffer.add(((r, r.trajectory.reward) for r in kept if not all(r.dropped)), 0, size_of=size_of)


@dataclass
class ColdStart:
    """How far a cold start is, and its checkpoints: by time, at a stop and at the end; only the newest is kept."""

    folder: Path
    engine: TrainableEngine
    max_weight: float
    """A policy with a larger weight has diverged and is not saved."""
    settings: str = ""
    """The run's settings as TOML."""
    checkpoint_seconds: float = 60.0
    stop: Stop = field(default_factory=Stop)
    num_done: int = 0
    total: int = 0
    """Updates in all; 0 before the first."""
    metrics: Metrics = field(default_factory=dict)
    """Of the last update."""
    before: Evaluation | None = None
    """Of the policy before it."""
    seconds: float = 0.0
    _saved: int = field(default=0, init=False)
    _counted_at: float = field(default=0.0, init=False)
    _next_save: float = field(default=0.0, init=False)

    @property
    def is_over(self) -> bool:
        return 0 < self.total == self.num_done

    def run(
        self,
        demonstrations: Callable[[], Sequence[Trajectory]],
        *,
        on_update: Callable[[int, int, Metrics], None],
        **settings: Any,
    ) -> None:
        """Make the updates that are left; see `cold_start` for the arguments."""
        if self.is_over:
            return
        self._counted_at = time.monotonic()
        collected = demonstrations()
        self._next_save = time.monotonic() + self.checkpoint_seconds

        def after_update(done: int, total: int, metrics: Metrics) -> None:
            on_update(done, total, metrics)
            self.num_done, self.total, self.metrics = done, total, metrics
            if self.stop.is_asked or self.is_over or time.monotonic() >= self._next_save:
                self.save()
            self.stop.check()

        try:
            with self.stop.finished():
                cold_start(self.engine, collected, num_done=self.num_done, on_update=after_update, **settings)
        except Stopped as stopped:
            what = f"update {self._saved} of {self.total} is saved" if self._saved else "nothing is saved yet"
            at_once = f"stopped at once in the cold start: {what}"
            whole = f"stopped in the cold start after update {self.num_done} of {self.total}"
            stopped.place = at_once if stopped.at_once else whole
            raise

    def save(self) -> None:
        """Write everything needed to go on bit for bit; the order of the demonstrations follows from the seed."""
        start = time.monotonic()
        with self.stop.shielded():
            self.engine.check_weights(self.max_weight)
            self.seconds += start - self._counted_at
            self._counted_at = start
            state = {
                "engine": self.engine.state_dict(),
                "torch_rng": torch.get_rng_state(),
                "total": self.total,
                "metrics": self.metrics,
                "before": self.before.as_dict() if self.before else None,
                "seconds": self.seconds,
            }
            save = self.engine.save
            save_checkpoint(
                self.folder, step=self.num_done, save_model=save, state=state, settings=self.settings, keep=1
            )
        self._saved, now = self.num_done, time.monotonic()
        # A large model takes long to write: at most a tenth of the time goes into it.
        self._next_save = now + max(self.checkpoint_seconds, 9 * (now - start))

    def restore(self, checkpoint: Path) -> None:
        """Load a checkpoint's state; its weights were loaded with the engine."""
        step, state = load_state(checkpoint)
        with restoring(checkpoint):
            self.engine.load_state_dict(state["engine"])
            torch.set_rng_state(state["torch_rng"])
            self.total, self.metrics, self.seconds = int(state["total"]), state["metrics"], float(state["seconds"])
            self.before = Evaluation(**state["before"]) if state["before"] else None
        self.num_done = self._saved = step
