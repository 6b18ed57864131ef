"""Batched sampling from any transformers causal LM; growing conversations reuse their key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.generation.kv_cache import roomy_cache
from spear_rl.engines.generation.sampling import sampled
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion


@dataclass
class _Memory:
    """Key-value rows of the last batch. Columns where `filled` is False hold nothing a query may look at."""

    cache: Any
    filled: Tensor
    """[B, S]"""
    rows: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The token ids a row has seen -> the row."""


class Decoder:
    """Samples completions batch by batch and remembers the cache, so that the next turn only feeds what is new."""

    def __init__(self, model: Any, tokenizer: Any, *, pad_id: int, end_ids: Sequence[int]) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._pad_id = pad_id
        self._end_ids = torch.tensor(sorted(set(end_ids)), device=model.device)
        self._memory: _Memory | None = None

    def forget(self) -> None:
        """Drop the cache: the weights it was made with are gone."""
        self._memory = None

    @torch.no_grad()
    def completions(
        self, prompts: Sequence[list[int]], sampling: Sampling, generator: torch.Generator
    ) -> list[Completion]:
        """One completion a prompt, with the log-probability of every token under the policy at this temperature."""
        if not prompts:
            return []
        self._model.eval()
        memory, logits = self._prefilled(prompts)
        device, count = logits.device, len(prompts)
        written: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        living = torch.ones(count, dtype=torch.bool, device=device)
        for position in range(sampling.max_new_tokens):
            if not torch.isfinite(logits).all():
                raise NonFiniteLossError("the policy's scores are not finite: its weights have run away")
            tokens, scores = sampled(logits, sampling, generator)
            tokens = torch.where(living, tokens, self._pad_id)
            for row, (token, score, lives) in enumerate(
                zip(tokens.tolist(), scores.tolist(), living.tolist(), strict=True)
            ):
                if lives:
                    written[row].append(token)
                    logprobs[row].append(score)
            living = living & ~torch.isin(tokens, self._end_ids)
            for row in living.nonzero().flatten().tolist() if sampling.stop else ():
                living[row] = not self._has_stopped(written[row], sampling.stop)
            if position == sampling.max_new_tokens - 1 or not living.any():
                break
            # A row that just ended is not fed its last token: its next turn's text will begin with it.
            logits = self._fed(memory, tokens[:, None], living[:, None])
        seen = [len(prompt) + max(len(ids) - 1, 0) for prompt, ids in zip(prompts, written, strict=True)]
        memory.rows = {
            tuple([*prompt, *ids][:length]): row
            for row, (prompt, ids, length) in enumerate(zip(prompts, written, seen, strict=True))
        }
        self._memory = memory
        return [Completion(ids, lp, bool(cut)) for ids, lp, cut in zip(written, logprobs, living.tolist(), strict=True)]

    def _prefilled(self, prompts: Sequence[list[int]]) -> tuple[_Memory, Tensor]:
        """A cache that has seen every prompt, and the logits of the next token."""
        memory, starts = self._continued(prompts)
        if memory is not None:
            return memory, self._fed_text(memory, [p[start:] for p, start in zip(prompts, starts, strict=True)])
        self._memory = None
        unique = list(dict.fromkeys(map(tuple, prompts)))  # siblings of a group start from one and the same prompt
        empty = torch.zeros(len(unique), 0, dtype=torch.bool, device=self._model.device)
        memory = _Memory(roomy_cache(self._model.config), empty)
        logits = self._fed_text(memory, [list(prompt) for prompt in unique])
        place = {prompt: row for row, prompt in enumerate(unique)}
        index = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=logits.device)
        if len(unique) < len(prompts):
            memory.cache.batch_select_indices(index)
            memory.filled, logits = memory.filled[index], logits[index]
        return memory, logits

    def _continued(self, prompts: Sequence[list[int]]) -> tuple[_Memory | None, list[int]]:
        """The remembered cache, cut to the rows that `prompts` extend, if each of them extends one."""
        memory = self._memory
        if memory is None or any(getattr(layer, "is_sliding", False) for layer in memory.cache.layers):
            return None, []
        lengths = sorted({len(ids) for ids in memory.rows}, reverse=True)
        found, starts = [], []
        for prompt in prompts:
            for length in lengths:
                row = memory.rows.get(tuple(prompt[:length])) if length < len(prompt) else None
                if row is not None:
                    found.append(row)
                    starts.append(length)
                    break
            else:
                return None, []
        index = torch.tensor(found, device=memory.filled.device)
        memory.cache.batch_select_indices(index)
        memory.filled = memory.filled[index]
        return memory, starts

    def _fed_text(self, memory: _Memory, texts: list[list[int]]) -> Tensor:
        """Feed each row its text, aligned on the right."""
        width = max(map(len, texts))
        ids = torch.full((len(texts), width), self._pad_id)
        real = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, text in enumerate(texts):
            ids[row, width - len(text) :] = torch.tensor(text)
            real[row, width - len(text) :] = True
        return self._fed(memory, ids.to(memory.filled.device), real.to(memory.filled.device))

    def _fed(self, memory: _Memory, ids: Tensor, real: Tensor) -> Tensor:
        """Feed [B, W] tokens, `real` where they count; the logits after the last column."""
        before = memory.filled.sum(1, keepdim=True)
        positions = (before + real.cumsum(1) - 1).clamp(min=0)
        memory.filled = torch.cat([memory.filled, real], 1)
        out = self._model(
            input_ids=ids,
            attention_mask=memory.filled.long(),
            position_ids=positions,
            past_key_values=memory.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _has_stopped(self, token_ids: list[int], stop: Sequence[str]) -> bool:
        tail = self._tokenizer.decode(token_ids[-16:])
        return any(text in tail for text in stop)
