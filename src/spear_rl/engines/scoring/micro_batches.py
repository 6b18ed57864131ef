"""Splits a mini-batch into micro-batches and joins their results. Knows no model and no loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from spear_rl.engines.base import Batch, ImageBatch
from spear_rl.engines.scoring.logprobs import RowInputs, row_inputs


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass."""

    rows: Tensor
    """Their indices in the batch."""
    width: int
    is_kept: bool
    """Whether activations are kept for the backward pass, or computed again."""
    inputs: RowInputs
    images: tuple[tuple[bytes, ...], ...] | None = None


def micro_batches(
    batch: Batch, device: torch.device, *, max_tokens: int, max_kept_tokens: int, packed: bool
) -> list[MicroBatch]:
    """Rows of similar length within the token budget, all transferred to the device at once."""
    lengths = batch.attention.sum(1)
    if not torch.equal(batch.attention, torch.arange(batch.attention.shape[1]) < lengths[:, None]):
        raise ValueError("a Batch must be padded on the right")
    order = lengths.argsort(stable=True)
    cuts, fed, start = [0], 0, 0
    for place, width in enumerate(lengths[order].tolist()):
        fed = fed + width if packed else width * (place - start + 1)
        if place > start and fed > max_tokens:
            cuts.append(place)
            start, fed = place, width
    out, room = [], max_kept_tokens
    for start, end in pairwise([*cuts, len(order)]):
        rows = order[start:end]
        width = int(lengths[rows[-1]])
        room -= int(lengths[rows].sum()) if packed else len(rows) * width
        ids, mask = batch.input_ids[rows, :width], batch.mask[rows, :width]
        inputs = row_inputs(ids, mask, device, lengths[rows] if packed else None)
        images = tuple(batch.images[row] for row in rows.tolist()) if isinstance(batch, ImageBatch) else None
        out.append(MicroBatch(rows.to(device, non_blocking=True), width, room >= 0, inputs, images))
    return out


def joined(batch: Batch, parts: Sequence[MicroBatch], values: Sequence[Tensor]) -> Tensor:
    """The micro-batches' values as one detached [B, T] tensor."""
    whole = torch.zeros(batch.input_ids.shape, dtype=values[0].dtype, device=values[0].device)
    for part, value in zip(parts, values, strict=True):
        whole[part.rows, : part.width] = value.detach()
    return whole
