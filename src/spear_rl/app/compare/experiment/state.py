"""How far a cell is, by what its folder holds: absent, begun, finished, or of other settings than the plan's."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spear_rl.app.compare.experiment.cells import Cell, ColdStart, is_cold
from spear_rl.app.compare.experiment.plan import Plan
from spear_rl.app.compare.runs import RunRecord, load_run
from spear_rl.app.config import Config, flat, load
from spear_rl.errors import ConfigError, UserError
from spear_rl.io.lock import LOCK

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

State = Literal["absent", "begun", "finished"]
_BOOKKEEPING = ("run.dir", "run.resume", "run.checkpoint_every", "run.trajectories_", "run.threads")
"""Prefixes of settings that a cell may have others of than the plan: where a run is kept, and what its machine has."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a run that is going on."""

    step: int
    """Steps taken."""
    success: float | None
    """Of the newest evaluation, or of the newest step's episodes before there is one."""


def check_folders(plan: Plan) -> None:
    """Refuse cells and cold starts that were run with other settings than the plan's: one line for each."""
    faults = [_fault(cell.folder, cell.config, lambda _: True) for cell in plan.cells]
    faults += [_fault(cold.folder, cold.config, is_cold) for cold in plan.cold_starts]
    if found := [fault for fault in faults if fault]:
        raise UserError("\n".join(found))


def _fault(folder: Path, planned: Config, counts: Callable[[str], bool]) -> str:
    path = folder / "config.toml"
    if not path.is_file():
        return ""
    try:
        there, wanted = flat(load(str(path))), flat(planned)
    except ConfigError as error:
        return f"{folder} was run with settings of another version ({error}): choose another --out, or delete it"
    keys = [key for key in wanted if counts(key) and not key.startswith(_BOOKKEEPING)]
    keys = [key for key in keys if not _is_same(key, there[key], wanted[key])]
    if not keys:
        return ""
    parts = ", ".join(f"{key}={there[key]} where the plan has {wanted[key]}" for key in keys[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{folder} was run with {parts}{more}: choose another --out, or delete that folder"


def _is_same(key: str, there: Any, wanted: Any) -> bool:
    """Whether a setting is the plan's; cold starts count by their place in the experiment's folder."""
    if key == "engine.model" and "cold_starts" in Path(wanted).parts:
        return _in_cold_starts(there) == _in_cold_starts(wanted)
    return bool(there == wanted)


def _in_cold_starts(model: str) -> tuple[str, ...]:
    parts = Path(model).parts
    places = [number for number, part in enumerate(parts) if part == "cold_starts"]
    return parts[places[-1] :] if places else parts


def cell_state(cell: Cell) -> State:
    return run_state(cell.folder, cell.config.run.steps)


def run_state(folder: Path, steps: int) -> State:
    """Of a run folder that should take `steps` steps."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if json.loads((folder / "summary.json").read_text("utf-8"))["steps"] == steps:
            return "finished"
    return "begun" if (folder / "config.toml").exists() else "absent"


def cold_state(cold: ColdStart) -> State:
    if (cold.folder / "model").is_dir():  # written last
        return "finished"
    return "begun" if (cold.folder / "config.toml").exists() else "absent"


def finished_run(cell: Cell) -> RunRecord | None:
    """The record of a cell that is finished; an error where its files are damaged."""
    return load_run(cell.folder) if cell_state(cell) == "finished" else None


def progress(folder: Path) -> Progress | None:
    """Read from the ends of a run's metrics; None before its first step."""
    row = _last_row(folder / "metrics.jsonl")
    if row is None:
        return None
    evaluated = _last_row(folder / "eval.jsonl") or {}
    success = evaluated.get("success") if evaluated.get("step") else row.get("rollout/success")
    return Progress(int(row["step"]) + 1, float(success) if isinstance(success, int | float) else None)


def _last_row(path: Path) -> dict[str, Any] | None:
    """The last whole line that is a row with a step."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = 65_536
        end = file.seek(0, os.SEEK_END)
        while True:
            file.seek(max(end - size, 0))
            *lines, _ = file.read().split(b"\n")
            lines = lines if end <= size else lines[1:]
            for line in reversed(lines):
                with contextlib.suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    if isinstance(row, dict) and type(row.get("step")) is int:
                        return row
            if end <= size or lines:
                return None
            size *= 8  # one line is longer than that
    return None


def holder(folder: Path) -> str:
    """The process that has a run's folder locked, in words; nothing if none has."""
    if fcntl is None:
        return ""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return ""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system without locks
            return ""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            return f"process {json.loads(os.pread(handle, 4096, 0)).get('pid')}"
        return "another process"
    finally:
        os.close(handle)
    return ""
