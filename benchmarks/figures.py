"""The figures of docs/results.md, drawn from the tables of docs/results_details.md: no number is written here.

python benchmarks/figures.py        # writes docs/figures/*.svg
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
T_975 = {2: 4.303, 3: 3.182, 4: 2.776}
"""Student's t for a 95 % interval, by degrees of freedom."""
COLOURS = {
    "spear": "#c1440e",
    "ours": "#c1440e",
    "paper": "#d9a441",
    "base": "#3b6ea5",
    "bonus alone": "#d9a441",
    "self-imitation alone": "#5b8c5a",
}

Seeds = list[list[float]]
"""One list per seed: a value per evaluation."""


@dataclass(frozen=True)
class Comparison:
    """SPEAR and its base on one environment, the same seeds in the same order."""

    label: str
    steps: list[int]
    spear: Seeds
    base: Seeds


def table_rows(heading: str, table: int = 0) -> list[list[str]]:
    """The cells of a table under a heading of the detailed results, its header left out."""
    text = (DOCS / "results_details.md").read_text("utf-8")
    part = re.split(r"^## ", text.split(f"## {heading}", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    tables = re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE)
    lines = tables[table].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(cell: str) -> list[float]:
    """The numbers of a cell, less an interval in brackets."""
    return [float(n) for n in re.findall(r"\d+\.\d+", re.sub(r"\([^)]*\)", "", cell))]


PRESETS = {
    "household": ("household\n(quickstart)", [0, 10, 20, 30, 40, 50]),
    "webshop": ("webshop, tiny", [0, 5, 10, 15, 20, 25, 30]),
    "sokoban": ("sokoban, 6x6", [0, 10, 20, 30, 40, 50, 60]),
    "tool_math": ("tool_math, tiny", [0, 10, 20, 30, 40, 50, 60]),
}
"""Task -> its label, and the steps of its evaluations."""


def comparisons() -> list[Comparison]:
    """Ours and the base in the presets, over three seeds."""
    return [_preset(task) for task in PRESETS]


def preset_seeds(task: str, arm: str) -> Seeds:
    rows = [row for row in table_rows("The presets with today's defaults") if row[:2] == [f"`{task}`", arm]]
    seeds = [numbers(row[3]) for row in rows]
    assert len(seeds) == 3
    assert all(len(values) == len(PRESETS[task][1]) for values in seeds)
    return seeds


def _preset(task: str) -> Comparison:
    label, steps = PRESETS[task]
    return Comparison(label, steps, preset_seeds(task, "ours"), preset_seeds(task, "base"))


def tool_math_arms(column: int) -> dict[str, Seeds]:
    """Arm -> one list per seed; column 1 is tool calls, 3 success, 4 success where the tool is needed."""
    arms: dict[str, Seeds] = {}
    for row in table_rows("`tool_math`, tiny level"):
        arms.setdefault(row[0].rsplit(" ", 1)[0], []).append(numbers(row[column]))
    return arms


def early(comparison: Comparison) -> int:
    """The evaluation nearest to a third of the run."""
    return min(range(len(comparison.steps)), key=lambda at: abs(comparison.steps[at] - comparison.steps[-1] / 3))


def paired_difference(comparison: Comparison, at: int) -> tuple[float, float, float]:
    """SPEAR minus base at an evaluation: mean over seeds and its 95 % t-interval."""
    differences = [s[at] - b[at] for s, b in zip(comparison.spear, comparison.base, strict=True)]
    mean = fmean(differences)
    half = T_975[len(differences) - 1] * stdev(differences) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


# -- drawing --------------------------------------------------------------------------------------------------------


def draw_quickstart(axes: Any) -> None:
    steps = PRESETS["household"][1]
    labels = {"ours": "SPEAR, ours", "paper": "SPEAR as in the paper", "base": "its base (dr-grpo)"}
    for arm, label in labels.items():
        seeds = preset_seeds("household", arm)
        for values in seeds:
            axes.plot(steps, values, color=COLOURS[arm], alpha=0.25, linewidth=1)
        mean = [fmean(values) for values in zip(*seeds, strict=True)]
        axes.plot(steps, mean, color=COLOURS[arm], linewidth=2.4, marker="o", markersize=4, label=label)
    axes.set(xlabel="training step", ylabel="held-out success", ylim=(0, 1), title="household, three seeds")
    axes.legend(frameon=False, loc="lower right")


def draw_tool_math(axes: Any) -> None:
    steps = [10, 20, 40, 60]
    for name, seeds in tool_math_arms(1).items():
        for values in seeds:
            axes.plot(steps, values, color=COLOURS[name], alpha=0.25, linewidth=1)
        mean = [fmean(values) for values in zip(*seeds, strict=True)]
        axes.plot(steps, mean, color=COLOURS[name], linewidth=2.4, marker="o", markersize=4, label=name)
    axes.set(xlabel="training step", ylabel="tool calls per episode", ylim=(0, 1.05), title="tool_math, three seeds")
    axes.legend(frameon=False, loc="lower right")


def draw_differences(axes: Any) -> None:
    """Paired differences of every comparison, early and at the end."""
    ticks = []
    for number, comparison in enumerate(comparisons()):
        for shift, at, colour in ((-0.14, early(comparison), "#888888"), (0.14, -1, "#000000")):
            mean, low, high = (100 * x for x in paired_difference(comparison, at))
            place = number + shift
            axes.plot([low, high], [place, place], color=colour, linewidth=2)
            axes.plot([mean], [place], "o", color=colour, markersize=6)
            axes.annotate(
                f"step {comparison.steps[at]}", (high, place), (4, -3), textcoords="offset points", fontsize=8
            )
        ticks.append(comparison.label)
    axes.axvline(0, color="#c1440e", linewidth=1)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.invert_yaxis()
    axes.set(xlabel="ours minus base, points of success (95 % t-interval over three seeds)", xlim=(-18, 45))
    axes.set_title("after about a third of the run (grey) and at its end (black)", fontsize=10)


def draw_alfworld(axes: Any) -> None:
    """One seed per curve: SmolLM2-135M with SPEAR; Qwen2.5-Coder-0.5B with SPEAR and with its base."""
    smollm2 = [
        (int(row[0].split()[0]), numbers(row[1])[0]) for row in table_rows("SmolLM2-135M") if row[0][0].isdigit()
    ]
    rows = [row for row in table_rows("Qwen2.5-Coder-0.5B") if re.match(r"step \d+( \(|$)", row[0])]
    qwen_steps = [int(row[0].split()[1]) for row in rows]
    axes.plot(
        *zip(*smollm2, strict=True),
        color="#c1440e",
        linestyle="--",
        marker="s",
        markersize=4,
        label="SmolLM2-135M, SPEAR",
    )
    for column, name, label in ((1, "spear", "Qwen 0.5B, SPEAR"), (2, "base", "Qwen 0.5B, its base")):
        values = [numbers(row[column])[0] for row in rows]
        axes.plot(qwen_steps, values, color=COLOURS[name], linewidth=2.2, marker="o", markersize=4, label=label)
    axes.set(
        xlabel="training step",
        ylabel="success on 140 valid_seen games",
        ylim=(0, 1),
        title="real ALFWorld, one seed each",
    )
    axes.legend(frameon=False, loc="lower right", fontsize=8)


FIGURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "quickstart": (draw_quickstart, (5.6, 3.4)),
    "tool_math": (draw_tool_math, (5.6, 3.4)),
    "differences": (draw_differences, (7.0, 3.2)),
    "alfworld": (draw_alfworld, (5.6, 3.4)),
}


def write(names: Sequence[str] = tuple(FIGURES), folder: Path = DOCS / "figures") -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "spear_rl", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot

    for name in names:
        draw, size = FIGURES[name]
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        draw(axes)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


if __name__ == "__main__":
    write()
