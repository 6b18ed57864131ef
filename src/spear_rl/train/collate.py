"""Episodes to padded tensors. Turns whose prompt extends the last row are merged into it; else a new row begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain

import torch

from spear_rl.engines.base import Batch, ImageBatch
from spear_rl.types import Completion, Trajectory, Turn


@dataclass(frozen=True)
class _Answer:
    """What the policy wrote, and where in its row."""

    column: int
    completion: Completion
    advantage: float
    trains: bool


@dataclass
class Row:
    """One line of a batch."""

    ids: list[int] = field(default_factory=list)
    answers: list[_Answer] = field(default_factory=list)
    images: tuple[bytes, ...] = ()


def rows(trajectory: Trajectory, turn_advantages: Sequence[float], dropped: Sequence[str] | None = None) -> list[Row]:
    """One row, or several where a prompt does not extend what came before it; none where nothing would train.

    Two turns with prompts [1 2] and [1 2 7 3 4] and answers [7] and [8] make one row:

        ids   1 2 7 3 4 8
        mask  . . x . . x

    A dropped turn's answer stays in the row as context, with its mask off.
    """
    out: list[Row] = []
    reasons = dropped or [""] * len(trajectory.turns)
    for turn, advantage, reason in zip(trajectory.turns, turn_advantages, reasons, strict=True):
        if not out or not _extends(turn, out[-1]):
            out.append(Row())
        row = out[-1]
        row.images = turn.images
        row.ids += turn.prompt_ids[len(row.ids) :]
        row.answers.append(_Answer(len(row.ids), turn.completion, advantage, not reason))
        row.ids += turn.completion.token_ids
    return [row for row in out if any(answer.trains and answer.completion.token_ids for answer in row.answers)]


def _extends(turn: Turn, row: Row) -> bool:
    """Whether a turn's prompt begins with the row; the same placeholder tokens may stand for other pictures."""
    return turn.prompt_ids[: len(row.ids)] == row.ids and turn.images[: len(row.images)] == row.images


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
    lengths = torch.tensor([len(row.ids) for row in flat])
    attention = torch.arange(int(lengths.max())) < lengths[:, None]
    input_ids = torch.full(attention.shape, pad_id)
    input_ids[attention] = torch.tensor(list(chain.from_iterable(row.ids for row in flat)))

    # Only the policy's own tokens, a few in a hundred, have anything in the other tensors.
    answers = [(number, answer) for number, row in enumerate(flat) for answer in row.answers]
    sizes = torch.tensor([len(answer.completion.token_ids) for _, answer in answers])
    ends = sizes.cumsum(0)
    line = torch.tensor([number for number, _ in answers]).repeat_interleave(sizes)
    begins = torch.tensor([answer.column for _, answer in answers])
    place = (line, torch.arange(int(ends[-1])) + (begins - (ends - sizes)).repeat_interleave(sizes))
    advantages = torch.tensor([answer.advantage for _, answer in answers]).repeat_interleave(sizes)
    if any(answer.completion.weights for _, answer in answers):
        weights = (a.completion.weights or [1.0] * len(a.completion.token_ids) for _, a in answers)
        advantages = advantages * torch.tensor(list(chain.from_iterable(weights)))
    old = torch.tensor(list(chain.from_iterable(answer.completion.logprobs for _, answer in answers)))
    trains = torch.tensor([answer.trains for _, answer in answers]).repeat_interleave(sizes)
    batch = Batch(
        input_ids=input_ids,
        attention=attention,
        mask=torch.zeros(attention.shape, dtype=torch.bool).index_put(place, trains),
        old_logprobs=torch.zeros(attention.shape).index_put(place, old),
        advantages=torch.zeros(attention.shape).index_put(place, advantages),
    )
    if not any(row.images for row in flat):
        return batch
    tensors = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    return ImageBatch(**tensors, images=tuple(row.images for row in flat))
