"""Loads a policy: from scratch, a folder, an adapter or a GGUF file, all of these from the hub too, or a function."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from spear_rl.engines.models.gguf import is_gguf, read_gguf
from spear_rl.engines.models.hub import COMMIT, fetched, hub_id, refuse_tag, used_commits
from spear_rl.engines.models.lora import ADAPTER, adapter_in_folder, adapter_origin, is_adapter, merged, untie
from spear_rl.engines.models.smollm2 import smollm2
from spear_rl.engines.models.tiny import FROM_SCRATCH, TINY_SIZES, TINY_VISION, tiny_model, tiny_tokenizer
from spear_rl.engines.models.tiny_vision import tiny_processor, tiny_vision_model
from spear_rl.errors import ConfigError, MissingExtraError, UserError
from spear_rl.io.escaping import in_words
from spear_rl.io.files import loading_reason, unreadable_file
from spear_rl.settings.names import loaded
from spear_rl.settings.ranges import nearest

_log = logging.getLogger(__name__)


BUILT_IN = (*FROM_SCRATCH, "smollm2")

_NOT_TRAINED = ("Model", "EncoderModel", "ForMaskedLM", "Classification", "ForQuestionAnswering", "RewardModel")
"""Ends of the names of model classes that write no text."""

_DEQUANTISED = ("fp8", "mxfp4")
"""Kinds of quantised weights that transformers makes plain ones of."""

_VOCABULARIES = ("tokenizer.", "vocab", "merges", "tekken")
_VOCABULARY_ENDS = (".model", ".tiktoken")
"""Names of files without which transformers makes an empty tokenizer."""


def model_by_name(
    name: str, *, texts: Callable[[], Sequence[str]], seed: int, revision: str = "", trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer) of a model by any name; `texts` give a tokenizer from scratch its words.

    A vision-language model comes with its processor instead of the tokenizer.

    Args:
        name: a built-in model, a folder, an adapter's folder, a GGUF file, or any of these on the hub.
        revision: of a model of the hub.
    """
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers is not installed: pip install 'spear-rl[train]'")
    if revision and name in BUILT_IN:
        raise ConfigError(f"engine.revision={revision}: {name} is built in; leave it out")
    if name in TINY_SIZES:
        tokenizer = tiny_tokenizer(texts())
        return tiny_model(name, tokenizer, seed=seed), tokenizer
    if name == TINY_VISION:
        processor = tiny_processor(texts())
        return tiny_vision_model(processor, seed=seed), processor
    if name == "smollm2":
        return smollm2(model_in_folder)
    place = located(name, revision, with_code=trust_remote_code)
    try:
        return _model_at(place, trust_remote_code, ())
    except UserError as error:
        if str(place) in str(error) and not Path(name).exists():  # say the name that was given, not the cache's
            raise type(error)(str(error).replace(str(place), name)) from error
        raise


def located(name: str, revision: str = "", *, with_weights: bool = True, with_code: bool = False) -> Path:
    """The folder or GGUF file of a model that is not built in; one of the hub is downloaded if need be."""
    name = os.path.expanduser(name)
    if name and os.path.exists(name):
        if revision:
            raise ConfigError(f"engine.revision={revision}: {name} is on this disk, not on the hub; leave it out")
        is_model = (Path(name) / "config.json").is_file() or is_adapter(Path(name)) or is_gguf(Path(name))
        if (Path(name) / "checkpoints").is_dir() and not is_model:
            raise ConfigError(f"engine.model: {name} is a run's folder: name its model/ or one of its checkpoints/")
        if Path(name).is_dir() or is_model:
            return Path(name)
        raise ConfigError(f"engine.model: {name} is neither a model's folder nor a GGUF file")
    if "://" in name or name.startswith(("hf.co/", "huggingface.co/")):
        way = "name a model of the hub by its id, owner/name, or a GGUF file in it, owner/name/file.gguf"
        raise ConfigError(f"engine.model: {name[:300]} is an address: {way}")
    refuse_tag(name, revision)
    model = hub_id(name, revision)
    others = f"built-in: {', '.join(BUILT_IN)}; or your own: package.module:function"
    unknown = f"engine.model: {name[:300]!r} is no folder and no built-in model{nearest(name, BUILT_IN)}; {others}"
    is_local = model is None or os.path.isdir(os.path.dirname(name))
    if is_local and name.lower().endswith(".gguf"):
        raise ConfigError(f"engine.model: there is no file {name}")
    if model is None:
        raise ConfigError(f"{unknown}; or of the hub: owner/name, owner/name/file.gguf")
    try:
        place = fetched(model, with_weights=False, with_code=with_code)
        if with_weights and not model.file:
            if not is_adapter(place):  # before gigabytes arrive
                check_config(name, place)
                if not with_code:
                    _check_writes_text(name, place)
            place = fetched(model, with_code=with_code)
        return place
    except ConfigError as error:
        if "/" in name or name.startswith("hf:"):
            raise
        reason = str(error).removeprefix("engine.model: ").replace(f"{name} is no folder here and ", "")
        raise ConfigError(f"{unknown}; and not of the hub: {reason}") from error


