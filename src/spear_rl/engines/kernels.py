"""A GPU kernel for the one case libraries are slow at: single new tokens that attend to long stretches of memory.

Flash attention pads the few queries that share a key-value head to a tile of 128; three quarters of its time on small
models goes there. Here a program takes one row and one key-value head, and reads each key and value once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SHARED = 16
"""Query heads a key-value head may have."""


def can_attend(num_heads: int, num_kv_heads: int, width: int) -> bool:
    """Whether `single_token_attention` takes these shapes."""
    return num_heads // num_kv_heads <= MAX_SHARED and width >= 16 and width & (width - 1) == 0


def single_token_attention(
    q: Tensor, keys: Tensor, values: Tensor, bases: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """[N, heads, width] queries; row n attends to keys[bases[n] : bases[n] + lengths[n]], each [kv heads, width]."""
    rows, heads, width = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attend[(rows, kv_heads)](
        q, keys, values, out, bases, lengths, scale * 1.4426950408889634, q.stride(0), q.stride(1),
        heads=heads, kv_heads=kv_heads, width=width, shared=heads // kv_heads, tile=16, block=64,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _attend(
    q, keys, values, out, bases, lengths, scale, q_row, q_head,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr,
    shared: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    base, length = tl.load(bases + row).to(tl.int64), tl.load(lengths + row)
    column, member, token = tl.arange(0, width), tl.arange(0, tile), tl.arange(0, block)
    own = head * shared + member
    asked = tl.load(
        q + row * q_row + own[:, None] * q_head + column[None, :], mask=(member < shared)[:, None], other=0.0
    )
    peak = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    summed = tl.zeros([tile, width], tl.float32)
    for start in range(0, length, block):
        is_there = start + token < length
        place = ((base + start + token) * kv_heads + head)[:, None] * width + column[None, :]
        key = tl.load(keys + place, mask=is_there[:, None], other=0.0)
        value = tl.load(values + place, mask=is_there[:, None], other=0.0)
        score = tl.where(is_there[None, :], tl.dot(asked, tl.trans(key)) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        summed = summed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        peak = new_peak
    place = (row * heads + own)[:, None] * width + column[None, :]
    tl.store(out + place, (summed / total[:, None]).to(out.dtype.element_ty), mask=(member < shared)[:, None])
