"""A mini-batch cut into micro-batches, and their results put together again. Knows no model and no loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from spear_rl.engines.base import Batch, ImageBatch
from spear_rl.engines.scoring.logprobs import RowInputs, row_inputs


@dataclass(frozen=True)
class Piece:
    """A micro-batch."""

    rows: Tensor
    """Which rows of its batch it holds."""
    width: int
    is_kept: bool
    """Whether its activations are kept from the forward pass to the backward pass, or computed again."""
    inputs: RowInputs
    images: tuple[tuple[bytes, ...], ...] | None = None
    """Of its rows, if the batch has any."""


def pieces_of(
    batch: Batch, device: torch.device, *, max_tokens: int, max_kept_tokens: int, packed: bool
) -> list[Piece]:
    """Micro-batches of rows of similar length within the token budget, all on their way to the device at once."""
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
    pieces, room = [], max_kept_tokens
    for start, end in pairwise([*cuts, len(order)]):
        rows = order[start:end]
        width = int(lengths[rows[-1]])
        room -= int(lengths[rows].sum()) if packed else len(rows) * width
        ids, mask = batch.input_ids[rows, :width], batch.mask[rows, :width]
        inputs = row_inputs(ids, mask, device, lengths[rows] if packed else None)
        images = tuple(batch.images[row] for row in rows.tolist()) if isinstance(batch, ImageBatch) else None
        pieces.append(Piece(rows.to(device, non_blocking=True), width, room >= 0, inputs, images))
    return pieces


def joined(batch: Batch, pieces: Sequence[Piece], parts: Sequence[Tensor]) -> Tensor:
    """The micro-batches' values as one [B, T] tensor that starts a graph of its own."""
    whole = torch.zeros(batch.input_ids.shape, dtype=parts[0].dtype, device=parts[0].device)
    for piece, part in zip(pieces, parts, strict=True):
        whole[piece.rows, : piece.width] = part.detach()
    return whole
