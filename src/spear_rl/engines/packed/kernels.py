"""Triton kernels for decoding, in the two places where libraries are slow.

Attention: flash attention pads the few queries that share a key-value head to a tile of 128. Here a program takes one
row and one key-value head, and reads each key and value once. Sampling: softmax, sum and search over a vocabulary are
six passes over memory as separate operations; here a program takes a row, whose logits stay in the GPU's cache between
three passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SHARED = 16
"""Most query heads per key-value head."""


def can_attend(num_heads: int, num_kv_heads: int, width: int) -> bool:
    """Whether `single_token_attention` takes these shapes."""
    return num_heads // num_kv_heads <= MAX_SHARED and width >= 16 and width & (width - 1) == 0


def single_token_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, bases: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Row n attends to the `lengths[n]` tokens of its slot at `bases[n]`, whose last token is new and cached here.

    Queries [N, heads, width], new keys and values [N, kv heads, width], cached ones [all slots, kv heads, width].
    """
    rows, heads, width = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attend[(rows, kv_heads)](
        q, k, v, keys, values, out, bases, lengths, scale * 1.4426950408889634,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        heads=heads, kv_heads=kv_heads, width=width, shared=heads // kv_heads, tile=16, block=64,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _attend(
    q, k, v, keys, values, out, bases, lengths, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr,
    shared: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    base, num_old = tl.load(bases + row).to(tl.int64), tl.load(lengths + row) - 1
    column, member, token = tl.arange(0, width), tl.arange(0, tile), tl.arange(0, block)
    own = head * shared + member
    asked_at = row * q_row + own[:, None] * q_head + column[None, :]
    asked = tl.load(q + asked_at, mask=(member < shared)[:, None], other=0.0)
    # The new token comes first: it is in registers, and the sums start from it.
    new_key = tl.load(k + row * k_row + head * k_head + column)
    new_value = tl.load(v + row * v_row + head * v_head + column)
    new_at = ((base + num_old) * kv_heads + head) * width + column
    tl.store(keys + new_at, new_key)
    tl.store(values + new_at, new_value)
    peak = tl.sum(asked.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    total = tl.full([tile], 1.0, tl.float32)
    summed = tl.zeros([tile, width], tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, num_old, block):
        is_there = start + token < num_old
        old_at = ((base + start + token) * kv_heads + head)[:, None] * width + column[None, :]
        key = tl.load(keys + old_at, mask=is_there[:, None], other=0.0)
        value = tl.load(values + old_at, mask=is_there[:, None], other=0.0)
        score = tl.where(is_there[None, :], tl.dot(asked, tl.trans(key)) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        summed = summed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        peak = new_peak
    out_at = (row * heads + own)[:, None] * width + column[None, :]
    tl.store(out + out_at, (summed / total[:, None]).to(out.dtype.element_ty), mask=(member < shared)[:, None])


def sampled_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] logits and [B] uniform numbers to [B] tokens, by inverse transform, log-probabilities and entropies."""
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scores, entropies = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    _sample[(rows,)](
        logits, uniform, tokens, scores, entropies, 1 / temperature, size, logits.stride(0), block=4096, num_warps=8
    )  # fmt: skip
    return tokens, scores, entropies


@triton.jit
def _sample(logits, uniform, tokens, scores, entropies, sharpness, size, stride, block: tl.constexpr):
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * stride
    column = tl.arange(0, block)
    highest = tl.full([block], float("-inf"), tl.float32)
    for start in range(0, size, block):
        x = tl.load(own + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x * sharpness)
    peak = tl.max(highest, 0)
    total = 0.0
    spread = 0.0
    for start in range(0, size, block):
        x = tl.load(own + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
        below = x * sharpness - peak
        weight = tl.exp(below)
        total += tl.sum(weight, 0)
        spread += tl.sum(tl.where(weight > 0, weight * below, 0.0), 0)
    goal = tl.load(uniform + row) * total
    passed = 0.0
    token = size
    last = 0
    for start in range(0, size, block):
        x = tl.load(own + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
        weight = tl.exp(x * sharpness - peak)
        is_possible = weight > 0
        reaches = is_possible & (passed + tl.cumsum(weight, 0) >= goal)
        token = tl.minimum(token, tl.min(tl.where(reaches, start + column, size), 0))
        last = tl.maximum(last, tl.max(tl.where(is_possible, start + column, 0), 0))
        passed += tl.sum(weight, 0)
    # Rounding may leave the sum just below the goal: then the last possible token is taken.
    token = tl.where(token == size, last, token)
    x = tl.load(own + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(scores + row, x * sharpness - peak - tl.log(total))
    tl.store(entropies + row, tl.log(total) - spread / total)
