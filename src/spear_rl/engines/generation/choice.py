"""engine.generator=auto: our own generator or vLLM, whichever is faster for a model. docs/gpu.md says why."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch

from spear_rl.engines.packed.attention import can_pack, has_kernel
from spear_rl.rollout.generator import Sampling

NATIVE_UP_TO = 2_000_000_000
"""Parameters up to which ours is the faster one. Measured at 0.135 billion, where it generates 2.2 times as many tokens
per second: vLLM takes 4.4 ms longer for a step of 256 conversations. An estimate from there, not measured: if that is
host work, which does not grow with the model, a step of ours (3.7 ms at 0.135 billion, in proportion 55 ms at 2
billion) is then so long that the kernels decide. Ties go to ours, which needs no second copy of the weights."""

CACHE_SHARE = 0.25
"""Of vLLM's memory, what its KV cache and activations need at least; the rest may be weights."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen generator and the reason for it."""

    name: Literal["native", "vllm"]
    reason: str

    @property
    def sentence(self) -> str:
        return f"engine.generator=auto takes {self.name}: {self.reason}"


def faster_generator(
    model: Any, *, device: torch.device, dtype: torch.dtype, padded: bool, sampling: Sampling, vllm_memory: float
) -> Choice:
    """The rule; native where vLLM is missing, cannot do it, or was never compared.

    Args:
        model: with or without content (on the meta device).
        padded: rows are padded by the user's wish.
        vllm_memory: share of the GPU that vLLM would get.
    """
    if device.type != "cuda":
        return Choice("native", "without a GPU vLLM brings nothing")
    if hasattr(model.config, "vision_config"):
        return Choice("native", "vLLM is given no pictures here")
    size = sum(p.numel() for p in model.parameters())
    has, limit = f"the model has {size / 1e9:.2f} billion parameters", f"up to {NATIVE_UP_TO / 1e9:g} billion"
    streams = not padded and has_kernel(device, dtype) and can_pack(model)
    if streams and size <= NATIVE_UP_TO:
        return Choice("native", f"{has}, and {limit} ours is faster")
    kind = type(model).__name__
    if fault := _fault(kind, size * dtype.itemsize, device, sampling, vllm_memory):
        return Choice("native", fault)
    if not streams:
        return Choice("vllm", f"ours would generate batch by batch with {kind}, without continuous batching")
    return Choice("vllm", f"{has}, and only {limit} ours is faster")


def _fault(kind: str, weights: int, device: torch.device, sampling: Sampling, share: float) -> str:
    """Why vLLM cannot be taken; empty if it can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed (pip install 'spear-rl[vllm]')"
    if sampling.top_p < 1 and sampling.temperature not in (0.0, 1.0):
        return "vLLM reports no log-probabilities for rollout.top_p and rollout.temperature as set"
    room = share * torch.cuda.mem_get_info(device)[1]
    if weights > (1 - CACHE_SHARE) * room:
        return f"its weights leave no room for vLLM in engine.vllm_memory={share:g} of the GPU"
    try:
        known = import_module("vllm").ModelRegistry.get_supported_archs()
    except Exception as error:  # a broken installation can fail in any way, and ours needs none
        return f"vLLM cannot be imported ({type(error).__name__})"
    return "" if kind in known else f"vLLM does not have {kind}"
