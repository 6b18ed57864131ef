"""Checkpoints: transformers folders with the trainer's state beside the weights, written atomically."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from spear_rl.errors import CheckpointError
from spear_rl.io.files import flush, move_aside, remove_folder, writing
from spear_rl.train.stored_state import stored_state

STATE = "trainer_state.pt"
MANIFEST = "checkpoint.json"
COLD_START = "cold_start"
"""Folder of a run with the checkpoint of its cold start, until there is one of RL or the result of `spear sft`."""
FORMAT = 2
"""Of the manifest: 2 holds the run's settings and a digest of itself."""


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    save_model: Callable[[Path], None],
    state: dict[str, Any],
    settings: str = "",
    evaluation: Mapping[str, float] | None = None,
    keep: int = 2,
) -> Path:
    """Write `folder`/step_NNNNNN atomically, then remove all but the `keep` newest and the best evaluated one.

    One of the same step is replaced: it was saved by a stop, before its evaluation.

    Args:
        settings: the run's, as TOML.
        evaluation: of these weights, if there was one.
    """

    def fill(draft: Path) -> None:
        save_model(draft)
        with (draft / STATE).open("wb") as file:  # torch's own file errors do not say what went wrong
            torch.save(state, file)

    final = folder / f"step_{step:06d}"
    about = {"step": step, "settings": settings, "evaluation": evaluation}
    write_folder(final, fill, about, replaces=final in checkpoints(folder))
    with writing(folder):
        best = best_checkpoint(folder)
        for old in checkpoints(folder)[:-keep]:
            if old != best:
                remove_folder(old)
    return final


def write_folder(
    final: Path, fill: Callable[[Path], None], about: Mapping[str, Any], *, replaces: bool = False
) -> None:
    """What `fill` writes, with a manifest of its files: complete or absent, whenever this process dies.

    Args:
        replaces: delete what is there under that name, rather than move it aside.
    """
    draft = final.with_name(f".draft_{final.name.removeprefix('step_')}")
    replaced = final.with_name(f".old_{final.name}")
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(final.parent)
        try:
            draft.mkdir()
            fill(draft)
            manifest = {"format": FORMAT, **about}
            manifest["sha256"] = {path.name: _digest(path) for path in sorted(draft.iterdir())}
            manifest["self"] = _self_digest(manifest)
            (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in draft.iterdir():
                flush(path)
            flush(draft)
            if replaces:
                os.rename(final, replaced)
            elif os.path.lexists(final):
                move_aside(final)
            os.rename(draft, final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(final.parent)
        if replaces:
            shutil.rmtree(replaced)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left incomplete."""
    names = (".draft_*", ".old_step_*", ".old_reference", f".old_{COLD_START}")
    for leftover in (path for name in names for path in folder.glob(name)):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)


def discard_cold_start(run_dir: Path) -> None:
    """Delete the checkpoint of a run's cold start, and what a killed process left of deleting it."""
    folder = run_dir / COLD_START
    with writing(folder):
        remove_leftovers(run_dir)
        if folder.is_dir():
            remove_folder(folder)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first, without copies under other names and links."""
    steps = {}
    for path in folder.glob("step_*"):
        named = re.fullmatch(r"step_(\d{6,})", path.name)
        if named and path.is_dir() and not path.is_symlink() and path.name == f"step_{int(named[1]):06d}":
            try:
                is_copy = int(_manifest(path)["step"]) != int(named[1])
            except (OSError, ValueError, KeyError, TypeError):
                is_copy = False  # damaged: `checked_step` says so
            if not is_copy:
                steps[int(named[1])] = path
    return [steps[step] for step in sorted(steps)]


def best_checkpoint(folder: Path) -> Path | None:
    """The evaluated checkpoint with the highest success; the newest of equals."""
    rated = []
    for path in checkpoints(folder):
        try:
            rated.append((float(_manifest(path)["evaluation"]["success"]), path))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    highest = max((success for success, _ in rated), default=None)
    return next((path for success, path in reversed(rated) if success == highest), None)


def checked_manifest(checkpoint: Path) -> dict[str, Any]:
    """A folder's manifest, after checking every file against it."""
    others = [path.name for path in checkpoints(checkpoint.parent) if path.name < checkpoint.name]
    advice = f"delete it to resume from {others[-1]}" if others else "start the run anew in another run.dir"
    if checkpoint.parent.name == COLD_START:
        advice = "delete it to begin the cold start again"
    if not checkpoint.name.startswith("step_"):
        advice = f"make it again, or delete its {MANIFEST} to use it as it is"
    try:
        manifest = _manifest(checkpoint)
        version = int(manifest.get("format", 1))
        if version > FORMAT:
            raise CheckpointError(
                f"checkpoint {checkpoint} has format {version}; this version of spear_rl reads {FORMAT}, so update it"
            )
        strange = [name for name in manifest["sha256"] if not (checkpoint / name).is_file() or Path(name).name != name]
        if strange:
            raise ValueError(f"its manifest names {strange[0]!r}, which is no file in it")
        damaged = [name for name, digest in manifest["sha256"].items() if _digest(checkpoint / name) != digest]
        if version > 1 and manifest.pop("self") != _self_digest(manifest):
            damaged.append(MANIFEST)
        int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged ({error}); {advice}") from error
    if damaged:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {', '.join(damaged)} changed on disk; {advice}")
    return manifest


def checked_step(checkpoint: Path) -> int:
    """The step of a checkpoint, after checking every file against its manifest."""
    return int(checked_manifest(checkpoint)["step"])


def load_state(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """The step and the trainer's state."""
    return checked_step(checkpoint), stored_state(checkpoint / STATE)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    except RecursionError as error:
        raise ValueError(f"{MANIFEST} is nested too deeply") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{MANIFEST} is no JSON object")
    return manifest


def _self_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
