"""LoRA adapters through peft: the model's own weights stay fixed, and training needs little memory."""

import json
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spear_rl.engines.models.hub import ADAPTER_WEIGHTS
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.io.files import loading_reason, unreadable_file

ADAPTER = "adapter_config.json"
"""The file that an adapter's folder has and a model's has not."""


def with_adapter(
    model: Any, *, rank: int, alpha: int, targets: Sequence[str], name: str, revision: str = "", seed: int = 0
) -> Any:
    """`model` inside a new adapter on the linear layers whose names end with one of `targets`.

    Args:
        targets: empty means all linear layers but the output.
        name: of the base model in the adapter's config.
        revision: of the base model, if it is one of the hub.
        seed: of the adapter's first matrix; the second one starts at 0.
    """
    _require_peft()
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapter = get_peft_model(model, config)
    except ValueError as error:
        layers = sorted({path.rpartition(".")[2] for path, module in model.named_modules() if is_linear(module)})
        raise ConfigError(
            f"engine.lora_targets: {', '.join(targets)} cannot have an adapter in {type(model).__name__}; its linear "
            f"layers are {', '.join(layers)}"
        ) from error
    config.base_model_name_or_path, config.revision = name, revision or None
    return adapter


def adapter_in_folder(model: Any, folder: Path) -> Any:
    """`model` inside a saved adapter, trainable; its vocabulary grows if the adapter was saved with a larger one."""
    _require_peft()
    from peft import PeftModel

    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise ConfigError(f"engine.model: the adapter in {folder} has no weights: {ADAPTER_WEIGHTS[0]} is missing")
    try:
        if size := _saved_vocabulary(model, folder):
            with torch.random.fork_rng(devices=[]):  # new rows are drawn, and then replaced by the adapter's
                model.resize_token_embeddings(size, mean_resizing=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # which are refused below
            adapter = PeftModel.from_pretrained(model, folder, is_trainable=True)
            keys = adapter.load_adapter(folder, "default", is_trainable=True)  # says which; the first time does not
    except Exception as error:  # loaders raise many types
        name = type(model).__name__
        reason = unreadable_file(folder) or loading_reason(error)
        raise ConfigError(f"the adapter in {folder} does not load onto {name}: {reason}") from error
    extra = [key for key in keys.unexpected_keys if "lora_" in key]
    said = "lacks weights that its {} asks for" if keys.missing_keys else "has weights that its {} does not ask for"
    if names := keys.missing_keys or extra:
        raise ConfigError(f"engine.model: the adapter in {folder} {said.format(ADAPTER)}, such as {min(names)}")
    return adapter


def _saved_vocabulary(model: Any, folder: Path) -> int:
    """Rows of the embeddings that an adapter brings along, if they are not as many as the model's; else 0."""
    from safetensors import safe_open

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if module in ends}
    file = folder / ADAPTER_WEIGHTS[0]
    if not file.is_file():
        return 0
    with safe_open(file, "pt") as weights:
        whole = [key for key in weights.keys() if key.split(".")[-2:] in [[name, "weight"] for name in names]]  # noqa: SIM118
        rows = {int(weights.get_slice(key).get_shape()[0]) for key in whole}
    return max(rows) if rows and rows != {ends[0].weight.shape[0]} else 0


def merged(adapter: Any) -> Any:
    """The model with its adapter merged, all weights trainable; embeddings that the adapter changes are untied."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = adapter.get_base_model()
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    first, last = (getattr(end, "base_layer", end) for end in ends)
    if any(isinstance(end, BaseTunerLayer) for end in ends) and first.weight is last.weight:
        last.weight = nn.Parameter(last.weight.detach().clone())
        untie(model)
    return adapter.merge_and_unload().requires_grad_(True)


def untie(model: Any) -> None:
    """Have the configuration say that input and output embeddings are two matrices."""
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / ADAPTER).is_file()


def adapter_base(folder: Path) -> tuple[str, int]:
    """(name of the base model, rank) of an adapter's folder."""
    return adapter_origin(folder)[:2]


def adapter_origin(folder: Path) -> tuple[str, int, str]:
    """(name of the base model, rank, revision of a base model of the hub or "") of an adapter's folder."""
    try:
        settings = json.loads((folder / ADAPTER).read_text("utf-8"))
        if settings.get("megatron_config"):
            raise ValueError("megatron_config makes peft import a module that the file names")
        if (kind := settings.get("peft_type", "LORA")) != "LORA":
            raise ValueError(f"it is of the kind {kind}, and only LoRA is read here")
        if not settings["base_model_name_or_path"]:
            raise ValueError("base_model_name_or_path is empty")
        return str(settings["base_model_name_or_path"]), int(settings["r"]), str(settings.get("revision") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"engine.model: {folder / ADAPTER} is not an adapter's config that is read here: {error}"
        ) from error


def save_adapter(adapter: Any, folder: Path, exact: dict[str, Tensor]) -> None:
    """Save the adapter alone, in peft's format; `exact` weights replace the rounded ones."""
    weights = {name: weight for name, weight in adapter.state_dict().items() if "lora_" in name}
    weights |= {f"base_model.model.{name}": weight for name, weight in exact.items()}
    # Embeddings are not trained here; to find that out, peft would look for the base model, even on the network.
    adapter.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)


def is_linear(module: Any) -> bool:
    """Whether a layer can have an adapter; GPT-2 has its own kind."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def merged_weights(model: Any, exact: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A model's weights under its plain names with adapters merged, for a sampler without adapters."""
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
