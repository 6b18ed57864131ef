"""Checkpoints: plain transformers folders with the trainer's state beside the weights; whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spear_rl.errors import CheckpointError
from spear_rl.stored_state import stored_state

STATE = "trainer_state.pt"
MANIFEST = "checkpoint.json"


def save_checkpoint(
    folder: Path, *, step: int, save_model: Callable[[Path], None], state: dict[str, Any], keep: int = 2
) -> Path:
    """Write `folder`/step_NNNNNN in one atomic move, then remove all but the `keep` newest."""
    final, draft = folder / f"step_{step:06d}", folder / f".draft_{step:06d}"
    for leftover in folder.glob(".draft_*"):
        shutil.rmtree(leftover)
    draft.mkdir(parents=True)
    save_model(draft)
    torch.save(state, draft / STATE)
    digests = {path.name: _digest(path) for path in sorted(draft.iterdir())}
    (draft / MANIFEST).write_text(json.dumps({"step": step, "sha256": digests}, indent=1))
    for path in draft.iterdir():
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    os.replace(draft, final)
    _flush(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def checked_step(checkpoint: Path) -> int:
    """The step of a checkpoint, after checking every file against its manifest."""
    others = [path.name for path in checkpoints(checkpoint.parent) if path < checkpoint]
    advice = f"delete it to resume from {others[-1]}" if others else "start the run anew in another run.dir"
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        strange = [name for name in manifest["sha256"] if not (checkpoint / name).is_file() or Path(name).name != name]
        if strange:
            raise ValueError(f"its manifest names {strange[0]!r}, which is no file in it")
        step = int(manifest["step"])
        damaged = [name for name, digest in manifest["sha256"].items() if _digest(checkpoint / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged ({error}); {advice}") from error
    if damaged:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {', '.join(damaged)} changed on disk; {advice}")
    return step


def load_state(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """The step and the trainer's state."""
    return checked_step(checkpoint), stored_state(checkpoint / STATE)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Make sure the disk has it before anything relies on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
