"""What the command line prints of a run and of an evaluation while they go on, and the report at the end."""

import shlex
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from threading import Lock
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from spear_rl.app.evaluate import Report
from spear_rl.rollout.workers.progress import Tally
from spear_rl.train.callbacks import Event

_SHOWN = {
    "success": "rollout/success", "reward": "rollout/reward", "tool turns": "rollout/tool_turns",
    "invalid": "rollout/invalid_turns", "entropy": "policy/entropy", "grad norm": "policy/grad_norm",
    "replayed": "replay/trajectories", "baseline": "replay/baseline", "seconds": "time/step",
}  # fmt: skip
_WINDOW = 10
"""Steps in a mean."""
_WIDE = 100
"""Columns of a terminal from which the metrics stand side by side, if they fit."""
_QUIET_SECONDS = 60.0
"""Where there is no terminal, a line comes at least this often."""


class _Phase:
    """The progress of the cold start or of RL, with the time left by the pace of the latest updates."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.total, self.note = name, 0, 0, ""
        self._marks: deque[tuple[float, int]] = deque(maxlen=50)
        self._lines, self._line_time = 0, time.monotonic()

    def advance(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._marks.append((time.monotonic(), done))

    @property
    def left(self) -> str:
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        if self.done >= self.total:
            return "done"
        if last == first:
            return "-:-- left"
        # Counts down between two updates.
        seconds = (self.total - self.done) * (end - begin) / (last - first) - (time.monotonic() - end)
        return f"{_clock(max(seconds, 0.0))} left"

    def wants_line(self, every: int) -> bool:
        """Whether a line is due: at the end, every so many updates, and after a minute without one."""
        due, now = self.done // max(every, 1), time.monotonic()
        is_due = self.done >= self.total or due > self._lines or now - self._line_time > _QUIET_SECONDS
        if is_due:
            self._lines, self._line_time = due, now
        return is_due

    def row(self, width: int) -> RenderableType:
        """Name, bar, count, time left and note on one line; the bar takes what the others leave, if that is enough."""
        texts = [f"{self.name:10s}", f"{self.done}/{self.total}", self.left, *([self.note] if self.note else [])]
        room = min(width - sum(len(text) + 1 for text in texts), 40)
        if room < 5:
            return Text(" ".join(texts))
        line = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(total=max(self.total, 1), completed=self.done, width=room)
        line.add_row(texts[0], bar, *texts[1:])
        return line


class LiveConsole:
    """A callback and context manager: redraws in a terminal, prints a line every few steps elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phases: dict[str, _Phase] = {}
        self._recent: dict[str, deque[float]] = {}
        self._success: list[float] = []
        self._fields: list[str] = []
        self._is_live = console.is_terminal
        self._begin = time.monotonic()
        self._lock = Lock()  # the view is drawn in a thread of its own; never print while it is held
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._view)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        metrics: Mapping[str, Any] = event.metrics or {}
        if event.kind == "note":
            self._console.print(event.text, soft_wrap=True)
        elif event.kind == "eval":
            rates: dict[str, Any] = {"held-out": metrics, **metrics.get("also", {})}
            for name, rate in rates.items():
                figures = f"{rate['success']:.1%} ({rate['low']:.1%} to {rate['high']:.1%})"
                self._console.print(f"{name} success {figures} at step {event.step}", style="bold", soft_wrap=True)
        elif event.kind == "sft":
            with self._lock:
                phase = self._phases.setdefault("cold start", _Phase("cold start"))
                phase.advance(event.step, event.total)
                phase.note = f"loss {_number(metrics['sft/loss'])}"
            if not self._is_live and (phase.wants_line(event.total // 10) or event.step == 1):
                self._line(phase, [phase.note])
        elif event.kind == "step":
            with self._lock:
                phase = self._phases.setdefault("training", _Phase("training"))
                phase.advance(event.step + 1, event.total)
                self._remember(metrics)
            if not self._is_live and phase.wants_line(ceil(event.total / 20)):
                self._line(phase, self._means())

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        for name, key in _SHOWN.items():
            if key in metrics:
                self._recent.setdefault(name, deque(maxlen=_WINDOW)).append(float(metrics[key]))
        self._success.append(float(metrics.get(_SHOWN["success"], float("nan"))))

    def _line(self, phase: _Phase, parts: Sequence[str]) -> None:
        width = len(str(phase.total))
        label = "step" if phase.name == "training" else phase.name
        head = [f"{label} {phase.done:{width}d}/{phase.total}", f"{phase.left:>12s}"]
        self._console.print("  ".join([*head, *parts]).rstrip(), soft_wrap=True)

    def _means(self) -> list[str]:
        """As many metrics as fit the width with usual numbers, each from the step on that has it."""
        if not self._fields:
            room = self._console.width - 26
            for name in _SHOWN:
                room -= len(name) + 9
                if room < 0 and self._fields:
                    break
                self._fields.append(name)
        return [f"{name} {_number(_mean(self._recent[name])):6s}" for name in self._fields if name in self._recent]

    def _view(self) -> RenderableType:
        width, height = self._console.size
        with self._lock:
            spent = f"{_clock(time.monotonic() - self._begin)} since the start"
            parts: list[RenderableType] = [phase.row(width) for phase in self._phases.values()]
            if self._success:
                line = sparkline(self._success, min(width - 16, 60), is_ascii=self._console.options.ascii_only)
                parts.append(Text(f"success, 0 to 1 {line}"))
            if self._recent:
                parts += self._table(width, height - len(parts) - 2)
        return Group(*parts, Text(spent))

    def _table(self, width: int, height: int) -> list[RenderableType]:
        """Metrics side by side where there is room, else one below the other, as many as there is height for."""
        known = {name: self._recent[name] for name in _SHOWN if name in self._recent}
        values = {name: (_number(kept[-1]), _number(_mean(kept))) for name, kept in known.items()}
        now, mean = "now", f"mean of {max(map(len, self._recent.values()))}"
        if width >= _WIDE and height > 2:
            table = _grid("", *values)
            for number, label in enumerate((now, mean)):
                table.add_row(label, *(pair[number] for pair in values.values()))
            if Measurement.get(self._console, self._console.options.update_width(10_000), table).maximum <= width:
                return [table]
        table = _grid("", now, mean)
        for name, pair in list(values.items())[: height - 1]:
            table.add_row(name, *pair)
        return [table] if height > 1 else []


def _grid(*headings: str) -> Table:
    columns = [
        Column(text, justify="right" if number else "left", no_wrap=True) for number, text in enumerate(headings)
    ]
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _number(value: float) -> str:
    """Three decimals of a share, three significant digits of the rest."""
    return f"{value:.3f}" if 0.0005 <= abs(value) < 1 else f"{value:#.3g}".rstrip(".")


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)  # unlike fmean it takes infinities of both signs


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """Shares from 0 to 1, one character each; where there are more than `width`, the means of equal parts of them."""
    levels = "_.-=+*#@" if is_ascii else "▁▂▃▄▅▆▇█"
    count = min(len(values), max(width, 1))
    bounds = [len(values) * number // count for number in range(count + 1)]
    marks = []
    for begin, end in pairwise(bounds):
        known = [min(max(value, 0.0), 1.0) for value in values[begin:end] if isfinite(value)]
        marks.append(levels[round(7 * _mean(known))] if known else " ")
    return "".join(marks)


def print_next_commands(console: Console, run_dir: Path, *, verb: str, trackers: Sequence[str]) -> None:
    """Three commands to look further into a run that has ended."""
    run = shlex.quote(str(run_dir))
    commands = {
        f"spear show {run}": "metrics, an episode",
        f"spear eval {run} --split test": "success on unseen tasks",
    }
    if verb == "sft":
        commands[f"spear train engine.model={shlex.quote(str(run_dir / 'model'))} sft.episodes=0"] = "RL from here"
    elif "tensorboard" in trackers:
        commands[f"tensorboard --logdir {run}"] = "curves"
    else:
        commands[f"spear compare {run}"] = "curves"
    column = max(map(len, commands)) + 4
    has_room = column + max(map(len, commands.values())) + 2 <= console.width
    console.print("look further:")
    for command, what in commands.items():
        line = f"  {command}"
        console.print(f"{line:{column}s}# {what}" if has_room else line, soft_wrap=True)


@contextmanager
def eval_progress(console: Console) -> Iterator[Callable[[Tally], None]]:
    """The progress of an evaluation, with a bar where there is room; prints nothing outside of a terminal."""
    whole = Column(no_wrap=True)
    columns = [
        TextColumn("{task.description}", table_column=Column(overflow="fold")),
        *([BarColumn(bar_width=20)] if console.width >= 80 else []),
        MofNCompleteColumn(table_column=whole),
        TimeElapsedColumn(table_column=whole),
    ]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
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
        f"{about['episodes_per_task']}, turns at most: {about['max_turns']}, seed {about['seed']}",
        overflow="fold",
    )
    if prompting := about.get("prompting"):
        trials = f", trials at most: {prompting['trials']}" if "trials" in prompting else ""
        console.print(f"prompting {prompting['name']}, worked examples: {prompting['shots']}{trials}", overflow="fold")
    numbers = (Column(heading, no_wrap=True) for heading in ("success", "95 % interval", "episodes"))
    table = Table(Column("kind", overflow="fold"), *numbers)
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