def _model_at(place: Path, trust_remote_code: bool, above: tuple[Path, ...]) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or file, with its adapter merged if it is one; `above` are adapters on it."""
    if not is_adapter(place):
        return model_in_folder(place, trust_remote_code=trust_remote_code)
    model, tokenizer = model_under_adapter(place, trust_remote_code=trust_remote_code, above=above)
    return merged(adapter_in_folder(model, place)), tokenizer


def is_function(name: str) -> bool:
    """Whether engine.model names a user's own function, `package.module:function`."""
    module, colon, _ = name.partition(":")
    return bool(colon) and module != "hf" and "/" not in module and "://" not in name and not Path(name).exists()


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
    """(model, tokenizer) of a transformers folder or GGUF files; a vision-language model comes with its processor.

    Args:
        trust_remote_code: run Python files of the folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    if is_gguf(folder):
        return read_gguf(folder)
    from_folder = partial(_from_pretrained, folder, trust_remote_code)
    check_config(folder, folder)
    sees = False
    try:
        config = from_folder(AutoConfig)
        sees = hasattr(config, "vision_config")
        if not trust_remote_code:
            _check_writes_text(folder, folder)
        words = from_folder(AutoProcessor if sees else AutoTokenizer)
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        options = {"weights_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = from_folder(kind, dtype=torch.float32, **options)
    except UserError:
        raise
    except ImportError as error:  # some processors need torchvision
        way = "pip install 'spear-rl[vision]'" if sees else loading_reason(error)
        raise MissingExtraError(f"engine.model: {folder} needs a package: {way}") from error
    except Exception as error:  # loaders raise many types
        first = str(error).partition("\n")[0]
        if "tokenizer" in first.lower() and "trust_remote_code" not in str(error) and not unreadable_file(folder):
            raise ConfigError(f"engine.model: {folder} has no tokenizer that transformers can read") from error
        raise loading_error(folder, error, "does not load as a transformers model") from error
    for name, own, expected in sorted(info["mismatched_keys"])[:1]:
        shapes = f"{list(own)}, and by its config.json {list(expected)}"
        raise ConfigError(f"engine.model: the weights in {folder} do not fit: {name} has the shape {shapes}")
    if (missing := sorted(info["missing_keys"])) and not trust_remote_code:
        names = f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        raise ConfigError(f"engine.model: the weights in {folder} are no whole {type(model).__name__}: without {names}")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    table, head = (getattr(end, "weight", None) for end in ends)
    says_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if says_tied and head is not None and head is not table:
        untie(model)  # the file holds two, whatever its configuration says
    return model, words


def _check_writes_text(name: Path | str, folder: Path) -> None:
    """Refuse what is no causal language model, or has no tokenizer, by its configuration, before weights are read."""
    config = _object_in(folder, "config.json", name)
    named = config.get("architectures")
    kind, is_pair = str(named[0]) if isinstance(named, list) and named else "", bool(config.get("is_encoder_decoder"))
    only = "only causal language models train here"
    if is_pair:
        raise ConfigError(f"engine.model: {name} is an encoder-decoder ({kind}): {only}")
    is_headless = kind.endswith(_NOT_TRAINED) and not kind.endswith("LMHeadModel")
    if is_headless or (folder / "modules.json").is_file():
        what = f"a {kind}, which embeds or classifies text" if is_headless else "a model that embeds text"
        raise ConfigError(f"engine.model: {name} is {what}: {only}")
    files = [
        path for path in folder.iterdir() if path.name.startswith(_VOCABULARIES) or path.suffix in _VOCABULARY_ENDS
    ]
    if not files:
        raise ConfigError(f"engine.model: {name} has no tokenizer: add tokenizer.json and tokenizer_config.json")
    if all(path.suffix == ".model" for path in files) and _needs_sentencepiece(files[0]):
        way = "pip install sentencepiece protobuf"
        raise MissingExtraError(f"engine.model: {name} has a tokenizer of sentencepiece and no tokenizer.json: {way}")


def _needs_sentencepiece(file: Path) -> bool:
    """Whether a tokenizer's file is one of sentencepiece, by its first byte, and the package is missing."""
    return find_spec("sentencepiece") is None and file.read_bytes()[:1] == b"\n"


