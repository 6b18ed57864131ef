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
        self._console, self._jobs, self._forecast = console, jobs, Forecast(jobs, at_once)
        self._is_live = console.is_terminal
        self._last_line = time.monotonic()
        self._live = Live(console=console, auto_refresh=False)
        self._looked = 0.0

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
        if now - self._looked < 0.5:
            return
        self._looked = now
        self._forecast.look()
        if self._is_live:
            self._live.update(self._view(), refresh=True)
        elif now - self._last_line > _QUIET_SECONDS:
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
        left = self._forecast.seconds_left()
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


class Forecast:
    """Estimates the time left by the pace of the cells; None until one of them has taken a step."""

    def __init__(self, jobs: Sequence[Job], at_once: int) -> None:
        self._jobs, self._at_once = jobs, at_once
        self._marks: dict[tuple[int, int], list[tuple[float, int]]] = {}
        """Cell and attempt -> (time, steps taken) as it began, as it was first seen to have moved, and last."""

    def look(self) -> None:
        """Note how far the running cells are."""
        for number, job in enumerate(self._jobs):
            if job.is_cell and job.state == "running":
                found = progress(job.folder)
                step = found.step if found else job.first_step
                marks = self._marks.setdefault((number, job.attempts), [])
                if not marks or step > marks[-1][1]:
                    marks[2:] = [(time.monotonic(), step)]

    def seconds_left(self) -> float | None:
        paces: dict[str, list[tuple[float, float]]] = {}
        for number, job in enumerate(self._jobs):
            if pace := self._pace(number, job):
                paces.setdefault(_block(job), []).append(pace)
        if not paces:
            return None
        cold = [job.seconds for job in self._jobs if not job.is_cell and job.state == "done" and not job.was_done]
        every = [pace for of_block in paces.values() for pace in of_block]
        left = []
        for number, job in enumerate(self._jobs):
            if job.state in ("waiting", "running"):
                known = [own] if (own := self._pace(number, job)) else paces.get(_block(job), every)
                whole = self._cell_seconds(number, job, known) if job.is_cell else fmean(cold or [0.0]) - _spent(job)
                left.append(max(whole, 0.0))
        return max(sum(left) / self._at_once, max(left, default=0.0))

    def _pace(self, number: int, job: Job) -> tuple[float, float] | None:
        """Seconds before the first step and seconds a step of a cell, where this command saw both."""
        marks = self._marks.get((number, job.attempts), [])
        if len(marks) == 3:
            (began, before), (moved, first), (now, last) = marks
            pace = (now - moved) / (last - first)
            return max(moved - began - pace * (first - before), 0.0), pace
        if job.is_cell and job.state == "done" and not job.was_done:  # too short to be seen moving twice
            return 0.0, job.seconds / (job.config.run.steps - job.first_step)
        return None

    def _cell_seconds(self, number: int, job: Job, paces: Sequence[tuple[float, float]]) -> float:
        """What is left of a cell, by the mean of paces."""
        start, pace = (fmean(values) for values in zip(*paces, strict=True))
        marks = self._marks.get((number, job.attempts), [])
        if job.state == "running" and len(marks) > 1:
            then, step = marks[-1]
            return pace * (job.config.run.steps - step) - (time.monotonic() - then)
        return start + pace * (job.config.run.steps - job.first_step) - _spent(job)


def _spent(job: Job) -> float:
    return time.monotonic() - job.began if job.state == "running" else 0.0


def _block(job: Job) -> str:
    """The block of a cell: its cells take about as long."""
    return job.name.rpartition("/")[0].rpartition("/")[0]


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
