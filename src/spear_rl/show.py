"""A run folder as text: its summary, its last numbers, and whole episodes with the reason a turn did not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spear_rl.errors import UserError
from spear_rl.rows import read_rows, spans


def run_overview(run_dir: Path, *, num_episodes: int = 1) -> str:
    """What a person wants to see first of a run; lines that cannot be read are named and left out."""
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir} is no run folder: it has no config.toml")
    try:
        return "\n".join(_lines(run_dir, num_episodes))
    except OSError as error:
        raise UserError(f"{error.filename or run_dir} cannot be read: {error.strerror}") from error


def _lines(run_dir: Path, num_episodes: int) -> list[str]:
    lines = [f"run {run_dir}"]
    summary = run_dir / "summary.json"
    unfinished = ["unfinished: no summary.json yet"]
    lines += summary.read_text("utf-8", errors="replace").splitlines() if summary.is_file() else unfinished
    rows = read_rows(run_dir / "metrics.jsonl")
    lines += rows.sentences("metrics.jsonl")
    if rows.by_step:
        step, row = list(rows.by_step.items())[-1]
        lines += ["", f"step {step}:"]
        lines += [
            f"  {name:32s} {value:.5g}" if isinstance(value, int | float) else f"  {name:32s} {value}"
            for name, value in row.items()
            if name != "step"
        ]
        missing = [number for number in range(step) if number not in rows.by_step]
        lines += [f"metrics.jsonl lacks the rows of steps {spans(missing)}"] if missing else []
    dumps = sorted((run_dir / "trajectories").glob("*.jsonl"))
    for number, text in enumerate(dumps[-1].read_bytes().splitlines()[:num_episodes] if dumps else [], start=1):
        try:
            lines += ["", *_episode(json.loads(text))]
        except (ValueError, KeyError, TypeError, AttributeError):
            lines += ["", f"{dumps[-1].name}, line {number} is damaged or was cut off"]
    return lines


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
