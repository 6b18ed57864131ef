"""Truncated importance sampling, for a sampler (vLLM) whose arithmetic differs from the trainer's.

The trainer scores every sampled token again. That becomes the old log-probability, so ratios start at 1, and the
token's advantage is weighted by min(trainer / sampler, cap). The weights are stored with the completion, also in the
replay buffer, and losses need not know of them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from spear_rl.engines.base import TrainableEngine
from spear_rl.train.step import collate
from spear_rl.types import Completion, Group


def corrected(groups: Sequence[Group], engine: TrainableEngine, *, cap: float) -> list[Group]:
    """The episodes with the trainer's log-probabilities and importance weights of at most `cap`."""
    played = [t for group in groups for t in group.trajectories]
    batch = collate(played, [[1.0] * len(t.turns) for t in played], pad_id=engine.pad_id)
    if batch is None:
        return list(groups)
    # Rows are in the order of turns, and trained tokens in the order they were written.
    scores = iter(engine.scored(batch)[0].cpu()[batch.mask].tolist())

    def rescored(old: Completion) -> Completion:
        new = [next(scores) for _ in old.token_ids]
        weights = [min(math.exp(min(a - b, 50.0)), cap) for a, b in zip(new, old.logprobs, strict=True)]
        return replace(old, logprobs=new, weights=weights)

    out = []
    for group in groups:
        trajectories = [
            replace(t, turns=[replace(turn, completion=rescored(turn.completion)) for turn in t.turns])
            for t in group.trajectories
        ]
        out.append(replace(group, trajectories=trajectories))
    return out
