"""An algorithm field by field; the summary, latest metrics and newest episodes of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from spear_rl.app.config import load, presets
from spear_rl.app.show.episodes import newest_lines
from spear_rl.app.show.text import Words
from spear_rl.errors import UserError
from spear_rl.io.escaping import indented
from spear_rl.io.jsonl import gaps, read_rows
from spear_rl.io.record import read_record
from spear_rl.train.callbacks import WARNINGS, warning_texts


def algorithm_overview(name: str | None, overrides: Sequence[str]) -> str:
    """An algorithm, by its name or as a preset or TOML file sets it: one line per field, records inside it included."""
    from spear_rl.app.build.training import algorithm_of

    is_source = name in presets() or Path(name or "").is_file()
    chosen = [f"algorithm.name={name}"] if name and not is_source else []
    config = load(name if is_source else None, [*chosen, *overrides])
    rows = [("algorithm", config.algorithm.name), *_rows(algorithm_of(config), "")]
    width = max(len(path) for path, _ in rows)
    return "\n".join(f"{path:{width}s}  {value}" for path, value in rows)


def _rows(record: Any, path: str) -> Iterator[tuple[str, str]]:
    for entry in fields(record):
        value, key = getattr(record, entry.name), f"{path}{entry.name}"
        if not entry.repr:
            continue  # state, not a setting
        parts = value if isinstance(value, tuple) else (value,)
        yield key, ", ".join(map(_worded, parts)) or "none"
        for part in parts:
            if is_dataclass(part):
                yield from _rows(part, f"{key}.{type(part).__name__}." if isinstance(value, tuple) else f"{key}.")


def _worded(value: Any) -> str:
    from spear_rl.algorithms.wrapping import label

    if callable(value) or is_dataclass(value):
        return label(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def run_overview(run_dir: Path, *, num_episodes: int = 1, words: Words | None = None) -> str:
    """Summary, latest metrics and episodes of a run; unreadable lines are named and left out."""
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir} is no run folder: it has no config.toml")
    try:
        return "\n".join([*_lines(run_dir), *newest_lines(run_dir, num_episodes, words or Words())])
    except OSError as error:
        raise UserError(f"{error.filename or run_dir} cannot be read: {error.strerror}") from error


def _lines(run_dir: Path) -> list[str]:
    lines, path = [f"run {run_dir}"], run_dir / "summary.json"
    summary = path.read_text("utf-8", errors="replace") if path.is_file() else "unfinished: no summary.json yet"
    lines += summary.splitlines()
    lines += _warnings(run_dir)
    record = read_record(run_dir)
    lines += [f"model {name} of the hub, commit {commit}" for name, commit in record.get("models", {}).items()]
    if chosen := record.get("generator"):
        lines.append(f"engine.generator=auto took {chosen['name']}: {chosen['reason']}")
    rows = read_rows(run_dir / "metrics.jsonl")
    lines += rows.sentences("metrics.jsonl")
    if rows.by_step:
        step, row = list(rows.by_step.items())[-1]
        lines += ["", f"step {step}:"]
        lines += [f"  {name:32s} {_number(value)}" for name, value in row.items() if name != "step"]
        lines.append("`spear show metrics` explains these names")
        missing = gaps(rows.by_step, step)
        lines += [f"metrics.jsonl lacks the rows of steps {missing}"] if missing else []
    return [indented(line) for line in lines]


def _warnings(run_dir: Path) -> list[str]:
    """What the run warned of while it trained, one line per warning."""
    rows = read_rows(run_dir / WARNINGS)
    texts = [f"  step {step}: {text}" for step, text in warning_texts(rows.by_step)]
    return [*rows.sentences(WARNINGS), *(["", "warnings:", *texts] if texts else [])]


def _number(value: Any) -> str:
    try:
        return f"{value:.5g}"
    except (TypeError, ValueError, OverflowError):
        return str(value)
