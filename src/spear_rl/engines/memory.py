"""GPU and host memory: an estimate of what training takes, before anything is loaded, and one error for too little.

Activations are counted: a model of the same shape runs on torch's "meta" device, where tensors have sizes but no
content, and what autograd saves is summed up. That works for any architecture.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from spear_rl.errors import ShortOfMemoryError

GIB = 1 << 30

MAX_LOGITS = 1 << 24
"""Logits held at once, four times as many on a GPU; more are computed in chunks and again in the backward pass."""

OUT_OF_MEMORY = (MemoryError, RuntimeError)
"""What running out of memory may raise: torch's error is a RuntimeError, libraries below torch raise plain ones."""

COMPILED_SHARE = 0.72
"""Of the activations of a compiled layer, which recomputes what is cheap. Measured on Llama-shaped models."""

OVERHEAD = 1.2
"""GiB for the CUDA context, captured graphs and libraries' workspaces."""

MAX_SLOTS, LEAST_SLOTS = 256, 8
"""Conversations that are generated at once: the most, and the fewest where memory is short."""

_TOKENS = 64
"""Fed to count activations."""


@contextmanager
def memory_guard(doing: str, advice: str) -> Iterator[None]:
    """Turn running out of memory into an error that says what to change."""
    try:
        yield
    except OUT_OF_MEMORY as error:
        raise_shortage(error, doing, advice)
        raise


def raise_shortage(error: Exception, doing: str, advice: str) -> None:
    """Raise an error that says what to change if `error` means too little memory; else do nothing."""
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error) for s in signs):
        raise ShortOfMemoryError(f"out of memory while {doing}: {advice}") from error


def smaller_settings(longest: int, *, micro_batch_tokens: int, checkpointing: bool, has_adapter: bool) -> str:
    """What to set where training with these settings on rows of up to `longest` tokens runs out of memory.

    A row is never divided, so smaller micro-batches help only above its length.
    """
    ways = []
    if micro_batch_tokens >= 512 and micro_batch_tokens > longest:
        ways.append(f"engine.micro_batch_tokens={micro_batch_tokens // 2} (it is {micro_batch_tokens})")
    if not checkpointing:
        ways.append("engine.checkpointing=true")
    if not has_adapter:
        ways.append("in a new run engine.lora_rank=16")
    if longest >= micro_batch_tokens:
        ways.append(f"rollout.max_context lower (a row has {longest} tokens)")
    known = f"set {' or '.join(ways)}" if ways else "take a smaller model or lower rollout.max_context"
    return f"{known}; the weights were not changed"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by use."""

    weights: int
    optimizer: int
    """Master weights, moments and gradients."""
    slots: int
    """The KV cache of generation."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.slots + self.activations + self.logits

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


