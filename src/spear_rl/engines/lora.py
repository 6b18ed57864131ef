"""Low-rank adapters through peft: the model's own weights stay as they are, and little memory is needed to train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from spear_rl.errors import ConfigError, MissingExtraError

ADAPTER = "adapter_config.json"
_PREFIX = "base_model.model."


def with_adapter(model: Any, *, rank: int, alpha: int, targets: Sequence[str], name: str) -> Any:
    """`model` inside a fresh adapter of rank `rank`, on the linear layers whose names end like one of `targets`.

    Args:
        targets: empty means all linear layers but the output.
        name: what the adapter's config calls its base model, for those who load it with peft.
    """
    _require_peft()
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM")
    config.base_model_name_or_path = name
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"engine.lora_targets: {error}") from error


def adapter_in_folder(model: Any, folder: Path) -> Any:
    """`model` inside an adapter that was saved before, ready to be trained on."""
    _require_peft()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def save_adapter(adapter: Any, folder: Path, exact: dict[str, Tensor]) -> None:
    """The adapter alone, as peft writes and reads it; `exact` weights go in place of the rounded ones."""
    weights = {name: weight for name, weight in adapter.state_dict().items() if "lora_" in name}
    weights |= {_PREFIX + name: weight for name, weight in exact.items()}
    adapter.save_pretrained(folder, state_dict=weights)


def merged_weights(model: Any, exact: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A model's weights under its plain names, adapters added in, for a sampler that knows no adapters."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, weight in model.state_dict().items():
        if ".lora_" in name or name.endswith(("lora_A", "lora_B")):
            continue
        plain = name.replace(".base_layer.", ".")
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None and name.endswith(".base_layer.weight"):
            weight = weight + layer.get_delta_weight("default").to(weight.dtype)
        yield plain, exact.get(name, weight)


def _require_peft() -> None:
    if find_spec("peft") is None:
        raise MissingExtraError("engine.lora_rank needs its extra: pip install 'spear-rl[lora]'")
