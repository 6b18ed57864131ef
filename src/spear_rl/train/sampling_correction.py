"""When another program samples (vLLM), its arithmetic differs from the trainer's; this takes the difference out.

Every sampled token is scored again by the trainer. That becomes its old log-probability, so ratios start at 1, and the
token's advantage is weighted by min(trainer / sampler, cap): truncated importance sampling. The weights travel with the
completion, into the replay buffer too, and no loss needs to know of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from spear_rl.engines.base import Batch
from spear_rl.train.step import collate
from spear_rl.types import Completion, Group


class Scores(Protocol):
    """An engine that can score rows under the policy as it is now."""

    pad_id: int

    def scored(self, batch: Batch) -> tuple[Tensor, Tensor]: ...


def corrected(groups: Sequence[Group], engine: Scores, *, cap: float) -> list[Group]:
    """The same episodes with the trainer's log-probabilities and every token's importance, at most `cap`."""
    played = [t for group in groups for t in group.trajectories]
    batch = collate(played, [[1.0] * len(t.turns) for t in played], pad_id=engine.pad_id)
    if batch is None:
        return list(groups)
    # Rows are in the order of turns and their trained tokens in the order they were written.
    scores = iter(engine.scored(batch)[0].cpu()[batch.mask].tolist())

    def rescored(old: Completion) -> Completion:
        new = [next(scores) for _ in old.token_ids]
        weights = [min(math.exp(min(a - b, 50.0)), cap) for a, b in zip(new, old.logprobs, strict=True)]
        return replace(old, logprobs=new, weights=weights)

    return [
        replace(
            group,
            trajectories=[
                replace(t, turns=[replace(turn, completion=rescored(turn.completion)) for turn in t.turns])
                for t in group.trajectories
            ],
        )
        for group in groups
    ]
