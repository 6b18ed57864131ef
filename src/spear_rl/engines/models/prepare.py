"""Prepares a loaded model for an engine: packed or padded rows, its layers, its end tokens, batches that fit."""

import copy
import logging
from contextlib import suppress
from typing import Any

import torch

from spear_rl.engines.device import free_bytes
from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.memory import automatic_tokens, footprint, memory_guard
from spear_rl.engines.models.master_weights import MasterWeights
from spear_rl.engines.packed.attention import detach_cache, has_kernel, use_packed_attention
from spear_rl.engines.packed.parity import disagreement
from spear_rl.errors import ConfigError, UserError
from spear_rl.rollout.rendering.renderer import ChatRenderer

logger = logging.getLogger(__name__)


def on_device(model: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> Any:
    """The model on the device, in eval mode; frozen weights are cast before they move, which halves the peak memory."""
    for parameter in model.parameters():
        if dtype is not None and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model.to(device or model.device).eval()


def has_plain_head(model: Any) -> bool:
    """Whether logits are just the output embedding of the last hidden state (no soft cap, no scale); NaN is refused."""
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    head = model.get_output_embeddings()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        if expected.isnan().any():  # a model may give tokens that it never writes -inf
            name = model.name_or_path or type(model).__name__
            raise UserError(f"engine.model: the logits of {name} are not numbers: its weights are damaged")
        hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if head is None or hidden is None or hidden.shape[-1] != getattr(head, "in_features", None):
            return False
        got = head(hidden)
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


def packs_rows(
    model: Any, tokenizer: Any, asked: bool | None, *, plain_head: bool, generates: bool, has_images: bool
) -> bool:
    """Whether to pack rows: only where results agree with the model's own, and by default only if it is fast."""
    if has_images:
        if asked:
            raise UserError("engine.attention=packed: rows with images are padded; leave it out")
        return False
    is_fast = has_kernel(model.device, model.get_input_embeddings().weight.dtype)
    if not (is_fast if asked is None else asked):
        return False
    with memory_guard("testing packed attention", "the model leaves no room for anything else"):
        reason = disagreement(model, tokenizer, plain_head=plain_head, generates=generates)
    if reason and asked:
        raise UserError(f"engine.attention=packed: {reason}; set engine.attention=padded")
    if reason:
        logger.warning("rows are padded, which is slower: %s", reason)
    return not reason


def token_limits(
    micro_batch_tokens: int | None, max_kept_tokens: int | None, model: Any, masters: MasterWeights,
    decoder: SlotDecoder | None, compiled: bool, checkpointing: bool,
) -> tuple[int, int]:  # fmt: skip
    """(tokens per micro-batch, tokens whose activations are kept): as asked, or what fits into memory for None."""
    if micro_batch_tokens is not None and max_kept_tokens is not None:
        return micro_batch_tokens, max_kept_tokens
    device = model.device
    taken = footprint(
        model.config,
        num_weights=0,
        num_trained=sum(p.numel() for p in masters.trained),
        dtype=model.get_input_embeddings().weight.dtype,
        kept_tokens=1024,
        num_slots=decoder.slots.count if decoder else 0,
        slot_tokens=decoder.slots.length if decoder else 0,
        compiled=compiled,
        checkpointing=checkpointing,
        device_type=device.type,
    )
    free = free_bytes(device) - (taken.total - taken.activations)
    micro, kept = automatic_tokens(free, taken.activations / 1024, device.type)
    return (
        micro if micro_batch_tokens is None else micro_batch_tokens,
        kept if max_kept_tokens is None else max_kept_tokens,
    )


def frozen_copy(model: Any, like: Any, *, packed: bool) -> Any:
    """A copy of `model` that never trains, on the device and in the precision of `like`."""
    frozen = copy.deepcopy(model)
    detach_cache(frozen)
    frozen = frozen.eval().requires_grad_(False).to(like.device)
    MasterWeights(frozen, like.get_input_embeddings().weight.dtype)
    prepare_layers(frozen, packed=packed, compiled=False, checkpointing=False)
    return frozen


def prepare_layers(model: Any, *, packed: bool, compiled: bool, checkpointing: bool) -> None:
    """Packed attention, gradient checkpointing, compiled layers, as asked."""
    if packed:
        use_packed_attention(model)
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(f"engine.checkpointing: {type(model).__name__} does not support it; leave it out")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        kinds, options = set(model._no_split_modules or ()), _compiler_options()
        for module in model.modules():
            if type(module).__name__ in kinds:
                # The layers are alike and sizes are symbolic, so only the first one is compiled, once.
                module.compile(dynamic=True, options=options)


def _compiler_options() -> dict[str, Any]:
    """Without a fusion that asks how many tokens there are, and compiles anew for micro-batches of another size."""
    from torch._inductor import config

    fusion = "mix_order_reduction"  # from torch 2.10 on
    return {f"triton.{fusion}": False} if hasattr(config.triton, fusion) else {}


def checkpoint_layers(model: Any) -> None:
    """transformers checkpoints in training mode only; dropout stays off."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(module, name, 0.0)


def check_tokens(model: Any, tokenizer: Any, name: object) -> None:
    """Refuse a tokenizer without an end token, or with tokens in its prompts that the model has no embeddings for."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"engine.model: the tokenizer of {name} has no end token, so no answer would end")
    ids = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    if tokenizer.chat_template:
        with suppress(ConfigError):  # a template for other conversations
            ids += ChatRenderer(tokenizer).prompt([{"role": "user", "content": "?"}])
    rows = model.get_input_embeddings().weight.shape[0]
    if beyond := [number for number in ids if number is not None and number >= rows]:
        token = tokenizer.convert_ids_to_tokens(beyond[0])
        raise ConfigError(
            f"engine.model: the tokenizer of {name} writes {token} as number {beyond[0]}, and the model has {rows} "
            "tokens: take the model's own tokenizer, or resize its embeddings"
        )


def all_end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's, the model's (some have several), the chat template's."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = own if isinstance(own, list) else [own]
    templates = (
        ChatRenderer(tokenizer).end_id if tokenizer.chat_template and tokenizer.eos_token_id is not None else None
    )
    return list(dict.fromkeys(t for t in [tokenizer.eos_token_id, *ends, templates] if t is not None))
