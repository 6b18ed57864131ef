"""Where a policy comes from: a tiny one from scratch, SmolLM2 from its package, or a transformers folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spear_rl.engines.lora import adapter_base, adapter_in_folder, is_adapter
from spear_rl.engines.smollm2 import smollm2
from spear_rl.engines.tiny import TINY_SIZES, tiny_model, tiny_tokenizer
from spear_rl.errors import ConfigError, MissingExtraError


def model_by_name(name: str, *, texts: Callable[[], Sequence[str]], seed: int) -> tuple[Any, Any]:
    """(model, tokenizer) for `engine.model`; `texts` are what a tokenizer from scratch takes its words from."""
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers is not installed: pip install 'spear-rl[train]'")
    if name in TINY_SIZES:
        tokenizer = tiny_tokenizer(texts())
        return tiny_model(name, tokenizer, seed=seed), tokenizer
    if name == "smollm2":
        return smollm2(model_in_folder)
    if is_adapter(Path(name)):
        model, tokenizer = model_under_adapter(Path(name))
        return adapter_in_folder(model, Path(name)).merge_and_unload().requires_grad_(True), tokenizer
    if Path(name).is_dir():
        return model_in_folder(Path(name))
    known = ", ".join([*TINY_SIZES, "smollm2"])
    raise ConfigError(f"engine.model: {name!r} is no folder and no built-in model; built-in: {known}")


def model_in_folder(folder: Path) -> tuple[Any, Any]:
    """A plain transformers folder, such as a checkpoint; a vision-language model comes with its processor instead."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    try:
        if hasattr(AutoConfig.from_pretrained(folder, local_files_only=True), "vision_config"):
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
            return AutoModelForImageTextToText.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            ), processor
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:  # some processors want torchvision
        raise MissingExtraError(f"engine.model: {folder} needs a package: pip install 'spear-rl[vision]'") from error
    except Exception as error:  # a folder can be wrong in as many ways as there are loaders
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"engine.model: {folder} does not load as a transformers model: {reason}") from error


def tiny_name(size: str, seed: int) -> str:
    """What an adapter calls a model from scratch, so that it can be made again: its size and seed."""
    return f"{size}:{seed}"


def model_under_adapter(folder: Path) -> tuple[Any, Any]:
    """The model that an adapter's folder names, and the tokenizer that lies beside the adapter."""
    from transformers import AutoTokenizer

    name, _ = adapter_base(folder)
    size, _, seed = name.partition(":")
    if size in TINY_SIZES and seed.isdecimal():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tiny_model(size, tokenizer, seed=int(seed)), tokenizer
    return model_by_name(name, texts=list, seed=0)
