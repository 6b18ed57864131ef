"""`spear doctor`: the machine, what a configuration uses of it, and whether it fits into memory."""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from spear_rl.app.build.rollout import tasks_of
from spear_rl.app.build.training import algorithm_of, check_context, sampling_of, slots_within
from spear_rl.app.config import Config, Rollout
from spear_rl.engines.device import chosen_device, chosen_dtype, free_bytes
from spear_rl.engines.generation.choice import faster_generator
from spear_rl.engines.memory import (
    GIB,
    OVERHEAD,
    Footprint,
    automatic_tokens,
    fitting_tokens,
    footprint,
    training_bytes,
)
from spear_rl.engines.models.gguf import gguf_config, is_gguf
from spear_rl.engines.models.load import (
    base_of_adapter,
    check_config,
    is_function,
    loading_error,
    located,
    model_from_function,
    model_under_adapter,
)
from spear_rl.engines.models.lora import is_adapter, is_linear
from spear_rl.engines.models.positions import position_limit
from spear_rl.engines.models.tiny import FROM_SCRATCH, TINY_VISION
from spear_rl.engines.packed.attention import can_pack, has_kernel
from spear_rl.errors import ConfigError, UserError
from spear_rl.io.record import version
from spear_rl.sandbox import Interpreter, SandboxUnavailable

PACKAGES = (
    "spear-rl", "torch", "transformers", "tokenizers", "triton", "peft", "vllm", "trl", "verl", "textworld", "alfworld",
)  # fmt: skip

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
"""The shape of the built-in model, so that it need not be loaded."""


def machine() -> Iterator[tuple[str, str]]:
    """(what, value) of the machine and its software."""
    yield "python", platform.python_version()
    yield "processor", f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.0f} GiB"
    yield "compiler", shutil.which("cc") or "none: nothing can be compiled (Triton and torch.compile need one)"
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch sees none"
        yield "GPU", f"none ({why})"
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        memory = f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
        yield (
            f"GPU {number}",
            f"{name}, {memory}, capability {'.'.join(map(str, capability))}, CUDA {torch.version.cuda}",
        )
    for package in PACKAGES:
        yield package, version(package)


def sandbox() -> Iterator[tuple[str, str]]:
    """(what, value) of the isolation of untrusted code here."""
    try:
        with Interpreter(packages=(), spares=0) as interpreter:
            for name, value in interpreter.features.items():
                yield f"sandbox {name}", value
    except SandboxUnavailable as error:
        yield "sandbox", str(error)


def engine(config: Config) -> Iterator[tuple[str, str]]:
    """(what, value) of how this configuration runs on this machine."""
    settings = config.engine
    device, dtype, model, packed = _choices(config)
    if model is not None:
        check_context(config, model.config)
    yield "model", settings.model if model is None else f"{settings.model} ({type(model).__name__})"
    yield "device", str(device)
    yield "dtype", f"{str(dtype).removeprefix('torch.')}, weights learned in float32"
    if packed:
        way = "packed: rows end to end, flash kernels" if device.type == "cuda" else "packed (slow on a CPU)"
    elif model is not None and hasattr(model.config, "vision_config"):
        way = "padded: rows have pictures"
    elif model is not None and not can_pack(model):
        way = f"padded: {type(model).__name__} does not use plain causal attention"
    else:
        way = "padded: scaled_dot_product_attention"
    yield "attention", way
    generator, why = _generator(config, device, dtype, model)
    if generator == "vllm" and not why:
        has_it = find_spec("vllm") is not None
        yield "generation", "vLLM, in this process" if has_it else "vLLM, which is not installed: spear-rl[vllm]"
    else:
        way = "streamed, captured in CUDA graphs" if packed else "batch by batch"
        yield "generation", f"{'vLLM, in this process' if generator == 'vllm' else way}{why and f' ({why})'}"
    trained = f"an adapter of rank {settings.lora_rank}" if settings.lora_rank else "all weights"
    yield "trained", trained + (", activations recomputed" if settings.checkpointing else "")


def tasks(config: Config) -> tuple[str, str]:
    """(the tasks that this configuration plays, why there are none; empty if there are)."""
    splits = dict.fromkeys(["train", *([config.eval.split, *config.eval.also] if config.eval.tasks else [])])
    try:
        found = [f"{len(tasks_of(config, split)):,} {split}" for split in splits]
    except UserError as error:
        return f"{config.task.env}: none", str(error)
    return f"{config.task.env}: {', '.join(found)}", ""


