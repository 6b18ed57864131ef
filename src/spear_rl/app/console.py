"""The live console: progress and the few numbers that say whether a run is well. A callback like any other."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from spear_rl.train.callbacks import Event

_SHOWN = {
    "success": "rollout/success",
    "reward": "rollout/reward",
    "tool turns": "rollout/tool_turns",
    "invalid": "rollout/invalid_turns",
    "entropy": "policy/entropy",
    "grad norm": "policy/grad_norm",
    "replayed": "replay/trajectories",
    "baseline": "replay/baseline",
    "seconds": "time/step",
}
_SMOOTHED = 0.8


class LiveConsole:
    """Use as a context manager; redraws in a terminal, prints a line now and then elsewhere."""

    def __init__(self, console: Console, *, line_every: int = 5) -> None:
        self._console, self._line_every = console, line_every
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._bars: dict[str, Any] = {}
        self._latest: dict[str, float] = {}
        self._mean: dict[str, float] = {}
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> LiveConsole:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        metrics = event.metrics or {}
        if event.kind == "note":
            self._console.print(event.text, soft_wrap=True)
        elif event.kind == "eval":
            self._console.print(
                f"held-out success {metrics['success']:.1%} "
                f"({metrics['low']:.1%} to {metrics['high']:.1%}) at step {event.step}",
                style="bold",
            )
        elif event.kind == "sft":
            self._advance("cold start", event.step, event.total)
            tenths = [10 * done // max(event.total, 1) for done in (event.step - 1, event.step)]
            if not self._live and (event.step == 1 or tenths[0] != tenths[1]):
                self._console.print(f"cold start {event.step}/{event.total}: loss {metrics['sft/loss']:.3f}")
        elif event.kind == "step":
            self._advance("training", event.step + 1, event.total)
            self._remember(metrics)
            if not self._live and (event.step + 1) % self._line_every == 0:
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
                self._mean[name] = _SMOOTHED * self._mean.get(name, metrics[key]) + (1 - _SMOOTHED) * metrics[key]

    def _table(self) -> Table:
        table = Table("", *self._latest, box=None, pad_edge=False)
        for label, values in (("now", self._latest), ("mean", self._mean)):
            table.add_row(label, *(f"{values[name]:.3g}" for name in self._latest))
        return table