def kv_slots(
    config: Any, dtype: torch.dtype, *, max_context: int, max_new_tokens: int, num_episodes: int, room: int | None
) -> tuple[int, int]:
    """(slots, tokens per slot) of the KV cache for continuous batching: as many as half of `room` bytes hold.

    Other conversations wait for a free slot. Without `room` there is one per episode, up to MAX_SLOTS.
    """
    length, count = rounded_slot(max_context + max_new_tokens + 2), min(num_episodes, MAX_SLOTS)
    if room is not None:
        one = kv_cache_bytes(config.get_text_config(), dtype, num_slots=1, slot_tokens=length) // 2
        count = min(count, max(room // 2 // one - 1, LEAST_SLOTS))
    return count, length


def training_bytes(num_weights: int, num_trained: int, dtype: torch.dtype) -> int:
    """Weights; of the trained ones master weights, two moments and gradients too."""
    return num_weights * dtype.itemsize + num_trained * (12 if dtype == torch.float32 else 16)


def kv_cache_bytes(config: Any, dtype: torch.dtype, *, num_slots: int, slot_tokens: int) -> int:
    """Keys and values of all slots and of the spare one, by a text config; 0 without slots."""
    heads, width = kv_shape(config)
    per_token = 2 * config.num_hidden_layers * heads * width * dtype.itemsize
    return int(per_token * (num_slots + 1) * rounded_slot(slot_tokens)) if num_slots else 0


def kv_shape(config: Any) -> tuple[int, int]:
    """(key-value heads, their width) of a text config."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, width


def rounded_slot(tokens: int) -> int:
    """A slot's length is a multiple of 128 tokens."""
    return -(-tokens // 128) * 128


def footprint(
    config: Any,
    *,
    num_weights: int,
    num_trained: int,
    dtype: torch.dtype,
    kept_tokens: int,
    num_slots: int = 0,
    slot_tokens: int = 512,
    compiled: bool = False,
    checkpointing: bool = False,
    device_type: str = "cuda",
) -> Footprint:
    """What training takes at its peak, with activations of `kept_tokens` tokens held at once."""
    text = config.get_text_config()
    layer = activation_bytes(text, dtype) * (COMPILED_SHARE if compiled else 1.0)
    per_token = text.num_hidden_layers * layer
    if checkpointing:  # every layer's input, and one layer at a time in full
        per_token = text.num_hidden_layers * text.hidden_size * dtype.itemsize + layer
    max_logits = MAX_LOGITS * (4 if device_type == "cuda" else 1)
    return Footprint(
        weights=num_weights * dtype.itemsize,
        optimizer=training_bytes(0, num_trained, dtype),
        slots=kv_cache_bytes(text, dtype, num_slots=num_slots, slot_tokens=slot_tokens),
        activations=int(kept_tokens * per_token),
        # Held at once: the logits, their softmax and its gradient in float32, the gradient of the logits.
        logits=min(max_logits, kept_tokens * text.vocab_size) * (3 * 4 + 2 * dtype.itemsize),
    )


def fitting_tokens(free: int, bytes_per_token: float, *, share: float, most: int) -> int:
    """Tokens whose activations fill `share` of the free memory, in steps of 1024; at least one step."""
    return int(max(min(free * share / bytes_per_token // 1024 * 1024, most), 1024))


def automatic_tokens(free: int, bytes_per_token: float, device_type: str) -> tuple[int, int]:
    """(tokens per micro-batch, tokens whose activations are kept) where nothing is set."""
    if device_type != "cuda":  # fixed on CPU so that results, which are rounded, do not depend on the machine
        return 4096, fitting_tokens(free, bytes_per_token, share=0.6, most=65536)
    return (
        fitting_tokens(free, bytes_per_token, share=0.4, most=131072),
        fitting_tokens(free, bytes_per_token, share=0.75, most=1 << 20),
    )


def activation_bytes(config: Any, dtype: torch.dtype) -> float:
    """Bytes per token that autograd saves in one layer, uncompiled."""
    try:
        counted = (_saved_bytes(config, dtype, 2) - _saved_bytes(config, dtype, 1)) / _TOKENS
    except Exception:  # a model's own code may not run without content, or with fewer layers
        counted = 0.0
    if counted > 0:
        return counted
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return float(dtype.itemsize * (12 * hidden + 4 * inner))  # as in a Llama


def _saved_bytes(config: Any, dtype: torch.dtype, num_layers: int) -> int:
    """What autograd saves of `_TOKENS` tokens in a model of `num_layers` layers, without the weights."""
    from transformers import AttentionInterface, AutoModel

    probe: Any = _Probe.apply
    AttentionInterface.register("spear_probe", lambda module, q, k, v, *_, **__: (probe(q, k, v), None))
    small = copy.deepcopy(config)
    small.num_hidden_layers = num_layers
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:num_layers]
    small._attn_implementation = "spear_probe"
    small.pad_token_id = None  # some models compare it with the ids, which have no content here
    with torch.device("meta"):
        model = AutoModel.from_config(small, dtype=dtype, attn_implementation="spear_probe", trust_remote_code=False)
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
    own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    saved: dict[Any, int] = {}
    alive: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in own:
            saved[base.untyped_storage()._cdata] = base.numel() * base.element_size()
            alive.append(base)  # or its storage's address would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return sum(saved.values())


class _Probe(torch.autograd.Function):
    """Saves what fused attention saves: its inputs, its output and one float per query. Has no backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.transpose(1, 2).clone()
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out
