"""Figures of an experiment as SVG and PNG: a panel per block, a line per arm, bands of 95 % t-intervals over seeds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spear_rl.app.compare.experiment.analysis import Block
from spear_rl.app.compare.experiment.curves import NAMES, Line, Panels
from spear_rl.app.compare.plots import add_legend, drawing, looks_of
from spear_rl.io.escaping import clipped, one_line

_COLUMNS = 4
_MOST_KINDS = 24
"""Kinds of tasks that a panel has room for."""
DIFFERENCES = "differences"


def draw_all(folder: Path, figures: Sequence[Panels], blocks: Sequence[Block], measure: str) -> list[tuple[str, str]]:
    """Write every figure as NAME.svg and NAME.png; returns (name, title) in the order of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = list(dict.fromkeys(arm.label for block in blocks for arm in block.arms))
    drawn = []
    if any(d.measure == measure and d.by_seed for block in blocks for d in block.differences):
        _draw_differences(folder, blocks, measure, labels)
        drawn.append(
            (DIFFERENCES, f"{measure}, arm minus reference, paired by seed (95 % t-intervals; circles: seeds)")
        )
    for figure in figures:
        _draw(folder, figure, labels)
        drawn.append((figure.name, figure.title))
    for name in {DIFFERENCES, *NAMES} - {name for name, _ in drawn}:  # of an earlier report, whose runs had data for it
        for kind in ("svg", "png"):
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    return drawn


def _save(figure: Any, folder: Path, name: str) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    figure.savefig(folder / f"{name}.png", dpi=110)


def _draw(folder: Path, panels: Panels, labels: Sequence[str]) -> None:
    count = len(panels.lines)
    columns = min(count, _COLUMNS)
    rows = math.ceil(count / columns)
    by_name = any(isinstance(x, str) for arms in panels.lines.values() for line in arms.values() for x in line.x)
    kinds = max((len(_kinds(arms)) for arms in panels.lines.values()), default=0) if by_name else 0
    height = max(3.0, 0.9 + 0.045 * kinds * (len(labels) + 2)) if by_name else 3.0
    looks = looks_of(labels)
    width = max(4.3 * columns, 6.5)
    with drawing((width, height * rows + 1.2)) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, sharey=bool(panels.top) and not by_name)
        for axes in list(grid.flat)[count:]:
            axes.set_visible(False)
        for axes, (label, arms) in zip(grid.flat, panels.lines.items(), strict=False):
            (_fill_kinds if by_name else _fill)(axes, panels, arms, looks)
            axes.set_title(clipped(label, 60))
            if not arms:
                axes.text(0.5, 0.5, "not logged by these runs", transform=axes.transAxes, ha="center", color="0.5")
        figure.suptitle(panels.title, fontsize=14, fontweight="bold")
        add_legend(figure, looks, "mean over seeds; bands: 95 % t-intervals over seeds", width=int(width * 9))
        _save(figure, folder, panels.name)


def _fill(axes: Any, panels: Panels, arms: Mapping[str, Line], looks: Mapping[str, dict[str, Any]]) -> None:
    for label, line in arms.items():
        axes.plot(line.x, line.mean, lw=1.8, marker="o" if len(line.x) < 30 else "", ms=3, **looks[label])
        if line.low != line.high:
            low, high = interval_of(panels, line)
            axes.fill_between(line.x, low, high, color=looks[label]["color"], alpha=0.15, lw=0)
    axes.set(xlabel=panels.x, ylabel=panels.y)
    if panels.x in ("step", "age in steps"):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if panels.name == "tool_turns":
        axes.set_ylim(0, None if any(high > 0 for line in arms.values() for high in line.high) else 1)
    if panels.is_share:
        axes.set_ylim(-0.02 * (panels.top or 0), panels.top and 1.02 * panels.top)
        axes.yaxis.set_major_formatter("{x:.0%}")
        if panels.x == "success of the group":
            axes.set_xlim(0, 1)
            axes.xaxis.set_major_formatter("{x:.0%}")


def _kinds(arms: Mapping[str, Line]) -> list[str]:
    return sorted({str(x) for line in arms.values() for x in line.x})[:_MOST_KINDS]


def _fill_kinds(axes: Any, panels: Panels, arms: Mapping[str, Line], looks: Mapping[str, dict[str, Any]]) -> None:
    """Success per kind of task: a point per arm with its interval, kinds below each other."""
    kinds = _kinds(arms)
    for number, (label, line) in enumerate(arms.items()):
        shift = (number - (len(arms) - 1) / 2) * 0.7 / max(len(arms), 1)
        low, high = interval_of(panels, line)
        for x, mean, below, above in zip(line.x, line.mean, low, high, strict=True):
            if x in kinds:
                y, color = kinds.index(str(x)) + shift, looks[label]["color"]
                axes.plot([below, above], [y, y], color=color, lw=2.5, alpha=0.35)
                axes.plot([mean], [y], "o", ms=4.5, color=color, clip_on=False)
    axes.set_yticks(range(len(kinds)), [clipped(kind, 28) for kind in kinds], fontsize=8)
    axes.set(xlim=(0, 1), ylim=(len(kinds) - 0.4, -0.6), xlabel=panels.y)
    axes.xaxis.set_major_formatter("{x:.0%}")


def interval_of(panels: Panels, line: Line) -> tuple[list[float], list[float]]:
    """The interval, clipped to possible values: at least 0, and for a share at most 1."""
    top = 1.0 if panels.is_share else math.inf
    return [max(low, 0.0) for low in line.low], [min(high, top) for high in line.high]


def _draw_differences(folder: Path, blocks: Sequence[Block], measure: str, labels: Sequence[str]) -> None:
    looks, rows = looks_of(labels), list[tuple[str, Any]]()
    for block in blocks:
        rows += [(block.label, d) for d in block.differences if d.measure == measure and d.by_seed]
    with drawing((9, 1.4 + 0.32 * len(rows))) as figure:
        axes = figure.subplots()
        axes.axvline(0, color="0.4", lw=1)
        for y, (_, d) in enumerate(rows):
            color = looks[d.arm]["color"]
            if d.estimate:
                axes.plot([100 * d.estimate.low, 100 * d.estimate.high], [y, y], color=color, lw=5, alpha=0.3)
            axes.plot(
                [100 * v for v in d.by_seed.values()], [y + 0.22] * len(d.by_seed), "o", ms=4, mfc="none", color=color
            )
            axes.plot([100 * d.value], [y], "D", ms=7, color=color, mec="white")
        names = [
            clipped(f"{d.arm} - {d.reference}" + (f", {label}" if len(blocks) > 1 else ""), 70) for label, d in rows
        ]
        axes.set_yticks(range(len(rows)), [one_line(name) for name in names], fontsize=9)
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=f"difference in {measure}, percentage points")
        _save(figure, folder, DIFFERENCES)