def estimate(config: Config, *, free: int | None = None) -> tuple[Footprint, int, int]:
    """(peak memory of training, free bytes, the largest engine.micro_batch_tokens that fits; 0 if none does).

    The peak is with engine.micro_batch_tokens, or with the number that would be chosen.
    """
    settings = config.engine
    device, dtype, model, packed = _choices(config)
    policy, trained = _num_weights(model, settings.lora_rank, settings.lora_targets)
    algorithm, weights = algorithm_of(config), policy
    if algorithm.critic:  # a second model of the same size
        weights, trained = 2 * weights, 2 * trained
    if getattr(algorithm.loss, "kl", 0.0):  # a frozen copy
        weights += policy
    is_gpu = device.type == "cuda"
    if free is None:
        free = free_bytes(device) - int(OVERHEAD * GIB if is_gpu else 0)
    is_vllm = _generator(config, device, dtype, model)[0] == "vllm"
    if is_vllm and is_gpu:
        free -= int(settings.vllm_memory * torch.cuda.mem_get_info(device)[1])

    rollout, left = config.rollout, free - training_bytes(weights, trained, dtype) if is_gpu else None
    num_slots, slot_tokens = slots_within(left, config, model.config, dtype)
    longest = min(rollout.max_context + rollout.max_new_tokens, position_limit(model.config) or 1 << 24)

    def taken(tokens: int) -> Footprint:
        return footprint(
            model.config,
            num_weights=weights,
            num_trained=trained,
            dtype=dtype,
            kept_tokens=max(tokens, longest),  # a row is never divided
            num_slots=num_slots if packed and not is_vllm else 0,
            slot_tokens=slot_tokens,
            compiled=packed and is_gpu,
            checkpointing=settings.checkpointing,
            device_type=device.type,
        )

    base = taken(0)
    room = free - (base.total - base.activations - base.logits + taken(1 << 20).logits)
    a_token = base.activations / longest
    most = fitting_tokens(room, a_token, share=0.9, most=1 << 20) if room * 0.9 > base.activations else 0
    automatic = max(automatic_tokens(max(room, 0), a_token, device.type))
    return taken(settings.micro_batch_tokens or automatic), free, most


def model_config(name: str, *, revision: str = "", trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a model, without its weights."""
    from transformers import AutoConfig

    if name in FROM_SCRATCH:
        raise ConfigError(f"engine.model={name} takes a few megabytes; name smollm2, a folder or a hub id")
    if name == "smollm2":
        shape = dict(SMOLLM2)
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    place = located(name, revision, with_weights=False, with_code=trust_remote_code)
    if is_adapter(place):
        base, commit = base_of_adapter(place)
        if base.partition(":")[0] in FROM_SCRATCH:  # the adapter's tokenizer says how large it is
            return model_under_adapter(place)[0].config
        return model_config(base, revision=commit, trust_remote_code=trust_remote_code)
    if is_gguf(place):
        return gguf_config(place)
    check_config(name, place)
    try:
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # a folder can be wrong in as many ways as there are loaders
        raise loading_error(name, error, "has no readable config") from error


def empty_model(name: str, *, revision: str = "", trust_remote_code: bool = False) -> Any:
    """A model on the meta device: shapes without memory."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if is_function(name):
        return model_from_function(name, seed=0)[0]
    config = model_config(name, revision=revision, trust_remote_code=trust_remote_code)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise loading_error(name, error, "is no causal language model") from error


def advice(config: Config, taken: Footprint, free: int, most: int) -> str:
    """One sentence: it fits, or what to set so that it does."""
    if taken.total <= free:
        return f"fits: {taken.total / GIB:.1f} of {free / GIB:.1f} GiB"
    way_out = "take a smaller model or a larger machine"
    if most:
        way_out = f"set engine.micro_batch_tokens={most}"
    elif not config.engine.checkpointing and taken.total - taken.activations - taken.logits < free:
        way_out = "set engine.checkpointing=true and ask again"
    elif not config.engine.lora_rank:  # weights and optimizer alone do not fit
        way_out = "set engine.lora_rank=16 and ask again"
    if not most and config.rollout.max_context > Rollout().max_context:
        way_out = f"lower rollout.max_context (it is {config.rollout.max_context}), or {way_out}"
    return f"does not fit: {way_out}"


def _choices(config: Config) -> tuple[torch.device, torch.dtype, Any, bool]:
    """(device, dtype, empty model or None for a tiny one, whether rows are packed), as the engine will choose them."""
    settings = config.engine
    device = chosen_device(settings.device)
    dtype = chosen_dtype(settings.dtype, device)
    is_tiny = settings.model in FROM_SCRATCH
    model = None
    if not is_tiny:
        trusted = settings.trust_remote_code
        model = empty_model(settings.model, revision=settings.revision, trust_remote_code=trusted)
    reads_pictures = settings.model == TINY_VISION or hasattr(getattr(model, "config", None), "vision_config")
    can = has_kernel(device, dtype) and not reads_pictures and (model is None or can_pack(model))
    return device, dtype, model, settings.attention == "packed" or (settings.attention == "auto" and can)


def _generator(config: Config, device: torch.device, dtype: torch.dtype, model: Any) -> tuple[str, str]:
    """(native or vllm, why auto takes it; empty if it is set)."""
    settings = config.engine
    if settings.generator != "auto":
        return settings.generator, ""
    if model is None:
        return "native", "auto: a tiny model"
    padded, memory = settings.attention == "padded", settings.vllm_memory
    choice = faster_generator(
        model, device=device, dtype=dtype, padded=padded, sampling=sampling_of(config), vllm_memory=memory
    )
    return choice.name, f"auto: {choice.reason}"


def _num_weights(model: Any, lora_rank: int, lora_targets: Sequence[str]) -> tuple[int, int]:
    """Number of (all, trained) parameters."""
    weights = sum(p.numel() for p in model.parameters())
    if not lora_rank:
        return weights, weights
    head = model.get_output_embeddings()
    trained = 0
    for name, module in model.named_modules():
        is_named = any(f".{name}".endswith(f".{target}") for target in lora_targets)
        if is_linear(module) and (is_named if lora_targets else module is not head):
            trained += lora_rank * sum(module.weight.shape)
    return weights + trained, trained
