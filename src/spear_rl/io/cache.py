"""A cache on disk for small JSON values. Damaged entries count as absent; a cache that cannot be written is skipped."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "SPEAR_RL_CACHE"


def cache_folder(given: str = "") -> Path:
    """The folder given, else $SPEAR_RL_CACHE, else spear_rl in the user's cache folder."""
    if chosen := given or os.environ.get(VARIABLE):
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "spear_rl"


def stored(path: str | Path) -> Any | None:
    """The value at a path; None where there is none or it is damaged."""
    try:
        with open(path, "rb") as file:
            digest, _, body = file.read().partition(b"\n")
        return json.loads(body) if digest == _digest(body) else None
    except (OSError, ValueError, RecursionError):
        return None


def store(path: Path, value: object) -> None:
    """Write a value atomically."""
    body = json.dumps(value, separators=(",", ":")).encode()
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with open(descriptor, "wb") as file:
            file.write(_digest(body) + b"\n" + body)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
