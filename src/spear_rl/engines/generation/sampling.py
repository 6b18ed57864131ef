"""One token from a row of logits, and where its chance comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from spear_rl.engines.packed.attention import own_kernels
from spear_rl.rollout.generator import Sampling

_GOLDEN, _MIX_A, _MIX_B = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as int64


def sampled(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[B] tokens and their log-probabilities under the whole distribution at this temperature."""
    if sampling.temperature == 0:
        scores = logits.log_softmax(-1)
        tokens = scores.argmax(-1)
        return tokens, scores.gather(-1, tokens[:, None]).squeeze(-1)
    scores = (logits / sampling.temperature).log_softmax(-1)
    tokens = torch.multinomial(nucleus(scores.exp(), sampling.top_p), 1, generator=generator)
    return tokens.squeeze(-1), scores.gather(-1, tokens).squeeze(-1)


def chosen(logits: Tensor, chance: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """As `sampled`, but every row brings its own uniform number in (0, 1), so its neighbours do not matter.

    Inverse transform: the first token at which the summed probabilities reach the row's share of their total.
    """
    if logits.is_cuda and temperature > 0 and top_p >= 1 and (kernels := own_kernels()) is not None:
        tokens, logprobs = kernels.sampled_tokens(logits, chance, temperature)
        return tokens, logprobs
    scores = logits.float() if temperature == 0 else logits.float() / temperature
    total = scores.logsumexp(-1, keepdim=True)
    if temperature == 0:
        tokens = scores.argmax(-1, keepdim=True)
    else:
        summed = nucleus((scores - total).exp(), top_p).cumsum(-1)
        tokens = torch.searchsorted(summed, chance[:, None] * summed[:, -1:])
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # past the end only if the logits are not numbers
    return tokens.squeeze(-1), (scores.gather(-1, tokens) - total).squeeze(-1)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """[B, V] probabilities with those outside the smallest set that holds `top_p` of the mass set to 0."""
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    return torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(beyond, 0.0))


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """[N] int64 seeds to [N, count] numbers in (0, 1): a hash of seed and place, the same on every machine."""
    x = seeds[:, None] + torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_A
    x = (x ^ _shifted(x, 27)) * _MIX_B
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 41).float() + 0.5) / (1 << 23)  # 23 bits and a half: never 0, never 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
