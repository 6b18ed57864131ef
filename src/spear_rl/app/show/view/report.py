"""`spear report`: runs as one HTML file that opens without a network: curves, table, chosen episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spear_rl.app.show.view.pages import Query, curves_data, found_episodes, page, shown_episode
from spear_rl.app.show.view.runs import Run, Runs
from spear_rl.errors import UserError
from spear_rl.io.files import write_whole
from spear_rl.io.http.look import inlined

MAX_RUNS = 24
"""Of an experiment: more cannot be told apart in one chart."""
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
    return page(
        "report",
        site="report",
        title=", ".join(run.name for run in runs),
        runs=runs,
        parts=[_part(run, query) for run in runs],
        data=curves_data(runs),
        **inlined(),
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
