"""Attention over packed rows (laid end to end, no padding): one function for training, prefill and decoding.

transformers calls it by name (`attn_implementation="spear"`) and passes the keyword `rows`, which says where each row
lies and, when generating, where its KV cache is. Written so that a compiled layer has no graph break, and no integer
in it causes a recompilation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from spear_rl.engines.packed.tree import TREE_WIDTHS, Blocks

NAME = "spear"

_flash_forward = torch.ops.aten._flash_attention_forward

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "indices", "block_indices")
"""What models may ask of attention beyond causal softmax; ignoring it would change results silently."""


@dataclass(frozen=True)
class CachedRows:
    """Where N rows keep earlier keys and values: a slot each in the tensors attached to the layers (`attach_cache`)."""

    bases: Tensor
    """[N + 1] int32, where each row's slot begins; the last entry is not read."""
    lengths: Tensor
    """[N] int32, tokens of a row to attend to, those fed now included."""
    places: Tensor
    """[T] int64, where the keys and values of each token fed now go."""
    slot_tokens: int


@dataclass(frozen=True)
class Rows:
    """How T packed tokens divide into N rows."""

    starts: Tensor
    """[N + 1] int32: row n is tokens starts[n] to starts[n + 1]."""
    limit: int
    """Every row is shorter than this. At least 2: torch.compile specialises on 1."""
    cached: CachedRows | None = None
    blocks: Blocks | None = None
    """Where rows share prefixes: a row has only tokens of its own, and these say what else it attends to."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Rows:
        """Rows of these lengths, without a cache."""
        starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)
        return cls(starts, max(lengths) + 1)


def can_pack(model: Any) -> bool:
    """Whether the model's class and config say that its attention is plain; `parity.disagreement` tests it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and kinds == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "attn_logit_softcapping", None)
        # These rotate all rows by the length of the longest, computed on the host: no CUDA graph can.
        and rope.get("rope_type", "default") not in ("dynamic", "longrope")
    )


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels run there; elsewhere plain and slow code gives the same results."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    is_cuda = device.type == "cuda" and find_spec("torch.nn.attention.varlen") is not None
    return is_cuda and is_half and torch.cuda.get_device_capability(device) >= (8, 0)


def use_packed_attention(model: Any) -> None:
    """Make `model` attend through `packed_attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)


def attach_cache(model: Any, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give every attention layer its KV cache, as attributes: compiled code needs no layer number then."""
    for module in attention_layers(model):
        module.spear_keys, module.spear_values = layers[module.layer_idx]


def detach_cache(model: Any) -> None:
    """Undo `attach_cache`."""
    for module in attention_layers(model):
        module.__dict__.pop("spear_keys", None)
        module.__dict__.pop("spear_values", None)


def attention_layers(model: Any) -> Iterator[Any]:
    """The modules that call an attention function."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "scaling"):
            yield module


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, *, rows: Rows | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """[1, heads, T, width] to [1, T, heads, width]. Without `rows`, plain causal attention over unpadded rows."""
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if asked or (attention_mask is not None and rows is not None):
        raise NotImplementedError(f"attention with {', '.join(asked) or 'a mask of the model itself'}")
    if rows is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2), None
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if rows.cached is None:
        return _row_attention(q, k, v, rows, scale)[None], None
    cached = rows.cached
    out = torch.ops.spear.cached_attention(
        q, k, v, module.spear_keys, module.spear_values, rows.starts, cached.bases, cached.lengths, cached.places,
        rows.limit, cached.slot_tokens, scale,
    )  # fmt: skip
    return out[None], None


def _is_fused(q: Tensor) -> bool:
    return q.is_cuda and q.dtype != torch.float32


def _row_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """Each row attends to itself, and to the prefix that it shares with earlier rows."""
    blocks = rows.blocks
    if _is_fused(q) and blocks is not None and q.shape[2] in TREE_WIDTHS:
        out: Tensor = torch.ops.spear.tree_attention(
            q, k, v, blocks.ends, blocks.starts, blocks.keys, blocks.spans, scale
        )[0]
        return out
    if _is_fused(q) and blocks is None and _VARLEN is not None:
        apart: Tensor = _VARLEN(
            q, k, v, rows.starts, rows.starts, rows.limit - 1, rows.limit - 1, scale=scale, window_size=(-1, 0)
        )
        return apart
    places = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
    if blocks is None:
        row = torch.searchsorted(rows.starts, places, right=True) - 1
        mask = row[:, None] == row
    else:
        mask = places[:, None] < blocks.ends
    return _masked(q, k, v, mask & (places[:, None] >= places), scale)


# Operators of our own: for torch.compile they are opaque, so nothing is traced per batch.
@torch.library.custom_op("spear::tree_attention", mutates_args=())
def _tree_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, starts: Tensor, keys: Tensor, spans: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Every token attends to its path; ([T, heads, width] outputs, [heads, T] base-2 log-sum-exp)."""
    found: tuple[Tensor, Tensor] = tree_kernels().tree_attention(q, k, v, Blocks(ends, starts, keys, spans), scale)
    return found


