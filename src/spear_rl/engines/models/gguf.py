"""GGUF files, whole or in parts, as plain transformers models: checked, joined and dequantised.

The package gguf is imported in functions: only these models need it.
"""

import contextlib
import hashlib
import io
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spear_rl.engines.models.gguf_settings import check_tokenizer, gguf_tokenizer, gguf_value, unread_settings
from spear_rl.errors import ConfigError, MissingExtraError, UserError
from spear_rl.io.cache import cache_folder
from spear_rl.io.files import is_pointer, loading_reason, writing

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
"""Parts that llama.cpp's gguf-split writes, each a GGUF file of its own."""
PIECE = re.compile(
    r"(?P<stem>.+\.gguf[-._]?(?:split|part)?[-._]?)(?P<piece>[a-z]{1,3}|\d{1,5})(?:of(?P<count>\d{1,5}))?",
    re.IGNORECASE,
)
"""Pieces of a file cut by plain `split`: model.gguf.aa, model.gguf.00, model.gguf-split-a, model.gguf.part1of3."""

KNOWN_HASHES = {
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
}
"""Published file -> its SHA-256."""

NEARLY_EQUAL = dict.fromkeys(("F32", "F16", "BF16"), 1e-3) | {"Q8_0": 0.02}
NEARLY_EQUAL |= dict.fromkeys(("Q6_K", "Q5_K", "Q5_1", "Q5_0"), 0.1)
NEARLY_EQUAL_COARSE = 0.25
"""Relative distance of input and output embeddings, by their type, below which the model had one matrix for both.

Two quantisations of one matrix differ by 0.01 with 8 bits, 0.07 with 5 and 0.13 with 4; other matrices by more than 1.
"""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, a part of one, or a folder of GGUF files without a transformers model.

    A config.json alone is no model: repositories of GGUF files often have one.
    """
    if path.is_dir():
        weights = [*path.glob("model*.safetensors*"), *path.glob("pytorch_model*.bin*")]
        return bool(_models(path)) and not (weights and (path / "config.json").is_file())
    return path.is_file() and (_is_named_so(path) or _first_bytes(path) == b"GGUF")


def read_gguf(path: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file in float32; a head that was tied to the embeddings is tied again."""
    with _one_sentence(path), _one_reader(), _joined(path) as file:
        return _read(file)


def gguf_config(path: Path) -> Any:
    """The transformers configuration of a GGUF file, without its weights; a head that `read_gguf` ties is tied."""
    from transformers import AutoConfig

    with _one_sentence(path), _one_reader(), _joined(path) as file:
        reader = _reader(file)
        settings = unread_settings(reader)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False, **settings)
        config.tie_word_embeddings |= _begins_tied(reader)
        return _without_quantization(config)


def gguf_parts(path: Path) -> list[Path]:
    """The files of a GGUF model in order, by the name of its file, of its first part, or of their folder."""
    if path.is_dir():
        models = _models(path)
        if len(models) > 1:
            names = ", ".join(sorted(file.name for file in models.values())[:8])
            raise ConfigError(f"engine.model: {path} holds several GGUF models: name one of {names}")
        return gguf_parts(next(iter(models.values())))
    if found := _SPLIT.fullmatch(path.name):
        number, count = int(found["number"]), int(found["count"])
        end = path.name[found.end("number") :]
        files = [path.with_name(f"{found['stem']}-{n:05d}{end}") for n in range(1, count + 1)]
    elif found := _piece(path):
        files = _pieces(path, found)
        number = files.index(path) + 1 if path in files else 0
    else:
        return [path]
    if number != 1 and files[0].is_file():
        raise ConfigError(f"engine.model: {path} is part {number} of {len(files)}: name the first, {files[0].name}")
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"engine.model: {path} has {len(files)} parts, and {', '.join(missing[:4])} is missing")
    return files


def _piece(path: Path) -> re.Match[str] | None:
    """The parts of a piece's name; letters, which may be any suffix, count if there is a first piece."""
    found = PIECE.fullmatch(path.name)
    if found is None or path.name.lower().endswith(".gguf"):
        return None
    first = path.with_name(f"{found['stem']}{'a' * len(found['piece'])}")
    return found if found["piece"].isdigit() or first.is_file() else None


