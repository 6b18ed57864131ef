"""The report of an experiment: one content, written as Markdown and as one HTML file that refers to nothing outside."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spear_rl.app.compare.estimates import NO_WIDTH
from spear_rl.app.compare.experiment.analysis import Block, Difference, Mean, Summary, missing, notes_on, summaries
from spear_rl.app.compare.experiment.curves import Panels, figures_of
from spear_rl.app.compare.experiment.figures import draw_all, interval_of
from spear_rl.app.compare.experiment.measures import COSTS, COSTS_NOTE, MEANINGS
from spear_rl.app.compare.plots import looks_of
from spear_rl.io.escaping import markdown, one_line, visible
from spear_rl.io.files import write_whole, writing
from spear_rl.io.http.look import inlined, templates


@dataclass(frozen=True)
class Results:
    """Everything a report says."""

    name: str
    blocks: list[Block]
    primary: str
    secondary: list[str]
    out: Path
    warnings: list[str] = field(default_factory=list)
    """What is not like for like, not finished, or was changed."""
    about: dict[str, Any] = field(default_factory=dict)
    """Line -> its text, of how it was run."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    """State of every cell."""
    plan: str = ""
    """The plan's text."""
    question: str = ""
    """What is asked, in a line."""
    declared: str = "not declared before running"
    """When the primary measure was chosen."""
    planned: int = 0
    """Blocks of the plan, if there is one: those without a finished run too."""

    @property
    def measures(self) -> list[str]:
        return [self.primary, *self.secondary]

    @property
    def summaries(self) -> list[Summary]:
        return summaries(self.blocks, self.primary, self.planned or len(self.blocks))

    @property
    def summary(self) -> list[str]:
        said = [found.text for found in self.summaries]
        return said or [f"there is nothing to compare: {missing(self.blocks, self.primary)}"]

    def header(self) -> list[str]:
        return ["arm", "seeds", *(f"{measure} (95 %)" for measure in self.measures), *COSTS]

    def rows(self, block: Block) -> list[list[str]]:
        rows = []
        for arm in block.arms:
            means = block.table[arm.label]
            row = [arm.label, str(len(arm.seeds)), *(_share(means[measure]) for measure in self.measures)]
            for column, (_, form) in COSTS.items():
                mean = means[column]
                row.append("-" if mean is None else format(mean.value, form))
            rows.append(row)
        return rows


def _share(mean: Mean | None) -> str:
    if mean is None:
        return "-"
    if mean.low is None or mean.high is None:
        return f"{mean.value:.1%}"
    if mean.high - mean.low < NO_WIDTH:
        return f"{mean.value:.1%} (all seeds equal)"
    return f"{mean.value:.1%} ({max(mean.low, 0.0):.1%} to {min(mean.high, 1.0):.1%})"


def difference_rows(block: Block) -> list[list[str]]:
    """Arm minus reference, with the difference of every seed."""
    return [
        [f"{d.arm} - {d.reference}", d.measure, d.text, d.shown, _per_seed(d)] for d in block.differences if d.by_seed
    ]


def _per_seed(difference: Difference) -> str:
    return ", ".join(f"seed {seed}: {100 * value:+.1f}" for seed, value in difference.by_seed.items())