@_tree_attention.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("spear::tree_attention_backward", mutates_args=())
def _tree_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ends: Tensor, starts: Tensor,
    keys: Tensor, spans: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    blocks = Blocks(ends, starts, keys, spans)
    found: tuple[Tensor, Tensor, Tensor] = tree_kernels().tree_attention_backward(
        grad, q, k, v, out, log_sums, blocks, scale
    )
    return found


@_tree_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_tree(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _tree_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.spear.tree_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*found, None, None, None, None, None)


_tree_attention.register_autograd(_tree_backward, setup_context=_keep_tree)


# The cache is mutated, but not declared so: torch.compile would copy all of it, and nothing else in a layer reads it.
@torch.library.custom_op("spear::cached_attention", mutates_args=())
def _cached_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, starts: Tensor, bases: Tensor, lengths: Tensor,
    places: Tensor, limit: int, slot_tokens: int, scale: float,
) -> Tensor:  # fmt: skip
    """Write the new keys and values to the cache; each row's new tokens attend to its slot, of which they are last."""
    if limit == 2 and has_kernel(q.device, q.dtype):
        kernels = own_kernels()
        if kernels is not None and kernels.can_attend(q.shape[1], keys.shape[1], q.shape[2]):
            single: Tensor = kernels.single_token_attention(q, k, v, keys, values, bases, lengths, scale)
            return single
    keys.index_copy_(0, places, k)
    values.index_copy_(0, places, v)
    if has_kernel(q.device, q.dtype):
        # varlen_attn takes slots longer than their rows only from torch 2.12 on; the operator below it always did.
        out: Tensor = _flash_forward(
            q, keys, values, starts, bases, limit - 1, slot_tokens, 0.0, True, False, scale=scale, seqused_k=lengths
        )[0]
        return out
    whole = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    bounds, begins = starts.tolist(), bases.tolist()
    for row, length in enumerate(lengths.tolist()):
        new, kept = slice(bounds[row], bounds[row + 1]), slice(begins[row], begins[row] + length)
        if new.start < new.stop:
            mask = torch.ones(new.stop - new.start, length, dtype=torch.bool, device=q.device)
            mask = mask.tril(length - len(mask))
            whole[new] = _masked(q[new], keys[kept], values[kept], mask, scale)
    return whole


@_cached_attention.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[T, heads, width] queries against [S, kv heads, width] keys where `mask` [T, S] allows."""
    q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _varlen() -> Callable[..., Any] | None:
    """torch's attention over packed rows, from torch 2.10 on."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in takes else varlen_attn


# A CPU build of torch has no use for it, and importing it takes a quarter of a command's start.
_VARLEN = _varlen() if torch.version.cuda else None


def tree_kernels() -> Any:
    """Our Triton kernels for rows that share prefixes."""
    from spear_rl.engines.packed import tree_kernels

    return tree_kernels


@cache
def own_kernels() -> Any:
    """Our Triton kernels, or None without Triton (it comes with torch for CUDA)."""
    try:
        from spear_rl.engines.packed import kernels
    except ImportError:
        return None
    return kernels