def _pieces(path: Path, found: re.Match[str]) -> list[Path]:
    """All pieces beside one, in order, with the names of those that must be missing."""
    others = (PIECE.fullmatch(file.name) for file in path.parent.iterdir())
    same = [other for other in others if other and other["stem"] == found["stem"] and other["count"] == found["count"]]
    if not found["piece"].isdigit():
        same = [other for other in same if len(other["piece"]) == len(found["piece"])]
    order = sorted(same, key=lambda other: (len(other["piece"]), other["piece"]))
    if not found["piece"].isdigit():
        names = ["a" * len(order[0]["piece"])]
        while names[-1] != order[-1]["piece"] and len(names) < 1000:
            names.append(_following(names[-1]))
    else:
        numbers = [int(other["piece"]) for other in order]
        last = int(found["count"]) if found["count"] else max(numbers)
        width = len(found["piece"]) if found["piece"].startswith("0") or min(numbers) == 0 else 0
        width = width if all(len(other["piece"]) == width for other in order) else 0
        names = [f"{number:0{width}d}" for number in range(0 if 0 in numbers else 1, last + 1)]
    end = f"of{found['count']}" if found["count"] else ""
    return [path.with_name(f"{found['stem']}{name}{end}") for name in names]


def _following(piece: str) -> str:
    """The next name as `split` counts: az -> ba."""
    head, last = piece[:-1], piece[-1]
    if last != "z":
        return head + chr(ord(last) + 1)
    return f"{_following(head)}a" if head else "aa"


def _models(folder: Path) -> dict[str, Path]:
    """Name without the part's number -> the first file of every GGUF model in a folder; mmproj files are none."""
    models: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.is_file() and _is_named_so(file) and "mmproj" not in file.name.lower():
            found = _SPLIT.fullmatch(file.name) or _piece(file)
            models.setdefault(found["stem"] if found else file.name, file)
    return models


def _is_named_so(file: Path) -> bool:
    return file.name.lower().endswith(".gguf") or _piece(file) is not None


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


@contextlib.contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise MissingExtraError(f"engine.model={path} needs the extra for GGUF: pip install 'spear-rl[gguf]'")
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if isinstance(error.__context__, ValueError):  # transformers, of bytes that are no text: "no valid JSON file"
            raise ConfigError(f"engine.model: {path} is damaged ({error.__context__}): download it again") from error
        raise ConfigError(f"engine.model: {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # readers raise many types
        raise ConfigError(f"engine.model: {path} does not load as a GGUF model: {loading_reason(error)}") from error


@contextlib.contextmanager
def _one_reader() -> Iterator[None]:
    """Have every file opened once: parsing a vocabulary takes seconds, and transformers does so several times.

    A read beyond the end of the file raises: gguf's own reader returns empty arrays there, so that a list whose header
    gives a huge length would be read without end.
    """
    import gguf

    own = gguf.GGUFReader

    class Bounded(own):  # type: ignore[misc, valid-type]
        def _get(self, offset: int, dtype: Any, count: int = 1, *arguments: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *arguments, **options)
            if len(found) < count:
                raise ValueError(f"the file ends before {offset} + {count}")
            return found

    opened = cache(Bounded)
    gguf.GGUFReader = lambda path, *arguments: opened(str(path), *arguments)
    try:
        yield
    finally:
        gguf.GGUFReader = own
        opened.cache_clear()


@contextlib.contextmanager
def _joined(path: Path) -> Iterator[Path]:
    """One whole GGUF file: the file itself, or its parts joined in the cache folder for as long as it is read."""
    files = gguf_parts(path)
    if len(files) == 1:
        _check_file(files[0])
        yield files[0]
        return
    place = cache_folder() / "gguf"
    with writing(f"the joined file of {path}, in {place},"):
        place.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=place, prefix="join-"))
    try:
        found = _SPLIT.fullmatch(files[0].name)
        whole = folder / f"{Path(found['stem']).name if found else files[0].name.partition('.gguf')[0]}.gguf"
        with writing(f"the joined file of {path}, in {place},"):
            _join_parts(files, whole) if found else _join_pieces(files, whole)
        _check_file(whole)
        yield whole
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _join_pieces(files: Sequence[Path], whole: Path) -> None:
    with whole.open("wb") as out:
        for file in files:
            with file.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 24)


