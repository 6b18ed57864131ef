"""Loads a policy: from scratch, SmolLM2 from its package, a transformers folder, or a user's own function."""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from spear_rl.engines.models.lora import ADAPTER, adapter_base, adapter_in_folder, is_adapter
from spear_rl.engines.models.smollm2 import smollm2
from spear_rl.engines.models.tiny import FROM_SCRATCH, TINY_SIZES, TINY_VISION, tiny_model, tiny_tokenizer
from spear_rl.engines.models.tiny_vision import tiny_processor, tiny_vision_model
from spear_rl.errors import ConfigError, MissingExtraError, UserError
from spear_rl.io.escaping import in_words
from spear_rl.settings.names import loaded

_log = logging.getLogger(__name__)


def model_by_name(
    name: str, *, texts: Callable[[], Sequence[str]], seed: int, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer) of a built-in model or a folder; `texts` give a tokenizer from scratch its words.

    A vision-language model comes with its processor instead of the tokenizer.
    """
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers is not installed: pip install 'spear-rl[train]'")
    if name in TINY_SIZES:
        tokenizer = tiny_tokenizer(texts())
        return tiny_model(name, tokenizer, seed=seed), tokenizer
    if name == TINY_VISION:
        processor = tiny_processor(texts())
        return tiny_vision_model(processor, seed=seed), processor
    if name == "smollm2":
        return smollm2(model_in_folder)
    if is_adapter(Path(name)):
        model, tokenizer = model_under_adapter(Path(name), trust_remote_code=trust_remote_code)
        return adapter_in_folder(model, Path(name)).merge_and_unload().requires_grad_(True), tokenizer
    if Path(name).is_dir():
        return model_in_folder(Path(name), trust_remote_code=trust_remote_code)
    known = f"built-in: {', '.join([*FROM_SCRATCH, 'smollm2'])}; or your own: package.module:function"
    raise ConfigError(f"engine.model: {name!r} is no folder and no built-in model; {known}")


def is_function(name: str) -> bool:
    """Whether engine.model names a user's own function, `package.module:function`."""
    return ":" in name and not Path(name).exists()


def model_from_function(name: str, *, seed: int) -> tuple[Any, Any]:
    """(model, tokenizer) that a user's own function returns; torch's random weights in it come from `seed`.

    Only for a name that the user gave: importing a module runs its code.
    """
    from transformers import PreTrainedModel

    make = loaded(name, kind="model", example="my_package.models:make")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, which would end the run as if it had succeeded
        raise ConfigError(f"engine.model={name}: calling it raised {in_words(error)}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], PreTrainedModel)):
        raise ConfigError(
            f"engine.model={name}: it returned {type(made).__name__}, not (model, tokenizer) of transformers"
        )
    return made


def with_saved_weights(model: Any, folder: Path) -> Any:
    """A model of the same class with the weights that were saved in `folder`."""
    try:
        return _from_pretrained(folder, False, type(model), dtype=torch.float32, weights_only=True)
    except Exception as error:  # loaders raise many types
        raise loading_error(folder, error, f"does not load as a {type(model).__name__}") from error


def model_in_folder(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """(model, tokenizer) of a transformers folder; a vision-language model comes with its processor instead.

    Args:
        trust_remote_code: run Python files of the folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    from_folder = partial(_from_pretrained, folder, trust_remote_code)
    try:
        if hasattr(from_folder(AutoConfig), "vision_config"):
            processor = from_folder(AutoProcessor)
            return from_folder(AutoModelForImageTextToText, dtype=torch.float32, weights_only=True), processor
        return from_folder(AutoModelForCausalLM, dtype=torch.float32, weights_only=True), from_folder(AutoTokenizer)
    except ImportError as error:  # some processors need torchvision
        raise MissingExtraError(f"engine.model: {folder} needs a package: pip install 'spear-rl[vision]'") from error
    except Exception as error:  # loaders raise many types
        raise loading_error(folder, error, "does not load as a transformers model") from error


def loading_error(folder: Path | str, error: Exception, what: str) -> ConfigError:
    """The error for a model's folder that does not load."""
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"engine.model: {folder} brings Python code of its own (auto_map in its files), which is not run; read "
            "that code, and set engine.trust_remote_code=true only if you trust it"
        )
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(f"engine.model: {folder} {what}: {reason}")


def _from_pretrained(folder: Path, trust_remote_code: bool, kind: Any, **options: Any) -> Any:
    if trust_remote_code:
        _warn_of_remote_code()
    # trust_remote_code is always given: with None, transformers asks on stdin.
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **options)


@cache
def _warn_of_remote_code() -> None:
    _log.warning("engine.trust_remote_code is on: Python code in a model's folder runs with all rights of this process")


def tiny_name(size: str, seed: int) -> str:
    """The base model's name in an adapter of a model from scratch, enough to build it again."""
    return f"{size}:{seed}"


def model_under_adapter(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model that an adapter's folder names, and the tokenizer in that folder."""
    from transformers import AutoProcessor, AutoTokenizer

    name, _ = adapter_base(folder)
    size, _, seed = name.partition(":")
    if size in TINY_SIZES and seed.isdecimal():
        tokenizer = _from_pretrained(folder, False, AutoTokenizer)
        return tiny_model(size, tokenizer, seed=int(seed)), tokenizer
    if size == TINY_VISION and seed.isdecimal():
        processor = _from_pretrained(folder, False, AutoProcessor)
        return tiny_vision_model(processor, seed=int(seed)), processor
    below, met = Path(name), {folder.resolve()}
    while is_adapter(below):
        if below.resolve() in met:
            raise ConfigError(f"engine.model: the adapter in {folder} lies on itself: {ADAPTER} must name a model")
        met.add(below.resolve())
        below = Path(adapter_base(below)[0])
    return model_by_name(name, texts=list, seed=0, trust_remote_code=trust_remote_code)
