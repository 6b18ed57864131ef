"""How much memory training a model takes, worked out before anything is loaded: weights, optimizer, slots, activations.

Activations are counted, not guessed: a model of the same shape runs on torch's "meta" device, where tensors have sizes
but no content, and what autograd would keep is added up. That works for any architecture.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.generation.kv_slots import slot_bytes
from spear_rl.engines.scoring.logprobs import MAX_LOGITS

GIB = 1 << 30

COMPILED_SHARE = 0.72
"""A compiled layer keeps less: it recomputes what is cheap. Measured on Llama-shaped models."""

OVERHEAD = 1.2
"""GiB for the CUDA context, captured graphs and libraries' work space."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, by what they are for."""

    weights: int
    optimizer: int
    """Masters, moments and gradients."""
    slots: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.slots + self.activations + self.logits

    def as_dict(self) -> dict[str, int]:
        names = ("weights", "optimizer", "slots", "activations", "logits")
        return {name: getattr(self, name) for name in names} | {"total": self.total}


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
    """What training takes at its peak, `kept_tokens` being the tokens whose activations are held at once."""
    text = config.get_text_config()
    share = COMPILED_SHARE if compiled else 1.0
    layer = activation_bytes(text, dtype) * share
    a_token = text.num_hidden_layers * layer
    activations = kept_tokens * a_token
    if checkpointing:  # every layer's input, and one layer at a time in full
        activations = kept_tokens * (text.num_hidden_layers * text.hidden_size * dtype.itemsize + layer)
    most_logits = MAX_LOGITS * (4 if device_type == "cuda" else 1)
    return Footprint(
        weights=num_weights * dtype.itemsize,
        optimizer=num_trained * (12 if dtype == torch.float32 else 16),
        slots=slot_bytes(text, dtype) * (num_slots + 1) * slot_tokens if num_slots else 0,
        activations=int(activations),
        # Held at once: the logits, their softmax and its gradient in float32, the logits' own gradient.
        logits=min(most_logits, kept_tokens * text.vocab_size) * (3 * 4 + 2 * dtype.itemsize),
    )


def fitting_tokens(free: int, bytes_per_token: float, *, share: float, most: int) -> int:
    """Tokens whose activations fill `share` of the free memory, in steps of 1024; at least one step."""
    return int(max(min(free * share / bytes_per_token // 1024 * 1024, most), 1024))


def automatic_tokens(free: int, bytes_per_token: float, device_type: str) -> tuple[int, int]:
    """Tokens of a micro-batch, and those whose activations may be kept, where nothing is set."""
    if device_type != "cuda":  # there a micro-batch's size must not hang on the machine: its rounding would, too
        return 4096, fitting_tokens(free, bytes_per_token, share=0.6, most=65536)
    return (
        fitting_tokens(free, bytes_per_token, share=0.4, most=131072),
        fitting_tokens(free, bytes_per_token, share=0.75, most=1 << 20),
    )


def free_bytes(device: torch.device) -> int:
    """Memory that a process could still take there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [_meminfo(), _cgroup_room()]
    return min([f for f in free if f is not None], default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _meminfo() -> int | None:
    """What Linux thinks it could give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _cgroup_room() -> int | None:
    """What a container may still take of it."""
    try:
        most, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        return int(most) - int(used) + int(cached[cached.index("inactive_file") + 1])
    except (OSError, ValueError):
        return None


def activation_bytes(config: Any, dtype: torch.dtype) -> float:
    """Bytes a token leaves for the backward pass in one layer, uncompiled."""
    try:
        counted = (_kept_bytes(config, dtype, 2) - _kept_bytes(config, dtype, 1)) / _TOKENS
    except Exception:  # a model's own code may not run without content, or in fewer layers than it was made for
        counted = 0.0
    if counted > 0:
        return counted
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return float(dtype.itemsize * (12 * hidden + 4 * inner))  # a Llama's


_TOKENS = 64


def _kept_bytes(config: Any, dtype: torch.dtype, num_layers: int) -> int:
    """What autograd keeps of `_TOKENS` tokens in a model of `num_layers` layers, weights left out."""
    from transformers import AttentionInterface, AutoModel

    AttentionInterface.register("spear_probe", _probe)
    small = copy.deepcopy(config)
    small.num_hidden_layers = num_layers
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:num_layers]
    small._attn_implementation = "spear_probe"
    small.pad_token_id = None  # some models look for it, and there is nothing to be seen
    with torch.device("meta"):
        model = AutoModel.from_config(small, dtype=dtype, attn_implementation="spear_probe", trust_remote_code=False)
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
    own = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    kept: dict[Any, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in own:
            kept[base.untyped_storage()._cdata] = base.numel() * base.element_size()
            alive.append(base)  # or its storage's address would be used again
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(input_ids=ids, use_cache=False).last_hidden_state
    del out  # what it keeps has been counted
    return sum(kept.values())


def _probe(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    out: Tensor = _Probe.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out, None


class _Probe(torch.autograd.Function):
    """Keeps what fused attention keeps: its inputs, its output and one float a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.transpose(1, 2).clone()
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("counts only")
