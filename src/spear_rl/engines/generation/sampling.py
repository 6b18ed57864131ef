"""Sampling of one token per row of logits, and the stop strings that end a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.packed.attention import own_kernels
from spear_rl.rollout.generator import Sampling

_GOLDEN, _MIX_A, _MIX_B = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as int64

MIN_WINDOW = 32
"""Tokens decoded to look for a stop string; more for a stop string of more bytes."""


def sampled(
    logits: Tensor, sampling: Sampling, generator: torch.Generator, *, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[B] tokens and their log-probabilities under the full distribution at this temperature.

    Neither top_p nor `forbidden` token ids change the log-probabilities: training computes those of the full
    distribution, too.
    """
    if not torch.isfinite(logits).all():
        raise NonFiniteLossError("the policy's logits are not finite: its weights have diverged")
    scores = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    allowed = scores if forbidden is None else scores.index_fill(-1, forbidden, -torch.inf)
    if sampling.temperature:
        tokens = torch.multinomial(nucleus(allowed.exp(), sampling.top_p), 1, generator=generator)
    else:
        tokens = allowed.argmax(-1, keepdim=True)
    return tokens.squeeze(-1), scores.gather(-1, tokens).squeeze(-1)


def chosen(logits: Tensor, uniform: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """As `sampled`, with one uniform number in (0, 1) per row: a row's result does not depend on the other rows.

    Inverse transform: the first token at which the cumulative probability reaches the uniform number.
    """
    if logits.is_cuda and temperature > 0 and top_p >= 1 and (kernels := own_kernels()) is not None:
        tokens, logprobs = kernels.sampled_tokens(logits, uniform, temperature)
        return tokens, logprobs
    scores = logits.float() if temperature == 0 else logits.float() / temperature
    total = scores.logsumexp(-1, keepdim=True)
    if temperature == 0:
        tokens = scores.argmax(-1, keepdim=True)
    else:
        cumulative = nucleus((scores - total).exp(), top_p).cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # past the end only if logits are NaN
    return tokens.squeeze(-1), (scores.gather(-1, tokens) - total).squeeze(-1)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """[B, V] probabilities, 0 outside the smallest set of tokens that holds `top_p` of the mass."""
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(outside, 0.0))


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """[N] int64 seeds to [N, count] numbers in (0, 1): a hash of seed and column, the same on every machine."""
    x = seeds[:, None] + torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_A
    x = (x ^ _shifted(x, 27)) * _MIX_B
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 41).float() + 0.5) / (1 << 23)  # 23 bits plus a half: never 0, never 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


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
