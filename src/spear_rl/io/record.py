"""run.json: the versions and git state of every start of a run, and its ids in trackers. Never imports torch."""

import json
import os
import platform
import re
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

RECORD = "run.json"
PACKAGES = ("torch", "transformers", "tokenizers")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT = 2.0
"""Seconds per call of git."""


def version(package: str, missing: str = "not installed") -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return missing


def versions(*packages: str) -> dict[str, str]:
    """Ours, Python's and those of `packages`, without importing any."""
    ours = {"spear_rl": version("spear-rl", "from source"), "python": platform.python_version()}
    return ours | {package: version(package, "from source") for package in packages}


def new_start(step: int) -> dict[str, Any]:
    """What this process starts a run with."""
    start = {"step": step, "versions": versions(*PACKAGES), "platform": platform.platform()}
    git = git_state(Path())
    return start | {"git": git} if git else start


def about(start: dict[str, Any]) -> dict[str, str]:
    """A start as dotted names and texts, for trackers."""
    parts = {"versions": start["versions"], "git": start.get("git", {})}
    flat = {f"{group}.{name}": str(value) for group, part in parts.items() for name, value in part.items()}
    return flat | {"platform": start["platform"]}


def read_record(run_dir: Path) -> dict[str, Any]:
    """What a run's starts wrote; what is damaged counts as absent.

    {"starts": [...], "trackers": {name: id}, "models": {hub model: commit}, "generator": {"name": ..., "reason": ...}}
    """
    try:
        stored = json.loads((run_dir / RECORD).read_text("utf-8"))
        starts = [start for start in stored["starts"] if isinstance(start, dict)]
        ids = {name: id_ for name, id_ in stored["trackers"].items() if re.fullmatch(r"[\w.-]{1,128}", id_, re.ASCII)}
        models = {name: commit for name, commit in stored.get("models", {}).items() if _COMMIT.fullmatch(commit)}
        chosen = stored.get("generator")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"starts": [], "trackers": {}}
    is_sound = isinstance(chosen, dict) and chosen.get("name") in ("native", "vllm")
    generator = {"name": chosen["name"], "reason": str(chosen.get("reason", ""))} if is_sound else None
    optional = {"models": models, "generator": generator}
    return {"starts": starts, "trackers": ids} | {name: value for name, value in optional.items() if value}


def recorded_threads(run_dir: Path) -> int:
    """CPU threads of the run's latest start; 0 if none are recorded."""
    starts = read_record(run_dir)["starts"]
    threads = starts[-1].get("threads") if starts else 0
    return threads if type(threads) is int and 0 < threads <= 1024 else 0


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that `folder` is in, and whether tracked files differ from it; None outside of one.

    Git runs neither hooks nor commands that the repository's configuration names (monitor, filters, transports), and
    is stopped after a few seconds.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    filters = _git(folder, "config", "--null", "--name-only", "--get-regexp", r"^filter\.", codes=(0, 1))
    if filters is None:
        return {"commit": commit.strip()}
    unset = dict.fromkeys(filter(None, filters.split("\0")), "")
    unset |= {key: "false" for key in unset if key.endswith(".required")}
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    changes = _git(folder, *status, config=unset)
    return {"commit": commit.strip()} | ({} if changes is None else {"dirty": bool(changes)})


def _git(
    folder: Path, *arguments: str, config: dict[str, str] | None = None, codes: tuple[int, ...] = (0,)
) -> str | None:
    """What git prints, or None if it fails."""
    settings = {"core.fsmonitor": "false", "core.hooksPath": os.devnull, **(config or {})}
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none", "LC_ALL": "C"}
    env |= {"GIT_CONFIG_COUNT": str(len(settings)), "GIT_TERMINAL_PROMPT": "0"}
    for number, (key, value) in enumerate(settings.items()):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    # A file, not a pipe: a pipe that a grandchild keeps open would outlast the time-out.
    try:
        with tempfile.TemporaryFile() as output:
            ended = subprocess.run(
                ["git", *arguments],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT,
            )
            output.seek(0)
            return output.read().decode(errors="replace") if ended.returncode in codes else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
