"""Log-probabilities and entropies of the tokens that train, without ever holding all logits of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 24
"""Logits held at once; above that they are computed in pieces, and again in the backward pass."""


def has_plain_head(model: Any) -> bool:
    """Whether the logits are nothing but the output embedding of the last hidden state (no soft cap, no scale)."""
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        head = model.get_output_embeddings()
        got = head(model.base_model(input_ids=ids).last_hidden_state) if head is not None else None
    return got is not None and got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


def token_scores(
    model: Any, input_ids: Tensor, mask: Tensor, *, temperature: float = 1.0, plain_head: bool = True
) -> tuple[Tensor, Tensor]:
    """[B, T] log-probability of each token where `mask` is True, and the entropy it was drawn at; 0 elsewhere.

    Rows are padded on the right, where causal attention never looks, so the model needs no attention mask.
    """
    rows, columns = torch.nonzero(mask[:, 1:], as_tuple=True)
    targets = input_ids[rows, columns + 1]
    if plain_head:
        hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[rows, columns]
        head = model.get_output_embeddings()
        size = max(MAX_LOGITS // model.config.get_text_config().vocab_size, 1)
        if len(targets) <= size:
            picked, entropies = _scores(head(hidden), targets, temperature)
        else:
            pieces = [
                checkpoint(lambda h, t: _scores(head(h), t, temperature), h, t, use_reentrant=False)
                for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
            ]
            picked, entropies = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    else:
        logits = model(input_ids=input_ids, use_cache=False).logits[rows, columns]
        picked, entropies = _scores(logits, targets, temperature)
    blank = torch.zeros(input_ids.shape, dtype=picked.dtype, device=picked.device)
    where = (rows, columns + 1)
    return blank.index_put(where, picked), blank.index_put(where, entropies)


def _scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[K, V] logits and [K] targets to [K] log-probabilities and [K] entropies."""
    scores = (logits.float() / temperature).log_softmax(-1)
    picked = scores.gather(-1, targets[:, None]).squeeze(-1)
    return picked, -(scores.exp() * scores).sum(-1)
