"""Where a policy comes from: a tiny one from scratch, SmolLM2 from its package, or a transformers folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spear_rl.engines.models.lora import ADAPTER, adapter_base, adapter_in_folder, is_adapter
from spear_rl.engines.models.smollm2 import smollm2
from spear_rl.engines.models.tiny import TINY_SIZES, tiny_model, tiny_tokenizer
from spear_rl.errors import ConfigError, MissingExtraError

_log = logging.getLogger(__name__)


def model_by_name(
    name: str, *, texts: Callable[[], Sequence[str]], seed: int, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer) for `engine.model`; `texts` are what a tokenizer from scratch takes its words from."""
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers is not installed: pip install 'spear-rl[train]'")
    if name in TINY_SIZES:
        tokenizer = tiny_tokenizer(texts())
        return tiny_model(name, tokenizer, seed=seed), tokenizer
    if name == "smollm2":
        return smollm2(model_in_folder)
    if is_adapter(Path(name)):
        model, tokenizer = model_under_adapter(Path(name), trust_remote_code=trust_remote_code)
        return adapter_in_folder(model, Path(name)).merge_and_unload().requires_grad_(True), tokenizer
    if Path(name).is_dir():
        return model_in_folder(Path(name), trust_remote_code=trust_remote_code)
    known = ", ".join([*TINY_SIZES, "smollm2"])
    raise ConfigError(f"engine.model: {name!r} is no folder and no built-in model; built-in: {known}")


def model_in_folder(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """A plain transformers folder, such as a checkpoint; a vision-language model comes with its processor instead.

    Args:
        trust_remote_code: run the Python files that a folder may bring along for its model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    loaded = partial(_loaded, folder, trust_remote_code)
    try:
        if hasattr(loaded(AutoConfig), "vision_config"):
            processor = loaded(AutoProcessor)
            return loaded(AutoModelForImageTextToText, dtype=torch.float32, weights_only=True), processor
        return loaded(AutoModelForCausalLM, dtype=torch.float32, weights_only=True), loaded(AutoTokenizer)
    except ImportError as error:  # some processors want torchvision
        raise MissingExtraError(f"engine.model: {folder} needs a package: pip install 'spear-rl[vision]'") from error
    except Exception as error:  # a folder can be wrong in as many ways as there are loaders
        raise loading_error(folder, error, "does not load as a transformers model") from error


def loading_error(folder: Path | str, error: Exception, what: str) -> ConfigError:
    """What to say of a model's folder that does not load."""
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"engine.model: {folder} brings Python code of its own (auto_map in its files), which is not run; read "
            "that code, and set engine.trust_remote_code=true only if you trust it"
        )
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(f"engine.model: {folder} {what}: {reason}")


def _loaded(folder: Path, trust_remote_code: bool, kind: Any, **options: Any) -> Any:
    # Always said, never left out: with None, transformers asks on stdin.
    if trust_remote_code:
        _warn_of_own_code()
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **options)


@cache
def _warn_of_own_code() -> None:
    _log.warning("engine.trust_remote_code is on: Python code in a model's folder runs with all rights of this process")


def tiny_name(size: str, seed: int) -> str:
    """What an adapter calls a model from scratch, so that it can be made again: its size and seed."""
    return f"{size}:{seed}"


def model_under_adapter(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model that an adapter's folder names, and the tokenizer that lies beside the adapter."""
    from transformers import AutoTokenizer

    name, _ = adapter_base(folder)
    size, _, seed = name.partition(":")
    if size in TINY_SIZES and seed.isdecimal():
        tokenizer = _loaded(folder, False, AutoTokenizer)  # one of ours
        return tiny_model(size, tokenizer, seed=int(seed)), tokenizer
    below, met = Path(name), {folder.resolve()}
    while is_adapter(below):
        if below.resolve() in met:
            raise ConfigError(f"engine.model: the adapter in {folder} lies on itself: {ADAPTER} must name a model")
        met.add(below.resolve())
        below = Path(adapter_base(below)[0])
    return model_by_name(name, texts=list, seed=0, trust_remote_code=trust_remote_code)
