"""Curves of arms, and one figure of them. Imports matplotlib only to draw."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from spear_rl.app.compare.arms import Arm
from spear_rl.app.compare.runs import WINDOW
from spear_rl.errors import MissingExtraError
from spear_rl.io.escaping import one_line

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
"""The colour-blind-safe palette of Okabe and Ito, without the yellow."""
_DASHES = ("-", "--", ":", "-.")
_PANELS = {
    "success": ("rollout/success", "share of episodes"),
    "reward": ("rollout/reward", "mean reward per episode"),
    "entropy": ("policy/entropy", "entropy of the policy (nats per token)"),
    "tool turns": ("rollout/tool_turns", "tool turns per episode"),
    "replayed": ("replay/trajectories", "episodes replayed per step"),
}
"""Panel -> its metric and the label of its axis."""
_STYLE = {
    "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlesize": 12, "text.parse_math": False,
}  # fmt: skip
"""Labels are untrusted text, so not parsed as formulas."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one arm: the mean over its runs, and the lowest and highest of them."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve(runs: Sequence[Mapping[int, float]]) -> Curve:
    """The curve of runs given as step -> value, at the steps that all of them have.

    Elsewhere the mean would jump when a run drops out, which reads as learning.
    """
    runs = [run for run in runs if run]
    steps = sorted(set(runs[0]).intersection(*runs[1:])) if runs else []
    values = [[run[step] for run in runs] for step in steps]
    return Curve(steps, [fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values])


def curves_of(arms: Sequence[Arm]) -> dict[str, dict[str, Curve]]:
    """Panel -> arm's label -> its curve, where it has one."""
    curves: dict[str, dict[str, Curve]] = {}
    for name, (metric, _) in _PANELS.items():
        lines = {arm.label: curve([run.smoothed(metric) for run in arm.runs]) for arm in arms}
        curves[name] = {label: line for label, line in lines.items() if line.steps}
    return curves


def draw(path: Path, arms: Sequence[Arm], curves: Mapping[str, Mapping[str, Curve]]) -> None:
    """Write the figure: one panel per metric, one line per arm, and the final success of every seed."""
    with drawing((14, 8.6)) as figure:
        _fill(figure, arms, curves)
        figure.savefig(path, dpi=120)


@contextmanager
def drawing(size: tuple[float, float]) -> Iterator[Any]:
    """A figure of matplotlib in our style, which holds within the block."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingExtraError("curves need matplotlib: pip install 'spear-rl[train]'") from error
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    FigureCanvasAgg(figure)
    with rc_context(_STYLE):
        yield figure


def looks_of(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label -> colour and dashes of its line."""
    return {
        label: {"color": _COLORS[n % len(_COLORS)], "linestyle": _DASHES[n // len(_COLORS) % len(_DASHES)]}
        for n, label in enumerate(labels)
    }


def add_legend(figure: Any, looks: Mapping[str, dict[str, Any]], title: str, *, width: int = 130) -> None:
    """One legend below all panels, in as many columns as `width` characters have room for."""
    names = {label: "\n".join(textwrap.wrap(one_line(label), width)) for label in looks}
    handles = [figure.axes[-1].plot([], [], lw=2.5, label=names[label], **look)[0] for label, look in looks.items()]
    columns = max(1, min(len(looks), width // (8 + max(map(len, looks)))))
    lines = max(name.count("\n") + 1 for name in names.values()) * math.ceil(len(looks) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * max(lines - 2, 0))  # so that the panels keep their room
    style = {"frameon": False, "fontsize": 11, "title": title, "title_fontsize": 10}
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **style)


def _fill(figure: Any, arms: Sequence[Arm], curves: Mapping[str, Mapping[str, Curve]]) -> None:
    looks = looks_of([arm.label for arm in arms])
    panels = figure.subplots(2, 3).flat
    for axes, (name, lines) in zip(panels, curves.items(), strict=False):
        for label, line in lines.items():
            axes.plot(line.steps, line.mean, lw=1.8, marker="." if len(line.steps) == 1 else "", **looks[label])
            if line.low != line.high:
                axes.fill_between(line.steps, line.low, line.high, color=looks[label]["color"], alpha=0.15, lw=0)
        if not lines:
            axes.text(0.5, 0.5, "not logged by these runs", transform=axes.transAxes, ha="center", color="0.5")
        axes.set(title=name, xlabel="step", ylabel=_PANELS[name][1])
        if name in ("tool turns", "replayed"):
            axes.set_ylim(bottom=0)
    _eval_points(figure.axes[0], arms, looks)
    _ends(figure.axes[-1], arms, looks)
    envs = sorted({str(arm.runs[0].settings["task.env"]) for arm in arms})
    counts = sorted({len(arm.seeds) for arm in arms})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    figure.suptitle(f"Training on {one_line(', '.join(envs))}, {seeds} per arm", fontsize=15, fontweight="bold")
    says = f"lines: mean over seeds of a moving average of {WINDOW} steps; bands: lowest to highest seed"
    add_legend(figure, looks, says)


def _eval_points(axes: Any, arms: Sequence[Arm], looks: Mapping[str, dict[str, Any]]) -> None:
    """Evaluated success over the training curve, as diamonds."""
    for arm in arms:
        points = curve([{step: row["success"] for step, row in run.evals.items()} for run in arm.runs])
        color = looks[arm.label]["color"]
        if points.steps:
            look = {"ms": 6.5, "color": color, "mec": "white", "mew": 0.8}
            axes.plot(points.steps, points.mean, "D", zorder=4, clip_on=False, **look)
    axes.set(title="success (diamonds: evaluations)", ylim=(0, 1))
    axes.yaxis.set_major_formatter("{x:.0%}")


def _ends(axes: Any, arms: Sequence[Arm], looks: Mapping[str, dict[str, Any]]) -> None:
    """Success after: one circle per seed, the mean and its 95 % interval."""
    for y, arm in enumerate(arms):
        color, after = looks[arm.label]["color"], arm.success_after
        if after is None:
            axes.text(0.5, y, "not evaluated", ha="center", va="center", color="0.5")
            continue
        axes.plot([after.low, after.high], [y, y], color=color, lw=6, alpha=0.3, solid_capstyle="round")
        seeds = list(arm.after_by_seed.values())
        axes.plot(seeds, [y + 0.17] * len(seeds), "o", ms=5, mfc="none", color=color, clip_on=False)
        axes.plot([after.value], [y], "D", ms=9, color=color, mec="white", clip_on=False)
        axes.annotate(f"{after.value:.1%}", (after.value, y), (0, 10), textcoords="offset points", ha="center")
    title = "success after (bars: 95 %, circles: seeds)"
    axes.set(title=title, xlabel="share of evaluated episodes", xlim=(0, 1), ylim=(len(arms) - 0.4, -0.6), yticks=[])
    axes.xaxis.set_major_formatter("{x:.0%}")
