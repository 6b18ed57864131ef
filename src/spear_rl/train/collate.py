"""Episodes to padded tensors. Turns whose prompt extends the last row are merged into it; else a new row begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from spear_rl.engines.base import Batch
from spear_rl.types import Trajectory


@dataclass
class _Row:
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    def extend(self, ids: list[int], *, mask: bool, logprobs: list[float], advantage: float) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.advantages += [advantage] * len(ids)


def rows(trajectory: Trajectory, turn_advantages: Sequence[float], dropped: Sequence[str] | None = None) -> list[_Row]:
    """One row, or several where a prompt does not extend what came before it; none where nothing would train.

    Two turns with prompts [1 2] and [1 2 7 3 4] and answers [7] and [8] make one row:

        ids   1 2 7 3 4 8
        mask  . . x . . x

    A dropped turn's answer stays in the row as context, with its mask off.
    """
    out: list[_Row] = []
    reasons = dropped or [""] * len(trajectory.turns)
    for turn, advantage, reason in zip(trajectory.turns, turn_advantages, reasons, strict=True):
        row = out[-1] if out and turn.prompt_ids[: len(out[-1].ids)] == out[-1].ids else None
        if row is None:
            row = _Row()
            out.append(row)
        seen = turn.prompt_ids[len(row.ids) :]
        row.extend(seen, mask=False, logprobs=[0.0] * len(seen), advantage=0.0)
        answer = turn.completion
        row.extend(answer.token_ids, mask=not reason, logprobs=answer.logprobs, advantage=advantage)
    return [row for row in out if any(row.mask)]


def collate(
    trajectories: Sequence[Trajectory],
    turn_advantages: Sequence[Sequence[float]],
    *,
    pad_id: int,
    dropped: Sequence[Sequence[str]] | None = None,
) -> Batch | None:
    """Pad the rows of many episodes into one batch; None if no token of them trains."""
    reasons = dropped or [[""] * len(t.turns) for t in trajectories]
    flat = [r for t, a, why in zip(trajectories, turn_advantages, reasons, strict=True) for r in rows(t, a, why)]
    if not flat:
        return None
    width = max(len(row.ids) for row in flat)

    def pad(values: list[float] | list[int] | list[bool], fill: float | int | bool) -> list[float | int | bool]:
        return [*values, *[fill] * (width - len(values))]

    return Batch(
        input_ids=torch.tensor([pad(row.ids, pad_id) for row in flat]),
        attention=torch.tensor([pad([True] * len(row.ids), False) for row in flat]),
        mask=torch.tensor([pad(row.mask, False) for row in flat]),
        old_logprobs=torch.tensor([pad(row.logprobs, 0.0) for row in flat]),
        advantages=torch.tensor([pad(row.advantages, 0.0) for row in flat]),
    )
