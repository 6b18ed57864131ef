"""`spear report`: runs as one HTML file that opens without a network: curves, table, chosen episodes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from spear_rl.app.show.view.pages import Query, asset, curves_data, found_episodes, page, shown_episode
from spear_rl.app.show.view.runs import Run, Runs
from spear_rl.errors import UserError
from spear_rl.io.files import write_whole

MAX_RUNS = 24
"""Of an experiment: more are no longer told apart in one chart."""
EPISODES = 6
"""Of a run and kind: shown in full, solved and failed ones."""
ROWS = 100


def write_report(folders: Sequence[Path], out: Path, query: Mapping[str, str] | None = None) -> Path:
    """One file with the curves of all runs side by side, and of each its newest episodes."""
    runs = [_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # of another parent folder each
        for run, folder in zip(runs, folders, strict=True):
            run.name = str(folder)
    write_whole(out, report_html(runs, Query.of(query or {})))
    return out


def write_runs_of(arms: Mapping[str, Sequence[Path]], out: Path) -> Path | None:
    """The same for the runs of an experiment, each named by its arm; None if none is left on disk."""
    named = [(label, folder) for label, folders in arms.items() for folder in folders]
    runs = list[Run]()
    for label, folder in named[:MAX_RUNS]:
        try:
            run = _run(folder)
        except UserError:
            continue
        run.name = f"{label}: {run.name}"
        runs.append(run)
    if not runs:
        return None
    write_whole(out, report_html(runs, Query()))
    return out


def report_html(runs: Sequence[Run], query: Query) -> str:
    # The texts of a style sheet and a script are ours, so they may stand in the page as they are.
    style = asset("uPlot.min.css") + asset("view.css")
    scripts = [asset("uPlot.min.js"), asset("view.js")]
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
    policy += f"style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}"
    return page(
        "report",
        site="report",
        title=", ".join(run.name for run in runs),
        runs=runs,
        parts=[_part(run, query) for run in runs],
        data=curves_data(runs),
        policy=policy,
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
    )


def _part(run: Run, query: Query) -> dict[str, Any]:
    found = found_episodes(run, query, size=ROWS)
    chosen = [[e for e in found["episodes"] if e["success"] is success][: EPISODES // 2] for success in (True, False)]
    shown = [shown_episode(run, e["step"], e["episode"]) for kind in chosen for e in kind]
    whole = [episode for episode in shown if episode is not None]
    return {"run": run, "found": found, "whole": whole, "places": {(e["step"], e["episode"]) for e in whole}}


def _run(folder: Path) -> Run:
    runs = Runs(folder)
    if not runs.is_single:
        raise UserError(f"{folder} is no run folder: it has neither config.toml nor metrics.jsonl")
    return runs.get(runs.root.name, episodes=True)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
