"""The state of an experiment on the console: a table that is redrawn in a terminal, lines elsewhere."""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from spear_rl.app.compare.experiment.runner import Job
from spear_rl.app.compare.experiment.state import progress
from spear_rl.io.escaping import one_line

_QUIET_SECONDS = 60.0
_MOST_FAILED = 5


class LiveTable:
    """Counts, running cells with their steps and success, failed ones, and the time left."""

    def __init__(self, console: Console, jobs: Sequence[Job], at_once: int) -> None:
        self._console, self._jobs, self._at_once = console, jobs, at_once
        self._is_live = console.is_terminal
        self._last_line = time.monotonic()
        self._live = Live(console=console, auto_refresh=False)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.update(self._view(), refresh=True)
            self._live.stop()

    def notice(self, job: Job, what: str) -> None:
        """Something happened to a job. In a terminal only failures are worth a line that stays."""
        if not self._is_live or "failed" in what or "waiting" in what:
            self._console.print(Text(one_line(f"{job.name} {what}{self._how_far(job)}")), soft_wrap=True)
            self._last_line = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        if self._is_live and now - self._drawn >= 0.5:
            self._drawn = now
            self._live.update(self._view(), refresh=True)
        elif not self._is_live and now - self._last_line > _QUIET_SECONDS:
            self._last_line = now
            running = [f"{job.name}{self._how_far(job)}" for job in self._jobs if job.state == "running"]
            self._console.print(Text(one_line("; ".join([self.counts(), *running]))), soft_wrap=True)

    def counts(self) -> str:
        """How many cells are in which state, and the time left."""
        cells = [job for job in self._jobs if job.is_cell]
        numbers = {
            "done": sum(job.state == "done" for job in cells),
            "running": sum(job.state in ("running", "elsewhere") for job in cells),
            "failed": sum(job.state == "failed" for job in cells),
            "waiting": sum(job.state == "waiting" for job in cells),
        }
        parts = [f"{number} {state}" for state, number in numbers.items() if number or state == "done"]
        left = seconds_left(self._jobs, self._at_once)
        return f"{len(cells)} cells: {', '.join(parts)}" + (f"; {clock(left)} left" if left is not None else "")

    def _how_far(self, job: Job) -> str:
        found = progress(job.folder) if job.is_cell and job.state in ("running", "done") else None
        if found is None:
            return ""
        success = "" if found.success is None else f", success {found.success:.1%}"
        return f" (step {found.step} of {job.config.run.steps}{success})"

    def _view(self) -> RenderableType:
        table = Table(
            Column("running", overflow="fold"), Column("step", justify="right"), Column("success", justify="right"),
            Column("time", justify="right"), box=None, pad_edge=False, padding=(0, 3, 0, 0),
        )  # fmt: skip
        now = time.monotonic()
        for job in self._jobs:
            if job.state in ("running", "elsewhere"):
                found = progress(job.folder) if job.is_cell else None
                step = f"{found.step}/{job.config.run.steps}" if found else "-"
                success = f"{found.success:.1%}" if found and found.success is not None else "-"
                spent = clock(now - job.began) if job.state == "running" else job.error
                table.add_row(Text(one_line(job.name)), step, success, spent)
        failed = [job for job in self._jobs if job.state == "failed"]
        lines: list[Any] = [Text(f"{job.name} failed: {job.error}", style="red") for job in failed[:_MOST_FAILED]]
        return Group(Text(self.counts(), style="bold"), *([table] if table.row_count else []), *lines)


def seconds_left(jobs: Sequence[Job], at_once: int) -> float | None:
    """What the unfinished commands will take, judged by those that were finished or are going on; None at the start."""
    wholes = {id(job): whole for job in jobs if (whole := _whole_seconds(job))}
    known: dict[str, list[float]] = {}
    for job in jobs:
        if id(job) in wholes:
            known.setdefault(_kind(job), []).append(wholes[id(job)])
    if not known:
        return None
    typical = fmean(fmean(values) for values in known.values())
    left = [
        max(wholes.get(id(job), fmean(known.get(_kind(job), [typical]))) * _share(job) - _spent(job), 0.0)
        for job in jobs
        if job.state in ("waiting", "running")
    ]
    return max(sum(left) / at_once, max(left, default=0.0))


def _whole_seconds(job: Job) -> float | None:
    """What a command takes from its first step on, judged by the steps that it took since this command began."""
    if job.state == "done" and not job.was_done:
        return job.seconds / _share(job)
    found = progress(job.folder) if job.is_cell and job.state == "running" else None
    taken = found.step - job.first_step if found else 0
    return _spent(job) * job.config.run.steps / taken if taken > 0 else None


def _share(job: Job) -> float:
    """The share of a command's work that was left when this command began."""
    return 1 - job.first_step / job.config.run.steps if job.is_cell else 1.0


def _spent(job: Job) -> float:
    return job.seconds + (time.monotonic() - job.began if job.state == "running" else 0.0)


def _kind(job: Job) -> str:
    """Jobs that take about as long: a block's."""
    return job.name.rpartition("/")[0].rpartition("/")[0] if job.is_cell else "cold start"


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
