"""Which curves are drawn, and their numbers: per run one list per metric, null where a step lacks it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from spear_rl.app.show.view.runs import Run
from spear_rl.io.episodes.columns import number_in
from spear_rl.io.escaping import one_line
from spear_rl.train.evaluate import wilson_interval

CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Success", ("rollout/success", "eval/success*")),
    ("Reward and bonus", ("rollout/reward", "rollout/bonus", "eval/reward")),
    ("Entropy, nats per token", ("policy/entropy", "replay/entropy")),
    ("Turns and tool calls per episode", ("rollout/turns", "rollout/tool_turns")),
    ("Schedules", ("rollout/bonus_weight", "replay/weight")),
    ("Replay: buffer", ("replay/buffer_size", "replay/eligible", "replay/trajectories")),
    ("Replay: share that passes the gate", ("replay/pass_rate",)),
    ("Replay: age in steps", ("replay/age",)),
    ("Replay: probability ratio", ("replay/ratio", "policy/ratio")),
    ("Replay: current advantage", ("replay/advantage",)),
    ("Clip fractions", ("*/clip_fraction", "*/covariance_clip_fraction")),
    ("Groups that compare nothing", ("rollout/flat_won", "rollout/flat_lost")),
    ("Turns that did not train", ("policy/dropped_*",)),
    ("How episodes end", ("rollout/stop_*", "rollout/invalid_turns", "rollout/truncated_turns")),
    ("Gradient norm", ("policy/grad_norm", "critic/grad_norm")),
    ("Approximate KL", ("policy/approx_kl", "replay/approx_kl", "policy/reference_kl")),
    ("Seconds", ("time/rollout", "time/update", "time/step")),
)
"""Title, and the metrics or patterns of them; the rest of a run's metrics are in its last chart."""

_MAX_SPLITS = 8
MAX_POINTS = 2000
"""Points of a curve; of a longer run every nth step is drawn, and the newest."""


def curves_of(run: Run) -> dict[str, Any]:
    """Steps and metrics of a run, evaluations apart as they have steps of their own."""
    rows = _thinned(run.metrics.by_step)
    names = sorted({name for row in rows.values() for name in row} - {"step"})
    series: dict[str, list[float | None]] = {
        name: [_number(row.get(name)) for row in rows.values()]
        for name in names
        if any(_number(row.get(name)) is not None for row in rows.values())
    }
    if "replay/eligible" in series:
        series["replay/pass_rate"] = [
            _number(passing / size) if passing is not None and size else None
            for passing, size in zip(series["replay/eligible"], series.get("replay/buffer_size", []), strict=False)
        ]
    bands = _bands(series)
    found = {"steps": list(rows), "series": series, "bands": bands, "evaluations": _evaluations(run)}
    return found | {"name": run.name, "label": one_line(run.name), "step": run.step, "finished": run.is_finished}


def charts_of(all_curves: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Titles and the metrics that some of these runs have."""
    names = sorted({name for curves in all_curves for name in (*curves["series"], *curves["evaluations"]["series"])})
    charts = [
        {"title": title, "names": [name for pattern in patterns for name in fnmatch.filter(names, pattern)]}
        for title, patterns in CHARTS
    ]
    return [chart for chart in charts if chart["names"]]


def _thinned(by_step: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    rows = dict(sorted(by_step.items()))
    every = math.ceil(len(rows) / MAX_POINTS)
    if every < 2:
        return rows
    steps = list(rows)
    return {step: rows[step] for step in [*steps[:-1:every], steps[-1]]}


def _number(value: Any) -> float | None:
    found = number_in(value)
    return None if found is None else float(f"{found:.6g}")


def _bands(series: Mapping[str, list[float | None]]) -> dict[str, list[list[float | None]]]:
    """Success with its 95 % Wilson interval over the step's episodes."""
    rates, counts = series.get("rollout/success", []), series.get("rollout/episodes", [])
    bounds = [_interval(rate, count) for rate, count in zip(rates, counts, strict=False)]
    low_high: list[list[float | None]] = [[bound[n] for bound in bounds] for n in range(2)]
    return {"rollout/success": low_high} if bounds else {}


def _interval(rate: float | None, count: float | None) -> tuple[float | None, float | None]:
    if rate is None or not count or not 0 <= rate <= 1:
        return None, None
    low, high = wilson_interval(rate * count, count) if 0 < count < 1e12 else (None, None)
    return _number(low), _number(high)


def _evaluations(run: Run) -> dict[str, Any]:
    rows = dict(sorted(run.evaluations.by_step.items()))
    values = {name: [_number(row.get(name)) for row in rows.values()] for name in ("success", "reward", "low", "high")}
    series = {
        f"eval/{name}": values[name] for name in ("success", "reward") if any(v is not None for v in values[name])
    }
    bands = {"eval/success": [values["low"], values["high"]]}
    others = [_mapping(row.get("also")) for row in rows.values()]
    for split in sorted({str(split) for also in others for split in also})[:_MAX_SPLITS]:
        found = [_mapping(also.get(split)) for also in others]
        name = f"eval/success on {one_line(split[:100])}"
        series[name], *bands[name] = ([_number(one.get(part)) for one in found] for part in ("success", "low", "high"))
    return {"steps": list(rows), "series": series, "bands": bands}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
