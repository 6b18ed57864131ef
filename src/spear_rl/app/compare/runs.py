"""A run folder, read and checked: the files that `spear train` writes."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from spear_rl.app.compare.estimates import Estimate
from spear_rl.errors import UserError
from spear_rl.io.jsonl import gaps, read_rows

WINDOW = 5
"""Steps of a moving average."""

_RATE = ("success", "low", "high")
_MOST, _ROUNDING = 1e150, 1e-9
"""Sums of larger numbers overflow, so they count as missing; how far a share may be outside of 0 to 1."""


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says about its run."""

    path: Path
    settings: dict[str, Any]
    """Dotted key -> value, of config.toml."""
    rows: dict[int, dict[str, Any]]
    """Step -> its line of metrics.jsonl."""
    evals: dict[int, dict[str, Any]]
    """Number of steps learned before it -> its line of eval.jsonl."""
    before: Estimate | None
    after: Estimate | None
    note: str = ""
    """What is missing of it, if anything."""

    @property
    def algorithm(self) -> str:
        return str(self.settings["algorithm.name"])

    @property
    def seed(self) -> int:
        return int(self.settings["run.seed"])

    @property
    def taken(self) -> int:
        """Number of steps taken, by metrics and evaluations: either file may lack its last row."""
        return max([max(self.rows) + 1, *self.evals])

    @property
    def is_whole(self) -> bool:
        """Whether metrics.jsonl has a row for every step; without one, sums over steps are too small."""
        return len(self.rows) == self.taken

    @property
    def solved(self) -> dict[str, float]:
        """Task id -> share solved, of the last evaluation."""
        last = max(self.evals, default=0)
        return self.evals[last].get("solved", {}) if last > 0 else {}

    def series(self, key: str) -> dict[int, float]:
        """Step -> metric, where there is a finite one."""
        return {step: float(row[key]) for step, row in self.rows.items() if _is_number(row.get(key))}

    def smoothed(self, key: str) -> dict[int, float]:
        """Step -> mean of the metric's last `WINDOW` values up to there."""
        raw = self.series(key)
        values = list(raw.values())
        return {step: fmean(values[max(i + 1 - WINDOW, 0) : i + 1]) for i, step in enumerate(raw)}


def load_run(path: Path) -> RunRecord:
    """The record of a run folder; a run that is still going or was stopped is noted as unfinished."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: name folders that `spear train` wrote (run.dir)")
    settings, summary = _settings(path), _summary(path)
    rows = _rows(path / "metrics.jsonl", required=())
    if not rows:
        raise UserError(f"{path} has no metrics: metrics.jsonl is missing or empty, so it has not taken a step yet")
    evals = _rows(path / "eval.jsonl", required=_RATE)
    for step, row in evals.items():
        if not (_are_shares(row.get("solved", {})) and _are_rates(row.get("also", {}))):
            advice = "delete the line, or resume the run to have it mended"
            raise UserError(f"{path}: eval.jsonl, the row of step {step} has no shares in solved or also; {advice}")
    taken, planned = max([max(rows) + 1, *evals]), settings["run.steps"]
    missing = gaps(rows, taken)
    lacking = f"without the rows of steps {missing} in metrics.jsonl" if missing else ""
    if summary is not None and summary.get("steps") == max(taken, planned):
        before, after = _estimate(summary.get("success_before")), _estimate(summary.get("success_after"))
        return RunRecord(path, settings, rows, evals, before, after, lacking)
    # A summary of fewer steps was written before a resume.
    note = f"unfinished: {taken} of {planned} steps"
    before, after = _estimate(evals.get(0)), None
    last = max(evals, default=0)
    if last > 0:
        after = _estimate(evals[last])
        note += f", success after is that at step {last}"
    note += f"; {lacking}" if lacking else ""
    return RunRecord(path, settings, rows, evals, before, after, note)


def _settings(path: Path) -> dict[str, Any]:
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} is no run folder: it has no config.toml")
    settings: dict[str, Any] = _parsed(path, "config.toml", lambda text: dict(_flat(tomllib.loads(text))))
    for key, kind in (("algorithm.name", str), ("task.env", str), ("run.seed", int), ("run.steps", int)):
        if not isinstance(settings.get(key), kind):
            raise UserError(f"{path}: config.toml does not say {key}")
    return settings


def _summary(path: Path) -> dict[str, Any] | None:
    if not (path / "summary.json").is_file():
        return None
    summary = _parsed(path, "summary.json", json.loads)
    if not isinstance(summary, dict):
        raise UserError(f"{path}: summary.json is not a JSON object")
    for key in ("success_before", "success_after"):
        rate = summary.get(key)
        if rate is not None and not (isinstance(rate, dict) and all(_is_share(rate.get(k)) for k in _RATE)):
            raise UserError(f"{path}: summary.json, {key} does not say {', '.join(_RATE)} as shares")
    return summary


def _parsed(path: Path, name: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse((path / name).read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {name} is not valid {name.rpartition('.')[2].upper()}: {error}") from error


def _rows(path: Path, *, required: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Step -> line, in order of steps; a last line that a kill cut off is left out."""
    try:
        found = read_rows(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    for sentence in found.sentences(path.name):
        raise UserError(f"{path.parent}: {sentence}; delete the line, or resume the run to have it mended")
    for step, row in found.by_step.items():
        for key in required:
            if not _is_share(row.get(key)):
                raise UserError(f"{path.parent}: {path.name}, line {found.lines[step]} does not say {key} as a share")
    return found.by_step


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _MOST


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and -_ROUNDING <= value <= 1 + _ROUNDING


def _are_shares(shares: Any) -> bool:
    return isinstance(shares, dict) and all(map(_is_share, shares.values()))


def _are_rates(splits: Any) -> bool:
    rates = splits.values() if isinstance(splits, dict) else [None]
    return all(isinstance(rate, dict) and _is_share(rate.get("success")) for rate in rates)


def _estimate(rate: Any) -> Estimate | None:
    return Estimate(rate["success"], rate["low"], rate["high"], "Wilson, 1 seed") if rate else None
