"""Under what an experiment ran: versions, hardware, and whether its plan was declared before its first cell began."""

import contextlib
import json
import os
import platform
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spear_rl.app.compare.experiment.cells import gpus
from spear_rl.app.compare.experiment.plan import Plan, decided
from spear_rl.io.files import write_whole
from spear_rl.io.record import PACKAGES, git_state, versions

_DECLARED = "plan.json"
_TIMEOUT = 10.0


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def declare(plan: Plan) -> None:
    """Write the plan's text and the time into the experiment's folder, before its cells run; again if it changed."""
    record = _record(plan.out)
    if not record["plans"] or record["plans"][-1]["sha256"] != plan.hash:
        record["plans"].append({"time": now(), "sha256": plan.hash, "text": plan.text})
        plan.out.mkdir(parents=True, exist_ok=True)
        write_whole(plan.out / _DECLARED, json.dumps(record, indent=1) + "\n")


def note_first_cell(plan: Plan) -> None:
    """Remember when the first cell began."""
    record = _record(plan.out)
    if not record["first_cell"]:
        record["first_cell"] = now()
        write_whole(plan.out / _DECLARED, json.dumps(record, indent=1) + "\n")


def declaration(plan: Plan) -> tuple[dict[str, Any], str, list[str]]:
    """When the plan was declared and the first cell began; when its primary measure was; sentences about changes."""
    record = _record(plan.out)
    begun = [time for cell in plan.cells if (time := _begun(cell.folder))]
    first = min(filter(None, [record["first_cell"], *begun]), default=None)
    plans, said = record["plans"], []
    about = {"plan declared": plans[0]["time"] if plans else None, "first cell began": first, "plan sha256": plan.hash}
    late = [entry for entry in plans if first and entry["time"] > first]
    before = next((entry for entry in reversed(plans) if not first or entry["time"] <= first), None)
    changes = _changes((before or plans[0])["text"], plan.text) if plans else {}
    if late and not before:
        said.append(f"the plan was declared at {late[0]['time']}, after the first cell began")
    if len(late) > (not before):
        what = f"in {', '.join(changes.values())}" if changes else f"but not in {', '.join(decided({}))}"
        said.append(f"the plan was changed after its first cell began, last at {late[-1]['time']}: {what}")
    when = "changed after" if "primary" in changes else "declared before" if before else "declared after"
    return about | {"plan changed after that": bool(late)}, f"{when} the first cell began", said


def _record(out: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stored = json.loads((out / _DECLARED).read_text("utf-8"))
        plans = [{key: str(entry[key]) for key in ("time", "sha256", "text")} for entry in stored["plans"]]
        first = stored.get("first_cell")
        return {"plans": plans, "first_cell": first if isinstance(first, str) else None}
    return {"plans": [], "first_cell": None}


def _begun(folder: Path) -> str | None:
    """The oldest time that a run's files have: a cell may have been run without the experiment's command."""
    times = []
    for name in ("run.json", "config.toml", "metrics.jsonl", "summary.json"):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return datetime.fromtimestamp(min(times), UTC).isoformat(timespec="seconds") if times else None


def _changes(before: str, after: str) -> dict[str, str]:
    """What was decided before and is another now -> the same in words."""
    try:
        old, new = decided(tomllib.loads(before)), decided(tomllib.loads(after))
    except (ValueError, TypeError, AttributeError):
        return {"text": "its text"}
    return {key: f"{key} ({old[key]} before)" for key in old if old[key] != new[key]}


def machine() -> dict[str, Any]:
    """Versions and hardware of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "versions": versions(*PACKAGES, "matplotlib"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": cores,
        "gpu": _gpu(),
        "git": git_state(Path()),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str:
    if not gpus():
        return "none"
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
        return ", ".join(found.stdout.split("\n")).strip(", ") or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def cells_ran_on(folders: list[Path]) -> list[str]:
    """The versions and devices that summaries of cells name, each once."""
    found: dict[str, int] = {}
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            summary = json.loads((folder / "summary.json").read_text("utf-8"))
            parts = [f"{name} {version}" for name, version in summary["versions"].items()]
            hardware = summary["hardware"]
            threads = f"{hardware['threads']} thread{'s' * (hardware['threads'] != 1)}"
            parts.append(f"{hardware['machine']}, {threads}, {hardware['device']}")
            text = ", ".join(parts)
            found[text] = found.get(text, 0) + 1
    return [f"{count} cell{'s' * (count != 1)}: {text}" for text, count in found.items()]
