"""Padded generation for any transformers causal LM: batch by batch, with prefix reuse between turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion, limit_of

SPARE = 64
"""Columns that a cache layer allocates beyond those in use."""

MIN_WINDOW = 32
"""Tokens decoded to look for a stop string; more for a stop string of more bytes."""


@dataclass
class _Prefixes:
    """The KV cache of the last batch. Columns where `filled` is False are masked."""

    cache: Any
    filled: Tensor
    """[B, S]"""
    rows: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Token ids in the cache -> their row."""


class Decoder:
    """Samples completions of a batch and keeps its KV cache: the next turn prefills only new tokens."""

    def __init__(self, model: Any, tokenizer: Any, *, pad_id: int, end_ids: Sequence[int]) -> None:
        self._model, self._tokenizer, self._pad_id = model, tokenizer, pad_id
        self._end_ids = torch.tensor(sorted(set(end_ids)), device=model.device)
        self._prefixes: _Prefixes | None = None

    def forget(self) -> None:
        """Drop the cache, which was made with other weights."""
        self._prefixes = None

    @torch.no_grad()
    def completions(
        self, prompts: Sequence[list[int]], sampling: Sampling, generator: torch.Generator
    ) -> list[Completion]:
        """One completion per prompt, with log-probabilities and entropies at this temperature."""
        if not prompts:
            return []
        self._model.eval()
        stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        prefixes, logits = self._prefilled(prompts)
        written: list[list[int]] = [[] for _ in prompts]
        scores: list[Tensor] = []
        active = torch.ones(len(prompts), dtype=torch.bool, device=logits.device)
        limits = torch.tensor([limit_of(prompt, sampling.max_new_tokens) for prompt in prompts], device=logits.device)
        cut = torch.zeros_like(active)
        for position in range(int(limits.max())):
            tokens, *found = sampled(logits, sampling, generator)
            scores.append(torch.stack(found))
            tokens = torch.where(active, tokens, self._pad_id)
            ids = tokens.tolist()
            for row in active.nonzero().flatten().tolist():
                written[row].append(ids[row])
            active = active & ~torch.isin(tokens, self._end_ids)
            if stops:
                for row in active.nonzero().flatten().tolist():
                    active[row] = not stops.end(written[row])
            cut |= active & (limits == position + 1)
            active = active & ~cut
            if not active.any():
                break
            # A row that just ended is not fed its last token: the next prompt feeds it.
            logits = self._feed(prefixes, tokens[:, None], active[:, None])
        prefixes.rows = {
            tuple([*prompt, *ids][: len(prompt) + max(len(ids) - 1, 0)]): row
            for row, (prompt, ids) in enumerate(zip(prompts, written, strict=True))
        }
        self._prefixes = prefixes
        rows = zip(written, *torch.stack(scores, -1).tolist(), cut.tolist(), strict=True)
        return [Completion(ids, p[: len(ids)], is_cut, entropies=e[: len(ids)]) for ids, p, e, is_cut in rows]

    def _prefilled(self, prompts: Sequence[list[int]]) -> tuple[_Prefixes, Tensor]:
        """A cache that holds every prompt, and the logits of the next token."""
        prefixes, starts = self._reused(prompts)
        if prefixes is not None:
            return prefixes, self._feed_texts(prefixes, [p[start:] for p, start in zip(prompts, starts, strict=True)])
        self._prefixes = None
        unique = list(dict.fromkeys(map(tuple, prompts)))  # the episodes of a group start from the same prompt
        empty = torch.zeros(len(unique), 0, dtype=torch.bool, device=self._model.device)
        prefixes = _Prefixes(_growing_cache(self._model.config), empty)
        logits = self._feed_texts(prefixes, [list(prompt) for prompt in unique])
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        index = torch.tensor([row_of[tuple(prompt)] for prompt in prompts], device=logits.device)
        if len(unique) < len(prompts):
            prefixes.cache.batch_select_indices(index)
            prefixes.filled, logits = prefixes.filled[index], logits[index]
        return prefixes, logits

    def _reused(self, prompts: Sequence[list[int]]) -> tuple[_Prefixes | None, list[int]]:
        """The kept cache, cut to the rows that `prompts` extend, if each of them extends one."""
        prefixes = self._prefixes
        if prefixes is None or any(getattr(layer, "is_sliding", False) for layer in prefixes.cache.layers):
            return None, []
        lengths = sorted({len(ids) for ids in prefixes.rows}, reverse=True)
        found, starts = [], []
        for prompt in prompts:
            for length in lengths:
                row = prefixes.rows.get(tuple(prompt[:length])) if length < len(prompt) else None
                if row is not None:
                    found.append(row)
                    starts.append(length)
                    break
            else:
                return None, []
        index = torch.tensor(found, device=prefixes.filled.device)
        prefixes.cache.batch_select_indices(index)
        prefixes.filled = prefixes.filled[index]
        return prefixes, starts

    def _feed_texts(self, prefixes: _Prefixes, texts: list[list[int]]) -> Tensor:
        """Feed every row its tokens, aligned on the right."""
        width = max(map(len, texts))
        ids = torch.full((len(texts), width), self._pad_id)
        real = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, text in enumerate(texts):
            ids[row, width - len(text) :] = torch.tensor(text)
            real[row, width - len(text) :] = True
        return self._feed(prefixes, ids.to(prefixes.filled.device), real.to(prefixes.filled.device))

    def _feed(self, prefixes: _Prefixes, ids: Tensor, real: Tensor) -> Tensor:
        """Feed [B, W] tokens, of which those count where `real`; the logits after the last column."""
        before = prefixes.filled.sum(1, keepdim=True)
        positions = (before + real.cumsum(1) - 1).clamp(min=0)
        prefixes.filled = torch.cat([prefixes.filled, real], 1)
        inputs = {"input_ids": ids, "attention_mask": prefixes.filled.long(), "position_ids": positions}
        out = self._model(**inputs, past_key_values=prefixes.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[:, -1].float()
        return logits


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are views of the used columns of larger buffers: a new token copies only itself."""

    keys: Tensor
    values: Tensor
    _buffers: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used, new = self.get_seq_length(), key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < used + new:
            self._buffers = [_widened(self.keys, key_states, used), _widened(self.values, value_states, used)]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., used : used + new, :] = states
        self.keys, self.values = (buffer[..., : used + new, :] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None


def _growing_cache(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [_GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _widened(old: Tensor, states: Tensor, used: int) -> Tensor:
    batch, heads, new, width = states.shape
    buffer = torch.empty(batch, heads, used + new + SPARE, width, dtype=states.dtype, device=states.device)
    if used:
        buffer[..., :used, :] = old
    return buffer


def sampled(
    logits: Tensor, sampling: Sampling, generator: torch.Generator, *, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """[B] tokens, their log-probabilities under the full distribution at this temperature, and its entropies.

    Neither top_p nor `forbidden` token ids change that distribution: training computes log-probabilities of the full
    one, too.
    """
    if not torch.isfinite(logits).all():
        raise NonFiniteLossError("the policy's logits are not finite: its weights have diverged")
    scores = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    probabilities = scores.exp()
    if sampling.temperature:
        allowed = probabilities if forbidden is None else probabilities.index_fill(-1, forbidden, 0.0)
        tokens = torch.multinomial(nucleus(allowed, sampling.top_p), 1, generator=generator)
    else:
        allowed = scores if forbidden is None else scores.index_fill(-1, forbidden, -torch.inf)
        tokens = allowed.argmax(-1, keepdim=True)
    logprobs = scores.gather(-1, tokens).squeeze(-1)
    return tokens.squeeze(-1), logprobs, -scores.mul_(probabilities).sum(-1)  # in place: [B, V] may be large


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """[B, V] probabilities, 0 outside the smallest set of tokens that holds `top_p` of the mass."""
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(outside, 0.0))


class StopStrings:
    """Finds the end of a completion by its text, decoding only at tokens that can complete a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._window = max([MIN_WINDOW, *(len(stop.encode()) + 1 for stop in stops)])  # a token has at least one byte
        self._can_complete: dict[int, bool] = {}

    def end(self, token_ids: list[int]) -> bool:
        """Whether the text of these tokens contains a stop string, given that it did not one token ago."""
        if not self._stops:
            return False
        last = token_ids[-1]
        if last not in self._can_complete:
            text = self._tokenizer.decode([last])
            is_partial = not text or "\ufffd" in text  # some bytes of a character
            self._can_complete[last] = is_partial or any(s[-1] in text or s[-1].isspace() for s in self._stops)
        if not self._can_complete[last]:
            return False
        tail = self._tokenizer.decode(token_ids[-self._window :])
        return any(stop in tail for stop in self._stops)
