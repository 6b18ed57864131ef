"""The cold start: supervised learning on expert episodes, with the same rows and engine as RL."""

import math
import random
from collections.abc import Callable, Sequence

from spear_rl.engines.base import Term, TrainableEngine
from spear_rl.functional.losses import LossInputs, LossOutput, token_mean
from spear_rl.train.step import collate
from spear_rl.types import Metrics, Trajectory

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
    on_update: Callable[[int, int, Metrics], None] = lambda done, total, metrics: None,
) -> Metrics:
    """Train on every demonstration `epochs` times; the metrics of the last update."""
    total = epochs * math.ceil(len(demonstrations) / batch_size)
    rate = warmup_then_cosine(learning_rate, warmup=max(total // 10, 1), steps=total)
    metrics: Metrics = {}
    done = 0
    for _ in range(epochs):
        order = rng.sample(demonstrations, len(demonstrations))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = collate(chosen, [[1.0] * len(t.turns) for t in chosen], pad_id=engine.pad_id)
            if batch is None:
                continue
            engine.set_learning_rate(rate(done))
            metrics = engine.update([Term("sft", batch, imitation_loss)])
            done += 1
            on_update(done, total, metrics)
    engine.sync()
    return metrics