def check_config(name: Path | str, folder: Path) -> None:
    """Refuse what has no configuration, or one that says that the weights are quantised, before they are read."""
    if not (folder / "config.json").is_file():
        way = f"; the hub's model is hf:{name}" if "/" in str(name) and hub_id(str(name)) else ""
        raise ConfigError(f"engine.model: {name} has no config.json, so it is no folder of a model{way}")
    _object_in(folder, "tokenizer_config.json", name)
    ends = _object_in(folder, "generation_config.json", name).get("eos_token_id")
    if any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends])) and ends is not None:
        raise ConfigError(
            f"engine.model: {name}: eos_token_id in generation_config.json is {ends!r}, no token's number"
        )
    quantised = _object_in(folder, "config.json", name).get("quantization_config")
    method = quantised.get("quant_method", "by an unnamed method") if isinstance(quantised, dict) else ""
    if quantised and method not in _DEQUANTISED:
        raise ConfigError(
            f"engine.model: {name} is quantised ({method}) and cannot be trained: name the unquantised model or a GGUF "
            "file"
        )


def _object_in(folder: Path, file: str, name: Path | str) -> dict[str, Any]:
    """The JSON object in a file of a model's folder; {} if there is none. transformers ignores some damaged files."""
    if not (folder / file).is_file():
        return {}
    try:
        content = json.loads((folder / file).read_text("utf-8"))
        if isinstance(content, dict):
            return content
        reason = "it holds no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = loading_reason(error)
    raise ConfigError(f"engine.model: {name}: {file} cannot be read ({reason}): download or save it again")


def loading_error(folder: Path | str, error: Exception, what: str) -> ConfigError:
    """The error for a model's folder that does not load."""
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"engine.model: {folder} brings Python code of its own (auto_map in its files), which is not run; read "
            "that code, and set engine.trust_remote_code=true only if you trust it"
        )
    return ConfigError(f"engine.model: {folder} {what}: {unreadable_file(Path(folder)) or loading_reason(error)}")


def _from_pretrained(folder: Path, trust_remote_code: bool, kind: Any, **options: Any) -> Any:
    if trust_remote_code:
        _warn_of_remote_code()
    # trust_remote_code is always given: with None, transformers asks on stdin.
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **options)


@cache
def _warn_of_remote_code() -> None:
    _log.warning("engine.trust_remote_code is on: Python code in a model's folder runs with all rights of this process")


def base_name(name: str, revision: str, *, seed: int) -> tuple[str, str]:
    """(the base model's name in an adapter's config, its commit on the hub or ""), enough to find it again."""
    if name in FROM_SCRATCH:
        return f"{name}:{seed}", ""
    if name in BUILT_IN or is_function(name):
        return name, ""
    if Path(name).exists():  # absolute: an adapter may be read from another working directory
        return os.path.abspath(name), ""
    model = hub_id(name, revision)
    assert model is not None  # it is loaded
    return model.model, used_commits().get(str(model), "")


def base_of_adapter(folder: Path) -> tuple[str, str]:
    """(name, revision) of the model under an adapter, as `located` takes them; one with a commit is of the hub."""
    name, _, revision = adapter_origin(folder)
    name = os.path.expanduser(name)
    if COMMIT.fullmatch(revision) and hub_id(name):
        return f"hf:{name.removeprefix('hf:')}", revision
    return name, "" if os.path.exists(name) else revision


def model_under_adapter(
    folder: Path, *, trust_remote_code: bool = False, above: tuple[Path, ...] = ()
) -> tuple[Any, Any]:
    """The model that an adapter's folder names, and the tokenizer in that folder, if it has one.

    Args:
        above: adapters that lie on this one, to notice a circle.
    """
    from transformers import AutoProcessor, AutoTokenizer

    name, revision = base_of_adapter(folder)
    size, _, seed = name.partition(":")
    if size in TINY_SIZES and seed.isdecimal():
        tokenizer = _from_pretrained(folder, False, AutoTokenizer)
        return tiny_model(size, tokenizer, seed=int(seed)), tokenizer
    if size == TINY_VISION and seed.isdecimal():
        processor = _from_pretrained(folder, False, AutoProcessor)
        return tiny_vision_model(processor, seed=int(seed)), processor
    if folder.resolve() in above:
        raise ConfigError(f"engine.model: the adapter in {folder} lies on itself: {ADAPTER} must name a model")
    try:
        if name in BUILT_IN:
            return model_by_name(name, texts=list, seed=0)
        place = located(name, revision, with_code=trust_remote_code)
    except UserError as error:
        reason = str(error).removeprefix("engine.model: ")
        base = name.removeprefix("hf:")
        moved = f"; if it was moved, correct base_model_name_or_path in {ADAPTER}" if "is no folder" in reason else ""
        said = f"engine.model: the adapter in {folder} needs its base model {base}: {reason}{moved}"
        raise ConfigError(said) from error
    model, tokenizer = _model_at(place, trust_remote_code, (*above, folder.resolve()))
    is_text = not hasattr(tokenizer, "image_processor")
    if is_text and (folder / "tokenizer_config.json").is_file():
        try:
            tokenizer = _from_pretrained(folder, False, AutoTokenizer)
        except Exception as error:  # loaders raise many types
            raise loading_error(folder, error, "has no readable tokenizer") from error
    return model, tokenizer