def _join_parts(files: Sequence[Path], whole: Path) -> None:
    """Write one file with the first part's metadata and the tensors of all parts."""
    from gguf import GGUFValueType, GGUFWriter

    readers = [_reader(file) for file in files]
    for number, (file, reader) in enumerate(zip(files, readers, strict=True)):
        own, count = (gguf_value(reader, key) for key in ("split.no", "split.count"))
        if (own, count) != (number, len(files)):
            said = f"is part {own + 1} of {count}" if isinstance(own, int) else "is no part of a split model"
            raise ConfigError(f"engine.model: {file} {said} by its header, not {number + 1} of {len(files)}")
    writer = GGUFWriter(whole, gguf_value(readers[0], "general.architecture"), endianess=readers[0].endianess)
    for name, field in readers[0].fields.items():
        if name != "general.architecture" and not name.startswith(("GGUF.", "split.")):
            is_list = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_list else None)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def _check_file(file: Path) -> None:
    """Refuse what is no GGUF file, is cut off, is of a kind transformers cannot read, or has not its known hash."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    reader = _reader(file)
    if gguf_value(reader, "split.count") not in (None, 1):
        raise ConfigError(
            f"engine.model: {file} is one of several parts: keep the names of all, ...-00001-of-0000N.gguf"
        )
    kind = str(gguf_value(reader, "general.architecture"))
    known = [name.replace("_", "") for name in GGUF_SUPPORTED_ARCHITECTURES]
    if not any(kind.replace("-", "").replace("_", "").startswith(name) for name in known):
        raise ConfigError(f"engine.model: {file} is of the architecture {kind!r}, which transformers cannot read")
    check_tokenizer(file, reader)
    blocks = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    said = gguf_value(reader, f"{kind}.block_count")
    if said != len(blocks):
        raise ConfigError(f"engine.model: {file} is damaged: it has {len(blocks)} layers, and its header says {said}")
    if expected := KNOWN_HASHES.get(file.name.lower()):
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
                raise ConfigError(
                    f"engine.model: {file} is not the published file of that name (its SHA-256 differs): download it "
                    "again, or rename it if it is meant to differ"
                )


def _reader(file: Path) -> Any:
    """The opened file, whole."""
    from gguf import GGUFReader

    if is_pointer(file):
        raise ConfigError(f"engine.model: {file} is a pointer of git-lfs, not the file itself: run git lfs pull")
    if _first_bytes(file) != b"GGUF":
        raise ConfigError(f"engine.model: {file} is no GGUF file: it does not begin with GGUF")
    try:
        reader = GGUFReader(file)
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    except Exception as error:  # numpy's, for whatever lies behind the end
        if version := re.search(r"version \d+", str(error)):
            raise ConfigError(f"engine.model: {file} is of GGUF {version[0]}, not 2 or 3: convert it anew") from error
        raise ConfigError(
            f"engine.model: {file} is cut off or damaged: download it, or join its pieces, again"
        ) from error
    if end > file.stat().st_size:
        raise ConfigError(f"engine.model: {file} is cut off: download it, or join its pieces, again")
    reader.fields.pop("general.name", None)  # one called mistral is looked up as an architecture that gguf lacks
    return reader


def _read(file: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a whole file."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    reader = _reader(file)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        loaded, info = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            **unread_settings(reader),
        )
    config, weights = loaded.config, loaded.state_dict()
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"engine.model: {file} lacks weights of {type(loaded).__name__}: {', '.join(missing[:3])}")
    ends = [f"{layer}.weight" for layer in _embeddings(loaded)]
    if not config.tie_word_embeddings and _was_tied([weights[name] for name in ends], types):
        # The output's quantisation is the finer one in usual files.
        config.tie_word_embeddings, weights[ends[0]] = True, weights[ends[1]]
    # transformers refuses to save the loaded model, which it considers quantised; a rebuilt one it saves.
    with init_empty_weights(include_buffers=False):
        plain = _without_quantization(config)
        model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    tokenizer, model.generation_config.eos_token_id = gguf_tokenizer(file, reader)
    return model.eval(), tokenizer


def _embeddings(model: Any) -> list[str]:
    """Names of the input and output embeddings."""
    wanted = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in wanted if id(module) in names]


def _was_tied(ends: Sequence[Any], types: dict[str, str]) -> bool:
    """Whether input and output embeddings are one matrix, up to quantisation."""
    if len(ends) != 2 or ends[0].shape != ends[1].shape:
        return False
    kinds = [types.get(name, "") for name in ("token_embd.weight", "output.weight")]
    nearly = max(NEARLY_EQUAL.get(kind, NEARLY_EQUAL_COARSE) for kind in kinds)
    blocks = zip(ends[0].split(4096), ends[1].split(4096), strict=True)
    distance = sum(float((one - other).norm()) ** 2 for one, other in blocks) ** 0.5
    return bool(distance <= float(ends[1].norm()) * nearly)


def _begins_tied(reader: Any) -> bool:
    """`_was_tied` by the first 4,096 rows: dequantizing all of them takes seconds and gigabytes."""
    import torch
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}
    ends = [stored[name] for name in ("token_embd.weight", "output.weight") if name in stored]
    rows = [torch.tensor(dequantize(end.data[:4096], end.tensor_type)) for end in ends]
    return _was_tied(rows, {end.name: end.tensor_type.name for end in ends})


def _without_quantization(config: Any) -> Any:
    settings = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    return config.__class__.from_dict(settings)
