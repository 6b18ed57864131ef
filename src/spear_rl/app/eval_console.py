"""What `spear eval` shows: how far it has come, and the report."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spear_rl.app.evaluate import Report
from spear_rl.rollout.workers.progress import Tally


class EvalProgress:
    """One line that says how far an evaluation has come; nothing outside of a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._progress.add_task("getting ready", total=None)

    def __enter__(self) -> EvalProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, tally: Tally) -> None:
        failed = f", {tally.num_failed} failed" if tally.num_failed else ""
        said = f"{tally.num_turns} turns, {tally.num_solved} solved{failed}"
        self._progress.update(self._bar, description=said, completed=tally.num_ended, total=tally.num_episodes)


def print_report(report: Report, console: Console) -> None:
    """Success in all and per kind of task, with intervals, and what else was measured."""
    about, result = report.about, report.evaluation
    console.print(
        f"{about['model']} on {about['env']}, {about['split']}: {len(about['tasks'])} tasks, episodes of each: "
        f"{about['episodes_per_task']}, turns at most: {about['max_turns']}, seed {about['seed']}"
    )
    table = Table("kind", "success", "95 % interval", "episodes")
    for name, rate in {**result.by_family, "all": result.rate}.items():
        interval = f"{rate['low']:.1%} - {rate['high']:.1%}"
        table.add_row(name or "-", f"{rate['success']:.1%}", interval, f"{rate['episodes']:.0f}")
    console.print(table)
    console.print(
        f"mean reward {result.reward:.3f}, {result.turns:.1f} turns, {result.invalid_turns:.1%} of them invalid"
    )
    for name, value in report.samples.rates.items() if report.samples else ():
        console.print(
            f"{name} {value['rate']:.1%} ({value['low']:.1%} - {value['high']:.1%}) over {value['tasks']:.0f} tasks"
        )
    for name, mean in result.metrics.items():
        console.print(f"mean {name} {mean:.3f}")
    if result.failed_episodes:
        console.print(f"episodes that failed and do not count: {result.failed_episodes}", style="bold")