_DIFFERENCE_HEADER = ["difference", "measure", "points (95 %)", "shown", "per seed, in points"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A heading, list, table, figure or code, for either format; `curves`: the figures that a page's script draws."""

    kind: str
    text: str = ""
    items: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    level: int = 2


def write_report(results: Results) -> None:
    """report.md, report.html, figures/ and results.json in the experiment's folder."""
    out = results.out
    with writing(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
        figures = figures_of(results.blocks)
        drawn = draw_all(out / "figures", figures, results.blocks, results.primary)
    parts = _parts(results, drawn)
    texts = [_as_markdown(part) for part in parts if part.kind != "curves"]
    write_whole(out / "report.md", "\n\n".join(texts) + "\n")
    write_whole(out / "report.html", _as_html(results, parts, figures))
    content = {
        "name": results.name,
        "primary": results.primary,
        "secondary": results.secondary,
        "blocks": [block.as_dict() for block in results.blocks],
        "summary": [asdict(found) | {"text": found.text} for found in results.summaries],
        "warnings": results.warnings,
        "notes": list(notes_on(results.blocks)),
        "cells": results.cells,
        "about": results.about,
        "plan": results.plan,
        "figures": [asdict(figure) for figure in figures],
    }
    write_whole(out / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


def _parts(results: Results, drawn: Sequence[tuple[str, str]]) -> list[_Part]:
    parts = [_Part("heading", f"Experiment {results.name}", level=1)]
    measures = [f"Question: {results.question}"] if results.question else []
    measures.append(f"Primary measure, {results.declared}: {results.primary}, {MEANINGS[results.primary]}.")
    measures += [f"Secondary: {name}, {MEANINGS[name]}." for name in results.secondary]
    parts += [_Part("list", items=[[text] for text in measures])]
    if results.warnings:
        parts += [_Part("heading", "Warnings"), _Part("list", items=[[text] for text in results.warnings])]
    parts += [_Part("heading", "Summary"), _Part("list", items=[[text] for text in results.summary])]
    parts.append(_Part("heading", "Results"))
    for block in results.blocks:
        if len(results.blocks) > 1:
            parts.append(_Part("heading", block.label, level=3))
        parts.append(_Part("table", items=results.rows(block), header=results.header()))
        if differences := difference_rows(block):
            parts.append(_Part("table", items=differences, header=_DIFFERENCE_HEADER))
    notes = ["Intervals are 95 % t-intervals over seeds; differences are paired by seed.", COSTS_NOTE]
    parts.append(_Part("list", items=[[text] for text in [*notes, *notes_on(results.blocks)]]))
    parts += [_Part("heading", "Figures"), _Part("curves")]
    parts += [_Part("figure", name, items=[[title]]) for name, title in drawn]
    if unfinished := [cell for cell in results.cells if cell["state"] != "done"]:
        rows = [[cell["cell"], cell["state"], cell.get("error", "")] for cell in unfinished]
        parts += [_Part("heading", "Cells without a result")]
        parts += [_Part("table", items=rows, header=["cell", "state", "why"])]
    parts.append(_Part("heading", "How it was run"))
    parts.append(_Part("list", items=[[f"{name}: {_told(value)}"] for name, value in results.about.items()]))
    if results.plan:
        parts += [_Part("heading", "The plan"), _Part("code", results.plan)]
    return parts


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return "; ".join(map(_told, value)) or "-"
    return "-" if value is None else str(value)


def _as_markdown(part: _Part) -> str:
    if part.kind == "heading":
        return f"{'#' * part.level} {markdown(part.text)}"
    if part.kind == "list":
        return "\n".join(f"- {markdown(item)}" for (item,) in part.items)
    if part.kind == "table":
        lines = [part.header, ["---"] + ["---:"] * (len(part.header) - 1)]
        head = ["| " + " | ".join(map(markdown, lines[0])) + " |", "| " + " | ".join(lines[1]) + " |"]
        return "\n".join([*head, *("| " + " | ".join(map(markdown, row)) + " |" for row in part.items)])
    if part.kind == "figure":
        return f"![{markdown(part.items[0][0])}](figures/{part.text}.svg)"
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", part.text))])
    return f"{fence}toml\n{visible(part.text).strip()}\n{fence}"


def _as_html(results: Results, parts: Sequence[_Part], figures: Sequence[Panels]) -> str:
    # As images: scripts and links in an SVG do nothing there.
    drawings = {p.text: (results.out / "figures" / f"{p.text}.svg").read_bytes() for p in parts if p.kind == "figure"}
    images = {name: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}" for name, svg in drawings.items()}
    template = templates("spear_rl.app.compare", ".").get_template("experiment.html.jinja")
    looks = looks_of(list(dict.fromkeys(arm.label for block in results.blocks for arm in block.arms)))
    drawn = {figure.name: charts for figure in figures if (charts := _charts(figure, looks))}
    data = {"runs": [], "charts": [chart for charts in drawn.values() for chart in charts]}
    return template.render(
        title=results.name, site="experiment", parts=parts, images=images, interactive=drawn, data=data, **inlined()
    )


def _charts(figure: Panels, looks: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A chart per block as the page's script draws it: a line per arm with its interval; none for kinds of tasks."""
    charts = []
    scale, unit = (100, f"{figure.y} in %") if figure.is_share else (1, figure.y)

    def scaled(values: Sequence[float]) -> list[float]:
        return [round(scale * value, 9) for value in values]

    for block, arms in figure.lines.items():
        lines: list[dict[str, Any]] = []
        for arm, line in arms.items():
            if not any(isinstance(x, str) for x in line.x):
                bands = {"": [*map(scaled, interval_of(figure, line))]} if line.low != line.high else {}
                look = {"label": one_line(arm), "colour": looks[arm]["color"]}
                lines.append(look | {"steps": line.x, "series": {"": scaled(line.mean)}, "bands": bands})
        title = f"{figure.title}, {unit}" + (f": {one_line(block)}" if len(figure.lines) > 1 else "")
        charts += [{"title": title, "names": [""], "x": figure.x, "runs": lines}] if lines else []
    return charts
