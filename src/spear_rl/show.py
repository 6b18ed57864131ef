"""A run folder as text: its summary, its last numbers, and whole episodes with the reason a turn did not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spear_rl.errors import UserError


def run_overview(run_dir: Path, *, num_episodes: int = 1) -> str:
    """What a person wants to see first of a run."""
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir} is no run folder: it has no config.toml")
    lines = [f"run {run_dir}"]
    summary = run_dir / "summary.json"
    lines += summary.read_text("utf-8").splitlines() if summary.is_file() else ["unfinished: no summary.json yet"]
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file() and (rows := metrics.read_text("utf-8").splitlines()):
        last = json.loads(rows[-1])
        lines += ["", f"step {last.pop('step')}:"]
        lines += [f"  {name:32s} {value:.5g}" for name, value in last.items()]
    dumps = sorted((run_dir / "trajectories").glob("*.jsonl"))
    for text in dumps[-1].read_text("utf-8").splitlines()[:num_episodes] if dumps else []:
        lines += ["", *_episode(json.loads(text))]
    return "\n".join(lines)


def _episode(episode: dict[str, Any]) -> list[str]:
    outcome = "solved" if episode["success"] else "not solved"
    lines = [
        f"{episode['task']} at step {episode['step']}: {outcome}, reward {episode['reward']:g} ({episode['stop']})"
    ]
    for turn in episode["turns"]:
        marks = [f"advantage {turn['advantage']:.3g}"] if "advantage" in turn else []
        marks += [f"invalid: {turn['invalid']}"] if "invalid" in turn else []
        marks += [f"did not train: {turn['dropped']}"] if "dropped" in turn else []
        lines += [f"  {turn['observation']}", f"  > {turn['text']}    [{'; '.join(marks)}]"]
    return lines
