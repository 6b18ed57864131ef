"""`spear doctor`: what this machine has, what a configuration will use of it, and whether it fits into memory."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from spear_rl.config import Config
from spear_rl.engines.attention import has_kernel
from spear_rl.engines.memory import GIB, OVERHEAD, Footprint, fitting_tokens, footprint
from spear_rl.engines.place import chosen_device, chosen_dtype
from spear_rl.engines.tiny import TINY_SIZES
from spear_rl.errors import ConfigError

PACKAGES = (
    "spear-rl", "torch", "transformers", "tokenizers", "triton", "peft", "vllm", "trl", "verl", "textworld", "alfworld",
)  # fmt: skip

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of the built-in model, so that nothing needs to be loaded to judge it."""


def machine() -> Iterator[tuple[str, str]]:
    """(what, value) of the machine and its software."""
    yield "python", platform.python_version()
    yield "processor", f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    yield "memory", f"{_host_memory() / GIB:.0f} GiB"
    yield "compiler", shutil.which("cc") or "none: nothing can be compiled (Triton and torch.compile need one)"
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch sees none"
        yield "GPU", f"none ({why})"
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        yield (
            f"GPU {number}",
            f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, capability {capability[0]}.{capability[1]}, "
            f"CUDA {torch.version.cuda}",
        )
    for package in PACKAGES:
        yield package, _version(package)


def engine(config: Config) -> Iterator[tuple[str, str]]:
    """(what, value) of the way this configuration would run here."""
    settings = config.engine
    device = chosen_device(settings.device)
    dtype = chosen_dtype(settings.dtype, device)
    packed = settings.attention == "packed" or (settings.attention == "auto" and has_kernel(device, dtype))
    yield "model", settings.model
    yield "device", str(device)
    yield "dtype", f"{str(dtype).removeprefix('torch.')}, weights learned in float32"
    if packed:
        yield (
            "attention",
            "packed: rows end to end, flash kernels" if device.type == "cuda" else "packed (slow on a CPU)",
        )
    else:
        yield "attention", "padded: scaled_dot_product_attention"
    if settings.generator == "vllm":
        has_it = find_spec("vllm") is not None
        yield "generation", "vLLM, in this process" if has_it else "vLLM, which is not installed: spear-rl[vllm]"
    else:
        yield "generation", "streamed, captured in CUDA graphs" if packed else "batch by batch"
    trained = f"an adapter of rank {settings.lora_rank}" if settings.lora_rank else "all weights"
    yield "trained", trained + (", activations recomputed" if settings.checkpointing else "")


def estimate(config: Config, *, free: int | None = None) -> tuple[Footprint, int, int]:
    """(what training would take, bytes there are, the largest engine.micro_batch_tokens that fits; 0 if none does).

    The footprint is that of engine.micro_batch_tokens, or of what automatic would choose.
    """
    settings = config.engine
    device = chosen_device(settings.device)
    dtype = chosen_dtype(settings.dtype, device)
    packed = settings.attention == "packed" or (settings.attention == "auto" and has_kernel(device, dtype))
    shape = model_config(settings.model)
    weights, trained = _num_weights(shape, settings.lora_rank)
    is_gpu = device.type == "cuda"
    if free is None:
        free = int(torch.cuda.mem_get_info(device)[0] - OVERHEAD * GIB) if is_gpu else _host_memory()
    if settings.generator == "vllm" and is_gpu:
        free -= int(settings.vllm_memory * torch.cuda.mem_get_info(device)[1])

    def taken(tokens: int) -> Footprint:
        return footprint(
            shape,
            num_weights=weights,
            num_trained=trained,
            dtype=dtype,
            kept_tokens=tokens,
            num_slots=min(config.rollout.num_tasks * config.rollout.group_size, 256) if packed else 0,
            slot_tokens=config.rollout.max_context + config.rollout.max_new_tokens,
            compiled=packed and is_gpu,
            checkpointing=settings.checkpointing,
            device_type=device.type,
        )

    base = taken(1024)
    room = free - (base.total - base.activations)
    most = fitting_tokens(room, base.activations / 1024, share=0.9, most=1 << 20) if room > base.activations else 0
    automatic = fitting_tokens(max(room, 0), base.activations / 1024, share=0.3, most=65536) if is_gpu else 4096
    return taken(settings.micro_batch_tokens or automatic), free, most


def model_config(name: str) -> Any:
    """The transformers configuration of a model, without its weights."""
    from transformers import AutoConfig

    if name in TINY_SIZES:
        raise ConfigError(f"engine.model={name} takes a few megabytes; name smollm2 or a transformers folder")
    if name == "smollm2":
        shape = dict(SMOLLM2)
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    if not Path(name).is_dir():
        raise ConfigError(f"engine.model: {name!r} is no folder and no built-in model")
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # a folder can be wrong in as many ways as there are loaders
        raise ConfigError(f"engine.model: {name} has no readable config: {str(error).splitlines()[0]}") from error


def advice(config: Config, taken: Footprint, free: int, most: int) -> str:
    """One sentence: it fits, or what to set so that it does."""
    if taken.total <= free:
        return f"fits: {taken.total / GIB:.1f} of {free / GIB:.1f} GiB"
    if most:
        return f"does not fit: set engine.micro_batch_tokens={most}"
    if not config.engine.checkpointing:
        return "does not fit: set engine.checkpointing=true and ask again"
    if not config.engine.lora_rank:
        return "does not fit: set engine.lora_rank=16 and ask again"
    return "does not fit: take a smaller model or a larger GPU"


def _num_weights(shape: Any, lora_rank: int) -> tuple[int, int]:
    """(all, trained) parameters of a model of this shape."""
    from torch import nn
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    weights = sum(p.numel() for p in model.parameters())
    if not lora_rank:
        return weights, weights
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return weights, sum(lora_rank * (m.in_features + m.out_features) for m in linear)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
