"""A run folder as text: its summary, its last numbers, and whole episodes with the reason a turn did not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spear_rl.errors import UserError
from spear_rl.escaping import indented


def run_overview(run_dir: Path, *, num_episodes: int = 1) -> str:
    """What a person wants to see first of a run."""
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir} is no run folder: it has no config.toml")
    lines = [f"run {run_dir}"]
    summary = run_dir / "summary.json"
    lines += _lines(summary) if summary.is_file() else ["unfinished: no summary.json yet"]
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file() and (rows := _lines(metrics)):
        last = _record(metrics, rows[-1])
        lines += ["", f"step {last.pop('step', '?')}:"]
        lines += [f"  {name:32s} {_number(value)}" for name, value in last.items()]
    dumps = sorted((run_dir / "trajectories").glob("*.jsonl"))
    for text in _lines(dumps[-1])[:num_episodes] if dumps else []:
        try:
            lines += ["", *_episode(_record(dumps[-1], text))]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"{dumps[-1]} holds no episodes as `spear train` writes them: {error!r}") from error
    return "\n".join(map(indented, lines))


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


def _lines(path: Path) -> list[str]:
    # Not splitlines: it also cuts at characters that JSON allows within a line.
    return [line for line in path.read_text("utf-8", errors="replace").split("\n") if line.strip()]


def _record(path: Path, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: a line of it is not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{path} is damaged: a line of it is no JSON object")
    return record


def _number(value: Any) -> str:
    try:
        return f"{value:.5g}"
    except (TypeError, ValueError, OverflowError):
        return str(value)
