"""Tests on a few tokens whether packed attention gives the results of a model's own attention.

A model can do with attention what its config does not say: a bias by distance, its own mask, sinks, layers that run
twice, keys wider than values. So before rows are packed, the outputs are compared.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.packed.attention import can_pack, detach_cache, use_packed_attention
from spear_rl.engines.packed.layout import packed_inputs, row_order
from spear_rl.rollout.generator import Sampling

TOLERANCE, HALF_TOLERANCE = 0.01, 0.2
"""Root mean square difference of log-probabilities that rounding may cause, relative to their standard deviation."""


@dataclass
class _Conversation:
    """What one slot was fed and wrote."""

    ids: list[int]
    begin: int = 0
    """Where the last completion begins."""
    logprobs: tuple[float, ...] = ()
    """Of the last completion, as generated."""


def disagreement(model: Any, tokenizer: Any, *, plain_head: bool, generates: bool = True) -> str:
    """Why rows of `model` cannot be packed, or "" if they can; the model is left unchanged.

    Args:
        generates: also compare generation through KV-cache slots.
    """
    kind = type(model).__name__
    if not can_pack(model):
        return f"{kind} does not use plain causal attention"
    own, rng = model.config._attn_implementation, random.Random(0)
    most = min(model.config.get_text_config().vocab_size, 1000)
    rows = [_Conversation([rng.randrange(most) for _ in range(length)]) for length in (5, 23, 1, 12)]
    try:
        use_packed_attention(model)
        if generates:
            _converse(model, tokenizer, rows, plain_head)
        packed = _packed_scores(model, [row.ids for row in rows])
        branches = _branches(rows)
        shared = _packed_scores(model, branches, share=True)
    except NonFiniteLossError:  # nothing to compare; generation will report it
        return ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from the model's own code
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"{kind} does not run with packed attention ({reason})"
    finally:
        model.set_attn_implementation(own)
        detach_cache(model)
    exact = [_own_scores(model, row.ids) for row in rows]
    is_float32 = model.get_input_embeddings().weight.dtype == torch.float32
    limit = (TOLERANCE if is_float32 else HALF_TOLERANCE) * float(torch.cat(exact).std())
    if not _distance(torch.cat(packed), torch.cat(exact)) <= limit:
        return f"{kind} scores rows differently with packed attention"
    if not _distance(torch.cat(shared), torch.cat([_own_scores(model, ids) for ids in branches])) <= limit:
        return f"{kind} scores rows with a common prefix differently with packed attention"
    if generates:
        expected = torch.cat([_completion_scores(row, scores) for row, scores in zip(rows, exact, strict=True)])
        if not _distance(torch.tensor([p for row in rows for p in row.logprobs]), expected.cpu()) <= limit:
            return f"{kind} generates differently with packed attention"
    return ""


def _branches(rows: list[_Conversation]) -> list[list[int]]:
    """Rows that begin alike, with one that occurs twice and one that goes on where another ends."""
    trunk = rows[1].ids
    return [trunk, trunk[:9], trunk[:9] + rows[3].ids, trunk[:17] + rows[0].ids, rows[0].ids, trunk]


class _UncapturedDecoder(SlotDecoder):
    """Runs without CUDA graphs: capturing would take longer than these few steps."""

    def _captured(self, name: tuple[Any, ...], work: Callable[[], None]) -> Callable[[], None]:
        return work


def _converse(model: Any, tokenizer: Any, rows: list[_Conversation], plain_head: bool) -> None:
    """Complete every row, and the first one again after a reply, so that a prompt extends a cached one."""
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
    """[T, vocabulary] log-probabilities of one row."""
    out = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    scores: Tensor = out.logits[0].float().log_softmax(-1)
    return scores


@torch.no_grad()
def _packed_scores(model: Any, rows: list[list[int]], *, share: bool = False) -> list[Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
    order, shared = row_order(ids, lengths, share=share)
    inputs, places = packed_inputs(ids[order], lengths[order], shared, model.device)
    scores = model(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
    return [scores[places[order.argsort()][n, :length].long()] for n, length in enumerate(lengths.tolist())]


def _completion_scores(row: _Conversation, scores: Tensor) -> Tensor:
    ids = torch.tensor(row.ids[row.begin :], device=scores.device)
    return scores[row.begin - 1 : -1].gather(1, ids[:, None])[:, 0]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean().sqrt())
