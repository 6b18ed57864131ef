"""What the command line prints of a run and of an evaluation while they go on, and the report at the end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from spear_rl.app.evaluate import Report
from spear_rl.rollout.workers.progress import Tally
from spear_rl.train.callbacks import Event

_SHOWN = {
    "success": "rollout/success", "reward": "rollout/reward", "tool turns": "rollout/tool_turns",
    "invalid": "rollout/invalid_turns", "entropy": "policy/entropy", "grad norm": "policy/grad_norm",
    "replayed": "replay/trajectories", "baseline": "replay/baseline", "seconds": "time/step",
}  # fmt: skip
_SMOOTHING = 0.8
_LINE_EVERY = 5
"""Steps between lines where there is no terminal."""


def _columns() -> tuple[Any, ...]:
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()


class LiveConsole:
    """A callback and context manager: redraws in a terminal, prints every few steps elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(*_columns(), TimeRemainingColumn(), console=console)
        self._bars: dict[str, Any] = {}
        self._latest: dict[str, float] = {}
        self._mean: dict[str, float] = {}
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        metrics = event.metrics or {}
        if event.kind == "note":
            self._console.print(event.text, soft_wrap=True)
        elif event.kind == "eval":
            rate = f"{metrics['success']:.1%} ({metrics['low']:.1%} to {metrics['high']:.1%})"
            self._console.print(f"held-out success {rate} at step {event.step}", style="bold")
        elif event.kind == "sft":
            self._advance("cold start", event.step, event.total)
            tenths = [10 * done // max(event.total, 1) for done in (event.step - 1, event.step)]
            if not self._live and (event.step == 1 or tenths[0] != tenths[1]):
                self._console.print(f"cold start {event.step}/{event.total}: loss {metrics['sft/loss']:.3f}")
        elif event.kind == "step":
            self._advance("training", event.step + 1, event.total)
            self._remember(metrics)
            if not self._live and (event.step + 1) % _LINE_EVERY == 0:
                numbers = "  ".join(f"{name} {self._mean[name]:.3g}" for name in _SHOWN if name in self._mean)
                self._console.print(f"step {event.step + 1}/{event.total}: {numbers}")
        if self._live:
            self._live.update(Group(self._progress, self._table()))

    def _advance(self, name: str, done: int, total: int) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._bars[name], completed=done)

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        for name, key in _SHOWN.items():
            if key in metrics:
                self._latest[name] = metrics[key]
                self._mean[name] = _SMOOTHING * self._mean.get(name, metrics[key]) + (1 - _SMOOTHING) * metrics[key]

    def _table(self) -> Table:
        table = Table("", *self._latest, box=None, pad_edge=False)
        for label, values in (("now", self._latest), ("mean", self._mean)):
            table.add_row(label, *(f"{values[name]:.3g}" for name in self._latest))
        return table


@contextmanager
def eval_progress(console: Console) -> Iterator[Callable[[Tally], None]]:
    """The progress bar of an evaluation; prints nothing outside of a terminal."""
    with Progress(*_columns(), console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("getting ready", total=None)

        def show(tally: Tally) -> None:
            failed = f", {tally.num_failed} failed" if tally.num_failed else ""
            text = f"{tally.num_turns} turns, {tally.num_solved} solved{failed}"
            progress.update(bar, description=text, completed=tally.num_ended, total=tally.num_episodes)

        yield show


def print_report(report: Report, console: Console) -> None:
    """Success in total and per kind of task, with intervals, and the other measurements."""
    about, result = report.about, report.evaluation
    console.print(
        f"{about['model']} on {about['env']}, {about['split']}: {len(about['tasks'])} tasks, episodes of each: "
        f"{about['episodes_per_task']}, turns at most: {about['max_turns']}, seed {about['seed']}"
    )
    if prompting := about.get("prompting"):
        trials = f", trials at most: {prompting['trials']}" if "trials" in prompting else ""
        console.print(f"prompting {prompting['name']}, worked examples: {prompting['shots']}{trials}")
    table = Table("kind", "success", "95 % interval", "episodes")
    for name, rate in {**result.by_family, "all": result.rate}.items():
        interval = f"{rate['low']:.1%} - {rate['high']:.1%}"
        table.add_row(name or "-", f"{rate['success']:.1%}", interval, f"{rate['episodes']:.0f}")
    console.print(table)
    turns = f"{result.turns:.1f} turns, {result.invalid_turns:.1%} of them invalid"
    console.print(f"mean reward {result.reward:.3f}, {turns}")
    rates = (report.samples.rates if report.samples else {}) | (report.trials.rates if report.trials else {})
    for name, value in rates.items():
        interval = f"({value['low']:.1%} - {value['high']:.1%})"
        console.print(f"{name} {value['rate']:.1%} {interval} over {value['tasks']:.0f} tasks")
    for name, mean in result.metrics.items():
        console.print(f"mean {name} {mean:.3f}")
    for note in prompting["notes"] if prompting else ():
        console.print(note, soft_wrap=True)
    if result.failed_episodes:
        console.print(f"episodes that failed and do not count: {result.failed_episodes}", style="bold")
