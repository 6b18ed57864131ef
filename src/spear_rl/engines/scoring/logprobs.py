"""Log-probabilities and entropies of the tokens that train, without ever holding all logits of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spear_rl.engines.packed.attention import Rows

MAX_LOGITS = 1 << 24
"""Logits held at once, four times as many on a GPU; beyond that in pieces, computed again in the backward pass."""


def has_plain_head(model: Any) -> bool:
    """Whether the logits are nothing but the output embedding of the last hidden state (no soft cap, no scale)."""
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    head = model.get_output_embeddings()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if head is None or hidden is None or hidden.shape[-1] != getattr(head, "in_features", None):
            return False
        got = head(hidden)
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


def scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[K, V] logits and [K] targets to [K] log-probabilities and [K] entropies."""
    whole = (logits.float() / temperature).log_softmax(-1)
    picked = whole.gather(-1, targets[:, None]).squeeze(-1)
    return picked, -(whole.exp() * whole).sum(-1)


@dataclass(frozen=True)
class RowInputs:
    """Rows on their device, ready to be scored."""

    fed: dict[str, Any]
    """What the model is given."""
    where: tuple[Tensor | int, Tensor]
    """The places of its output that predict a trained token."""
    targets: Tensor
    """[K] the trained tokens."""
    place: tuple[Tensor, Tensor]
    """Their rows and columns."""
    shape: torch.Size


def row_inputs(input_ids: Tensor, mask: Tensor, device: torch.device, lengths: Tensor | None = None) -> RowInputs:
    """Rows padded on the right, where causal attention never looks, so that no attention mask is needed.

    With `lengths` [B] they are laid end to end instead, for a model whose attention is ours (`use_packed_attention`).
    """
    rows, columns = torch.nonzero(mask[:, 1:], as_tuple=True)
    targets = input_ids[rows, columns + 1]
    where: tuple[Tensor | int, Tensor] = (rows.to(device, non_blocking=True), columns.to(device, non_blocking=True))
    place = (rows.to(device, non_blocking=True), (columns + 1).to(device, non_blocking=True))
    if lengths is None:
        fed: dict[str, Any] = {"input_ids": input_ids.to(device, non_blocking=True)}
    else:
        fed = packed_inputs(input_ids, lengths, device)
        where = (0, ((lengths.cumsum(0) - lengths)[rows] + columns).to(device, non_blocking=True))
    return RowInputs(fed, where, targets.to(device, non_blocking=True), place, input_ids.shape)


def packed_inputs(input_ids: Tensor, lengths: Tensor, device: torch.device) -> dict[str, Any]:
    """Padded rows as one line of tokens.

    [[5 6 .] [7 8 9]] of lengths 2 and 3 becomes 5 6 7 8 9 at positions 0 1 0 1 2.
    """
    attention = torch.arange(input_ids.shape[1]) < lengths[:, None]
    positions = torch.arange(input_ids.shape[1]).expand(attention.shape)[attention]
    ids, positions = torch.stack([input_ids[attention], positions]).to(device, non_blocking=True)
    return {"input_ids": ids[None], "position_ids": positions[None], "rows": Rows.of(lengths.tolist(), device)}


def token_scores(
    model: Any, inputs: RowInputs, *, temperature: float = 1.0, plain_head: bool = True
) -> tuple[Tensor, Tensor]:
    """[B, T] log-probability of each trained token, and the entropy it was drawn at; 0 elsewhere."""
    device, targets = model.device, inputs.targets
    if plain_head:
        hidden = model.base_model(**inputs.fed, use_cache=False).last_hidden_state[inputs.where]
        head = model.get_output_embeddings()
        most = MAX_LOGITS * (4 if device.type == "cuda" else 1)
        size = max(most // model.config.get_text_config().vocab_size, 1)
        if len(targets) <= size:
            picked, entropies = scores(head(hidden), targets, temperature)
        else:
            pieces = [
                checkpoint(lambda h, t: scores(head(h), t, temperature), h, t, use_reentrant=False)
                for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
            ]
            picked, entropies = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    else:
        logits = model(**inputs.fed, use_cache=False).logits[inputs.where]
        picked, entropies = scores(logits, targets, temperature)
    blank = torch.zeros(inputs.shape, dtype=picked.dtype, device=device)
    return blank.index_put(inputs.place, picked), blank.index_put(inputs.place, entropies)
