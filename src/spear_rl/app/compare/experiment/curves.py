"""What the figures show: curves and distributions of arms, with 95 % t-intervals over seeds."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from spear_rl.app.compare.arms import Arm
from spear_rl.app.compare.estimates import over_seeds
from spear_rl.app.compare.experiment.analysis import Block
from spear_rl.app.compare.experiment.measures import cumulative, gate_pass_rate, optimizer_steps, whole
from spear_rl.app.compare.runs import WINDOW, RunRecord
from spear_rl.io.jsonl import read_rows

NAMES = (
    "success_episodes", "success_optimizer_steps", "success_seconds", "entropy", "tool_turns", "replay_age",
    "replay_success", "gate", "families",
)  # fmt: skip
"""Of all figures, whether or not runs have data for them."""
_BINS = 5
"""Of the success of a replayed episode's group."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one arm; `x` are numbers, or names of kinds."""

    x: list[float] | list[str]
    mean: list[float]
    low: list[float]
    """The t-interval over seeds; the mean itself for one seed."""
    high: list[float]


@dataclass(frozen=True)
class Panels:
    """One figure: a panel per block."""

    name: str
    """Of its files."""
    title: str
    x: str
    y: str
    lines: dict[str, dict[str, Line]]
    """Block -> arm -> its line."""
    is_share: bool = False
    top: float | None = None
    """Where the axis of y ends; None is by the data."""


Series = Mapping[float, float] | Mapping[str, float]


def band(series: Sequence[Series]) -> Line:
    """Mean and interval of seeds given as x -> value, at the x that all of them have."""
    series = [one for one in series if one]
    common = [x for x in (series[0] if series else ()) if all(x in other for other in series)]
    line = Line(list(common), [], [], [])  # type: ignore[arg-type]
    for x in common:
        values = [one[x] for one in series]  # type: ignore[index]
        found = over_seeds(values) if len(values) > 1 else None
        line.mean.append(fmean(values))
        line.low.append(found.low if found else values[0])
        line.high.append(found.high if found else values[0])
    return line


def figures_of(blocks: Sequence[Block]) -> list[Panels]:
    """Every figure that these runs have data for."""

    def panels(name: str, title: str, x: str, y: str, line: Callable[[Arm], Line], *, is_share: bool = False) -> Panels:
        lines = {block.label: {arm.label: line(arm) for arm in block.arms} for block in blocks}
        kept = {label: {arm: found for arm, found in arms.items() if found.x} for label, arms in lines.items()}
        return Panels(name, title, x, y, kept, is_share, 1.0 if is_share and not name.startswith("replay_") else None)

    def metric(read: Callable[[RunRecord], Mapping[int, float]]) -> Callable[[Arm], Line]:
        return lambda arm: band([{float(step): value for step, value in read(run).items()} for run in arm.runs])

    success = "success of evaluations"
    found = [
        panels(f"success_{name}", f"{success} against {title}", title, "share of tasks", line, is_share=True)
        for name, title, line in (
            ("episodes", "episodes played", lambda arm: _success(arm, _whole("rollout/episodes"))),
            ("optimizer_steps", "optimizer steps", lambda arm: _success(arm, optimizer_steps)),
            ("seconds", "seconds of RL", lambda arm: _success(arm, _whole("time/step"))),
        )
    ]
    found += [
        panels(
            "entropy", f"entropy of the policy, means of {WINDOW} steps", "step", "nats per token",
            metric(_smoothed("policy/entropy")),
        ),
        panels(
            "tool_turns", f"tool use, means of {WINDOW} steps", "step", "tool turns per episode",
            metric(_smoothed("rollout/tool_turns")),
        ),
        panels("replay_age", "replayed episodes by age", "age in steps", "share", _of_draws(_ages), is_share=True),
        panels(
            "replay_success", "replayed episodes by the success of their group when played", "success of the group",
            "share", _of_draws(_group_success), is_share=True,
        ),
        panels("gate", "stored episodes that pass the gate", "step", "share", metric(gate_pass_rate), is_share=True),
        panels("families", "success at the end per kind of task", "", "share of tasks", _families, is_share=True),
    ]  # fmt: skip
    return [figure for figure in found if any(figure.lines.values())]


def _smoothed(key: str) -> Callable[[RunRecord], Mapping[int, float]]:
    return lambda run: run.smoothed(key)


def _whole(key: str) -> Callable[[RunRecord], Mapping[int, float] | None]:
    return lambda run: whole(run, key)


def _success(arm: Arm, cost: Callable[[RunRecord], Mapping[int, float] | None]) -> Line:
    """Success of the evaluations of runs without a lost row; x is the mean over seeds of what was spent before each."""
    runs = [run for run in arm.runs if run.evals and run.is_whole]
    line = band([{float(step): float(row["success"]) for step, row in run.evals.items()} for run in runs])
    spent = [cumulative(found) for run in runs if (found := cost(run))]
    if len(spent) < len(runs) or not all(step in one for one in spent for step in line.x):
        return Line([], [], [], [])
    x = [fmean(one[int(step)] for one in spent) for step in line.x]
    return Line(x, line.mean, line.low, line.high)


def _families(arm: Arm) -> Line:
    ends = [run.evals[max(run.evals)].get("by_family") for run in arm.runs if run.evals]
    return band([_rates(families) for families in ends if isinstance(families, dict)])


def _rates(families: Mapping[str, Any]) -> dict[str, float]:
    """Kind of task -> success, where it is a share."""
    found = {name or "-": rate.get("success") for name, rate in families.items() if isinstance(rate, dict)}
    return {name: float(share) for name, share in found.items() if isinstance(share, int | float) and 0 <= share <= 1}


def _of_draws(shares: Callable[[Path], Mapping[float, float]]) -> Callable[[Arm], Line]:
    """A distribution over replayed episodes; what a seed never drew counts as 0 there."""

    def line(arm: Arm) -> Line:
        found = [one for run in arm.runs if (one := shares(run.path))]
        places = sorted({x for one in found for x in one})
        return band([{x: one.get(x, 0.0) for x in places} for one in found])

    return line


def _ages(path: Path) -> dict[float, float]:
    ages = Counter(draw["age"] for draw in draws(path) if type(draw.get("age")) is int and abs(draw["age"]) < 10**9)
    return {float(age): count / ages.total() for age, count in sorted(ages.items())}


def _group_success(path: Path) -> dict[float, float]:
    """Middle of a bin -> share of the draws in it; a group that always succeeds is in the last."""
    values = [value for draw in draws(path) if isinstance(value := draw.get("group_success"), int | float)]
    bins = Counter(min(int(value * _BINS), _BINS - 1) for value in values if 0 <= value <= 1)
    return {(n + 0.5) / _BINS: bins[n] / bins.total() for n in range(_BINS)} if bins else {}


def draws(path: Path) -> list[dict[str, Any]]:
    """All draws of a run, without what is damaged."""
    rows = read_rows(path / "draws.jsonl").by_step.values()
    lists = [entries for row in rows if isinstance(entries := row.get("draws"), list)]
    return [draw for entries in lists for draw in entries if isinstance(draw, dict)]
