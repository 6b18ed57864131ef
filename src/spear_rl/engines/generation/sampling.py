"""Sampling for continuous batching: a row's token depends on its own random number, not on the other rows."""

import torch
from torch import Tensor

from spear_rl.engines.generation.padded import nucleus
from spear_rl.engines.packed.attention import own_kernels

_GOLDEN, _MIX_A, _MIX_B = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as int64


def chosen(logits: Tensor, uniform: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `padded.sampled`, with one uniform number in (0, 1) per row: a row's result does not depend on the other rows.

    Inverse transform: the first token at which the cumulative probability reaches the uniform number.
    """
    if logits.is_cuda and temperature > 0 and top_p >= 1 and (kernels := own_kernels()) is not None:
        on_gpu: tuple[Tensor, Tensor, Tensor] = kernels.sampled_tokens(logits, uniform, temperature)
        return on_gpu
    scores = logits.float() if temperature == 0 else logits.float() / temperature
    total = scores.logsumexp(-1, keepdim=True)
    logprobs = scores - total
    probabilities = logprobs.exp()
    if temperature == 0:
        tokens = scores.argmax(-1, keepdim=True)
    else:
        cumulative = nucleus(probabilities, top_p).cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # past the end only if logits are NaN
    own = logprobs.gather(-1, tokens).squeeze(-1)
    # 0 times -inf is NaN: a token that cannot come adds nothing. In place, as [B, V] may be large.
    return tokens.squeeze(-1), own, -logprobs.mul_(probabilities).nansum(-1)


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
