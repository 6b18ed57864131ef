"""Triton kernels for attention over rows that share prefixes: forwards, and both halves of the backward pass.

Shared rows lie as a tree in preorder, so token j is on the path of token i where j <= i < ends[j]. A program takes a
block of queries and the blocks of keys that some of them see (`Blocks`), or a block of keys and some of the blocks of
queries that see it. Keys are read where they lie; nothing is gathered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spear_rl.engines.packed.tree import BLOCK, Blocks

_LOG2_E = 1.4426950408889634


def tree_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> tuple[Tensor, Tensor]:
    """Every token attends to its path; ([T, heads, width] outputs, [heads, T] base-2 log-sum-exp)."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    count, heads, width = q.shape
    out, log_sums = torch.empty_like(q), torch.empty((heads, count), dtype=torch.float32, device=q.device)
    _forward[(triton.cdiv(count, BLOCK), heads)](
        q, k, v, out, log_sums, blocks.ends, blocks.starts, blocks.keys, scale * _LOG2_E, count,
        heads=heads, kv_heads=k.shape[1], width=width, block=BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, log_sums


def tree_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; those of a shared token are summed in float32."""
    grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
    count, heads, width = q.shape
    by_query, slopes = torch.empty_like(q), torch.empty_like(log_sums)
    by_key, by_value = torch.zeros((2, *k.shape), dtype=torch.float32, device=q.device)
    shape = {"heads": heads, "kv_heads": k.shape[1], "width": width, "block": BLOCK, "num_warps": 4}
    _backward_queries[(triton.cdiv(count, BLOCK), heads)](
        grad, q, k, v, out, by_query, log_sums, slopes, blocks.ends, blocks.starts, blocks.keys,
        scale * _LOG2_E, scale, count, **shape, num_stages=2,
    )  # fmt: skip
    _backward_keys[(len(blocks.spans), heads)](
        grad, q, k, v, by_key, by_value, log_sums, slopes, blocks.ends, blocks.spans,
        scale * _LOG2_E, scale, count, **shape, num_stages=2,
    )  # fmt: skip
    return by_query, by_key.to(k.dtype), by_value.to(v.dtype)


@triton.jit(do_not_specialize=["count"])
def _forward(
    q, k, v, out, log_sums, ends, starts, keys, sharpness, count,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    column, row = tl.arange(0, width), place * block + tl.arange(0, block)
    own = (row.to(tl.int64) * heads + head)[:, None] * width + column[None, :]
    asked = tl.load(q + own, mask=(row < count)[:, None], other=0.0)
    peak = tl.full([block], -1.0e30, tl.float32)  # finite: a block may hold no key that a query sees
    total = tl.zeros([block], tl.float32)
    summed = tl.zeros([block, width], tl.float32)
    for entry in range(tl.load(starts + place), tl.load(starts + place + 1)):
        token = tl.load(keys + entry) * block + tl.arange(0, block)
        at = (token.to(tl.int64) * kv_heads + kv_head)[:, None] * width + column[None, :]
        end = tl.load(ends + token, mask=token < count, other=0)
        is_seen = (token[None, :] <= row[:, None]) & (row[:, None] < end[None, :])
        key = tl.load(k + at, mask=(token < count)[:, None], other=0.0)
        value = tl.load(v + at, mask=(token < count)[:, None], other=0.0)
        score = tl.where(is_seen, tl.dot(asked, tl.trans(key)) * sharpness, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        summed = summed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        peak = new_peak
    is_real = row < count
    total = tl.where(is_real, total, 1.0)
    tl.store(out + own, (summed / total[:, None]).to(out.dtype.element_ty), mask=is_real[:, None])
    tl.store(log_sums + head * count + row, peak + tl.log2(total), mask=is_real)


@triton.jit(do_not_specialize=["count"])
def _backward_queries(
    grad, q, k, v, out, by_query, log_sums, slopes, ends, starts, keys, sharpness, scale, count,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    column, row = tl.arange(0, width), place * block + tl.arange(0, block)
    is_real = row < count
    own = (row.to(tl.int64) * heads + head)[:, None] * width + column[None, :]
    asked = tl.load(q + own, mask=is_real[:, None], other=0.0)
    wished = tl.load(grad + own, mask=is_real[:, None], other=0.0)
    log_sum = tl.load(log_sums + head * count + row, mask=is_real, other=0.0)
    found = tl.load(out + own, mask=is_real[:, None], other=0.0)
    slope = tl.sum(wished.to(tl.float32) * found.to(tl.float32), 1)
    tl.store(slopes + head * count + row, slope, mask=is_real)  # for `_backward_keys`
    summed = tl.zeros([block, width], tl.float32)
    for entry in range(tl.load(starts + place), tl.load(starts + place + 1)):
        token = tl.load(keys + entry) * block + tl.arange(0, block)
        at = (token.to(tl.int64) * kv_heads + kv_head)[:, None] * width + column[None, :]
        end = tl.load(ends + token, mask=token < count, other=0)
        is_seen = (token[None, :] <= row[:, None]) & (row[:, None] < end[None, :])
        key = tl.load(k + at, mask=(token < count)[:, None], other=0.0)
        value = tl.load(v + at, mask=(token < count)[:, None], other=0.0)
        score = tl.dot(asked, tl.trans(key)) * sharpness
        weight = tl.where(is_seen, tl.exp2(score - log_sum[:, None]), 0.0)
        change = weight * (tl.dot(wished, tl.trans(value)) - slope[:, None])
        summed += tl.dot(change.to(key.dtype), key)
    tl.store(by_query + own, (summed * scale).to(by_query.dtype.element_ty), mask=is_real[:, None])


@triton.jit(do_not_specialize=["count"])
def _backward_keys(
    grad, q, k, v, by_key, by_value, log_sums, slopes, ends, spans, sharpness, scale, count,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    span, head = spans + 3 * tl.program_id(0), tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    column, token = tl.arange(0, width), tl.load(span) * block + tl.arange(0, block)
    at = (token.to(tl.int64) * kv_heads + kv_head)[:, None] * width + column[None, :]
    is_real = token < count
    end = tl.load(ends + token, mask=is_real, other=0)
    key = tl.load(k + at, mask=is_real[:, None], other=0.0)
    value = tl.load(v + at, mask=is_real[:, None], other=0.0)
    key_sum = tl.zeros([block, width], tl.float32)
    value_sum = tl.zeros([block, width], tl.float32)
    for place in range(tl.load(span + 1), tl.load(span + 2)):
        row = place * block + tl.arange(0, block)
        own = (row.to(tl.int64) * heads + head)[:, None] * width + column[None, :]
        asked = tl.load(q + own, mask=(row < count)[:, None], other=0.0)
        wished = tl.load(grad + own, mask=(row < count)[:, None], other=0.0)
        log_sum = tl.load(log_sums + head * count + row, mask=row < count, other=0.0)
        slope = tl.load(slopes + head * count + row, mask=row < count, other=0.0)
        # Transposed: a row per key, a column per query.
        is_seen = (token[:, None] <= row[None, :]) & (row[None, :] < end[:, None])
        score = tl.dot(key, tl.trans(asked)) * sharpness
        weight = tl.where(is_seen, tl.exp2(score - log_sum[None, :]), 0.0)
        value_sum += tl.dot(weight.to(wished.dtype), wished)
        change = weight * (tl.dot(value, tl.trans(wished)) - slope[None, :])
        key_sum += tl.dot(change.to(asked.dtype), asked)
    tl.atomic_add(by_key + at, key_sum * scale, mask=is_real[:, None], sem="relaxed")
    tl.atomic_add(by_value + at, value_sum, mask=is_real[:, None], sem="relaxed")
