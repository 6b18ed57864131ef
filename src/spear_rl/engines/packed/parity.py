"""Whether our attention gives the results of a model's own, tried out on a few tokens.

A model can do with attention what its config does not say: a bias by distance, a mask of its own, sinks, layers that
run twice, keys wider than values. So before rows are laid end to end, the model itself is asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.packed.attention import can_pack, detach_memory, use_packed_attention
from spear_rl.engines.scoring.logprobs import packed_inputs
from spear_rl.rollout.generator import Sampling

NEAR, NEAR_HALF = 0.01, 0.2
"""Largest difference of log-probabilities, as a share of their own spread, that rounding may make."""


@dataclass
class _Conversation:
    """What was read and written in one slot."""

    ids: list[int]
    begin: int = 0
    """Where the last completion begins."""
    logprobs: tuple[float, ...] = ()
    """Of its tokens, as they were streamed."""


def disagreement(model: Any, tokenizer: Any, *, plain_head: bool, streams: bool = True) -> str:
    """Why rows of `model` cannot be laid end to end, or nothing if they can. The model is left as it was.

    Args:
        streams: whether generation through the key-value memory of slots has to agree, too.
    """
    kind = type(model).__name__
    if not can_pack(model):
        return f"{kind} does not leave plain causal attention to us"
    own, text = model.config._attn_implementation, random.Random(0)
    most = min(model.config.get_text_config().vocab_size, 1000)
    rows = [_Conversation([text.randrange(most) for _ in range(length)]) for length in (5, 23, 1, 12)]
    try:
        use_packed_attention(model)
        if streams:
            _converse(model, tokenizer, rows, plain_head)
        packed = _packed_scores(model, [row.ids for row in rows])
    except NonFiniteLossError:  # there is nothing to compare; generation will report it
        return ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code stumbles over
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"{kind} does not run with packed attention ({reason})"
    finally:
        model.set_attn_implementation(own)
        detach_memory(model)
    exact = [_own_scores(model, row.ids) for row in rows]
    has_float32 = model.get_input_embeddings().weight.dtype == torch.float32
    limit = (NEAR if has_float32 else NEAR_HALF) * float(torch.cat(exact).std())
    if not _distance(torch.cat(packed), torch.cat(exact)) <= limit:
        return f"{kind} scores rows differently with packed attention"
    if streams:
        written = torch.cat([_written(row, scores) for row, scores in zip(rows, exact, strict=True)])
        if not _distance(torch.tensor([p for row in rows for p in row.logprobs]), written.cpu()) <= limit:
            return f"{kind} generates differently with packed attention"
    return ""


class _UncapturedDecoder(SlotDecoder):
    """Takes its few steps as they are."""

    def _ready(self, name: tuple[Any, ...], work: Callable[[], None]) -> Callable[[], None]:
        return work


def _converse(model: Any, tokenizer: Any, rows: list[_Conversation], plain_head: bool) -> None:
    """Let every row go on; the first one twice, so that text is added to keys and values that are remembered."""
    decoder = _UncapturedDecoder(
        model, tokenizer, end_ids=(), num_slots=len(rows), slot_tokens=64, plain_head=plain_head
    )
    stream = decoder.stream(Sampling(max_new_tokens=4), seed=0)
    replies = {0: rows[1].ids[:3]}
    asked = list(range(len(rows)))
    while asked or len(stream):
        for key in asked:
            stream.add(key, rows[key].ids)
        asked = []
        for key, completion in stream.finished():
            row = rows[key]
            row.begin, row.logprobs = len(row.ids), tuple(completion.logprobs)
            row.ids = [*row.ids, *completion.token_ids]
            if key in replies:
                row.ids = [*row.ids, *replies.pop(key)]
                asked.append(key)


@torch.no_grad()
def _own_scores(model: Any, ids: list[int]) -> Tensor:
    """[T, vocabulary] log-probabilities of a row by itself."""
    out = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    scores: Tensor = out.logits[0].float().log_softmax(-1)
    return scores


@torch.no_grad()
def _packed_scores(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """The same of rows laid end to end."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
    logits = model(**packed_inputs(ids, lengths, model.device), use_cache=False).logits[0]
    return list(logits.float().log_softmax(-1).split(lengths.tolist()))


def _written(row: _Conversation, scores: Tensor) -> Tensor:
    """Of a row's `scores`, those of the tokens in its last completion."""
    ids = torch.tensor(row.ids[row.begin :], device=scores.device)
    return scores[row.begin - 1 : -1].gather(1, ids[:, None])[:, 0]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean().sqrt())
