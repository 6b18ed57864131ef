"""Log-probabilities and entropies of the trained tokens, in micro-batches, without holding all logits at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spear_rl.engines.base import Batch, ImageBatch
from spear_rl.engines.packed.attention import Rows

MAX_LOGITS = 1 << 24
"""Logits held at once, four times as many on a GPU; more are computed in chunks and again in the backward pass."""


def has_plain_head(model: Any) -> bool:
    """Whether logits are just the output embedding of the last hidden state (no soft cap, no scale)."""
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    head = model.get_output_embeddings()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if head is None or hidden is None or hidden.shape[-1] != getattr(head, "in_features", None):
            return False
        got = head(hidden)
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class RowInputs:
    """Rows on the device, ready to be scored."""

    model_inputs: dict[str, Any]
    predictors: tuple[Tensor | int, Tensor]
    """Index of the model's outputs that predict a trained token."""
    targets: Tensor
    """[K] the trained tokens."""
    target_index: tuple[Tensor, Tensor]
    """Their rows and columns."""
    shape: torch.Size


def row_inputs(input_ids: Tensor, mask: Tensor, device: torch.device, lengths: Tensor | None = None) -> RowInputs:
    """Rows padded on the right, which causal attention never sees, so that no attention mask is needed.

    With `lengths` [B] they are packed instead, for a model with packed attention.
    """
    rows, columns = torch.nonzero(mask[:, 1:], as_tuple=True)
    targets = input_ids[rows, columns + 1]
    predictors: tuple[Tensor | int, Tensor] = (
        rows.to(device, non_blocking=True),
        columns.to(device, non_blocking=True),
    )
    target_index = (rows.to(device, non_blocking=True), (columns + 1).to(device, non_blocking=True))
    if lengths is None:
        model_inputs: dict[str, Any] = {"input_ids": input_ids.to(device, non_blocking=True)}
    else:
        model_inputs = packed_inputs(input_ids, lengths, device)
        predictors = (0, ((lengths.cumsum(0) - lengths)[rows] + columns).to(device, non_blocking=True))
    return RowInputs(model_inputs, predictors, targets.to(device, non_blocking=True), target_index, input_ids.shape)


def packed_inputs(input_ids: Tensor, lengths: Tensor, device: torch.device) -> dict[str, Any]:
    """Padded rows laid end to end.

    [[5 6 .] [7 8 9]] of lengths 2 and 3 becomes 5 6 7 8 9 at positions 0 1 0 1 2.
    """
    attention = torch.arange(input_ids.shape[1]) < lengths[:, None]
    positions = torch.arange(input_ids.shape[1]).expand(attention.shape)[attention]
    ids, positions = torch.stack([input_ids[attention], positions]).to(device, non_blocking=True)
    return {"input_ids": ids[None], "position_ids": positions[None], "rows": Rows.of(lengths.tolist(), device)}


def token_scores(
    model: Any, inputs: RowInputs, *, temperature: float = 1.0, plain_head: bool = True
) -> tuple[Tensor, Tensor]:
    """[B, T] log-probabilities and entropies of the trained tokens; 0 elsewhere."""
    device, targets = model.device, inputs.targets
    if plain_head:
        hidden = model.base_model(**inputs.model_inputs, use_cache=False).last_hidden_state[inputs.predictors]
        head = model.get_output_embeddings()
        most = MAX_LOGITS * (4 if device.type == "cuda" else 1)
        size = max(most // model.config.get_text_config().vocab_size, 1)
        if len(targets) <= size:
            logprobs, entropies = _scores(head(hidden), targets, temperature)
        else:
            chunks = [
                checkpoint(lambda h, t: _scores(head(h), t, temperature), h, t, use_reentrant=False)
                for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
            ]
            logprobs, entropies = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    else:
        logits = model(**inputs.model_inputs, use_cache=False).logits[inputs.predictors]
        logprobs, entropies = _scores(logits, targets, temperature)
    zeros = torch.zeros(inputs.shape, dtype=logprobs.dtype, device=device)
    return zeros.index_put(inputs.target_index, logprobs), zeros.index_put(inputs.target_index, entropies)


def _scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[K, V] logits and [K] targets to [K] log-probabilities and [K] entropies."""
    full = (logits.float() / temperature).log_softmax(-1)
    return full.gather(-1, targets[:, None]).squeeze(-1), -(full.exp() * full).sum(-1)


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
