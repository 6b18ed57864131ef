"""What the pages read: the runs in a folder. Files grow while they are read, and only what is new is read again."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from spear_rl.errors import UserError
from spear_rl.io.episodes.columns import number_in
from spear_rl.io.episodes.index import Episodes
from spear_rl.io.escaping import one_line
from spear_rl.io.files import is_plain_file
from spear_rl.train.callbacks import WARNINGS, warning_texts
from spear_rl.train.episode_files import BUFFER, DRAWS, EVALUATIONS, TRAJECTORIES, draws_of

EVALUATED = "evaluated"
_ALSO = re.compile(r"(also_[\w.-]{1,120}_)step_\d{6,9}\.jsonl")
MARKS = ("config.toml", "metrics.jsonl")
"""A folder with one of these is a run."""
_DEPTH = 4
_PLACES = 10**9
"""More than a step has episodes."""
_DRAWS_BEGIN = re.compile(rb'\{"step": (\d{1,9}), "draws": \[')
_DRAWN = re.compile(rb'"episode": "(\d{1,9})/(\d{1,9})"')  # never within a text, where quotes are escaped
_MAX_RUNS, _MAX_CONFIG = 1000, 2**20
_MAX_LINE = 2**26
"""Bytes of a line of rows; a longer one, as of a file without lines, is not read on."""


@dataclass
class GrowingRows:
    """A file with one JSON object with a step per line, to which a run appends."""

    path: Path
    by_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_damaged: int = 0
    version: int = 0
    """Another one whenever rows have changed."""
    _read: tuple[int, int] = (-1, 0)
    """The file's inode, and the bytes of it that were read."""

    def refresh(self) -> None:
        if not is_plain_file(self.path):
            return
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._read[0] or stat.st_size < self._read[1]:  # a resume wrote it anew
                    self.by_step, self.num_damaged, self._read = {}, 0, (stat.st_ino, 0)
                file.seek(self._read[1])
                while line := file.readline(_MAX_LINE):
                    if not line.endswith(b"\n"):
                        break  # it is still being written
                    self._read = self._read[0], self._read[1] + len(line)
                    self._add(line)
        except OSError:
            return

    def _add(self, line: bytes) -> None:
        self.version += 1
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError("no row")
            self.by_step[row["step"]] = self.kept(row)
        except (ValueError, RecursionError):
            self.num_damaged += bool(line.strip())

    def kept(self, row: dict[str, Any]) -> dict[str, Any]:
        """What is kept of a row in memory."""
        return row

    def fault(self) -> list[str]:
        lines = "line is" if self.num_damaged == 1 else "lines are"
        if self.path.is_symlink():
            return [f"{self.path.name} is a link: it is not followed"]
        return [f"{self.path.name}: {self.num_damaged} {lines} damaged and not shown"] if self.num_damaged else []


class Draw(NamedTuple):
    """One time that replay drew an episode."""

    step: int
    episode: tuple[int, int]
    """The step it was played at, and its place there."""
    advantage: float | None
    """A, when it was played."""
    advantage_today: float | None
    """A', with which it trained."""
    task: str = ""
    success: bool | None = None

    @property
    def age(self) -> int:
        return self.step - self.episode[0]


class DrawRows(GrowingRows):
    """draws.jsonl, of which a long run has tens of megabytes: only which episodes each line names is kept in memory."""

    def _add(self, line: bytes) -> None:
        found = _DRAWS_BEGIN.match(line)
        if not found or not line.rstrip().endswith(b"]}"):
            super()._add(line)
            return
        self.version += 1
        keys = [int(played) * _PLACES + int(number) for played, number in _DRAWN.findall(line)]
        place = {"at": self._read[1] - len(line), "size": len(line)}
        self.by_step[int(found[1])] = place | {"keys": np.array(keys, dtype=np.int64)}

    def kept(self, row: dict[str, Any]) -> dict[str, Any]:
        """A line that was written otherwise than ours."""
        draws = list(_draws(row["step"], row))
        return {"draws": draws, "keys": np.array([_key(draw.episode) for draw in draws], dtype=np.int64)}

    def of_step(self, step: int) -> list[Draw]:
        row = self.by_step.get(step, {"draws": []})
        if "draws" in row:
            return list(row["draws"])
        try:
            with self.path.open("rb") as file:
                file.seek(row["at"])
                content = json.loads(file.read(row["size"]))
            return list(_draws(step, content)) if content.get("step") == step else []
        except (OSError, ValueError, RecursionError, AttributeError):
            return []  # damaged, or written anew by a resume: the next refresh reads it

    def newest_first(self) -> Iterator[Draw]:
        for step in sorted(self.by_step, reverse=True):
            yield from self.of_step(step)

    def of_episode(self, episode: tuple[int, int]) -> list[Draw]:
        """The draws of an episode, oldest first."""
        steps = sorted(step for step, row in self.by_step.items() if step > episode[0] and _key(episode) in row["keys"])
        return [draw for step in steps for draw in self.of_step(step) if draw.episode == episode]

    def count(self, step: int | None = None) -> int:
        return sum(len(row["keys"]) for at, row in self.by_step.items() if step in (None, at))

    def keys(self) -> np.ndarray[Any, Any]:
        """The episode of every draw as one number, as `_key` makes it."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(row["keys"] for row in self.by_step.values())])


def _key(episode: tuple[int, int]) -> int:
    return episode[0] * _PLACES + episode[1]


class Run:
    """One run folder with one kind of its episodes: of training (""), of its evaluations (EVALUATED), or of those on a
    further split, by the prefix of their files."""

    def __init__(self, name: str, folder: Path, kind: str = "") -> None:
        self.name, self.folder, self.kind = name, folder, kind
        self.metrics, self.evaluations = GrowingRows(folder / "metrics.jsonl"), GrowingRows(folder / "eval.jsonl")
        self.draws, self.buffer = DrawRows(folder / DRAWS), GrowingRows(folder / BUFFER)
        self.warnings = GrowingRows(folder / WARNINGS)
        prefix = "" if kind == EVALUATED else kind
        self.episodes = Episodes(folder / (EVALUATIONS if kind else TRAJECTORIES), prefix)
        self._replayed: tuple[int, object, np.ndarray[Any, Any]] = (-1, None, np.zeros(0, dtype=bool))
        self._lock = RLock()

    def refresh(self, *, episodes: bool) -> Run:
        """Read what is new; episodes and what replay did with them, which take longest, only where they are needed."""
        with self._lock:
            for rows in self._rows if episodes else (self.metrics, self.evaluations, self.warnings):
                rows.refresh()
            if episodes:
                self.episodes.refresh()
        return self

    @property
    def _rows(self) -> tuple[GrowingRows, ...]:
        return self.metrics, self.evaluations, self.draws, self.buffer, self.warnings

    @property
    def step(self) -> int:
        """The newest step with metrics; -1 without any."""
        return max(self.metrics.by_step, default=-1)

    @cached_property
    def environment(self) -> str:
        """The name of its environment; empty if it is not known."""
        try:
            path = self.folder / "config.toml"
            text = path.read_text("utf-8") if is_plain_file(path) and path.stat().st_size < _MAX_CONFIG else ""
            found = tomllib.loads(text)["task"]["env"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""
        return found if isinstance(found, str) else ""

    @property
    def is_finished(self) -> bool:
        return (self.folder / "summary.json").is_file()

    @property
    def faults(self) -> list[str]:
        folder = self.episodes.folder
        links = [f"{folder.name} is a link: it is not followed"] if folder.is_symlink() else []
        return [*(fault for one in self._rows for fault in one.fault()), *self.episodes.faults, *links]

    def drawn(self, step: int, number: int) -> list[Draw]:
        """The draws of an episode, oldest first; replay draws none of evaluations."""
        return [] if self.kind else self.draws.of_episode((step, number))

    def stored(self, step: int, number: int) -> tuple[int | None, int | None]:
        """The steps at which an episode entered the replay buffer and left it, as far as they are known."""
        found: dict[str, int] = {}
        for at, row in () if self.kind else self.buffer.by_step.items():
            for what in ("entered", "left"):
                if isinstance(row.get(what), list) and f"{step}/{number}" in row[what]:
                    found[what] = at
        return found.get("entered"), found.get("left")

    def is_replayed(self) -> np.ndarray[Any, Any]:
        """Of every episode in the index whether replay ever drew it."""
        version, table = self.draws.version, self.episodes.table
        if self._replayed[0] != version or self._replayed[1] is not table:
            steps, numbers = (self.episodes.numbers(name).astype(np.int64) for name in ("step", "episode"))
            played, places = np.divmod(self.draws.keys(), _PLACES)
            most = numbers.max(initial=0) + 1  # small keys are looked up in a table, several times quicker
            drawn = np.isin(steps * most + numbers, (played * most + places)[places < most])
            self._replayed = version, table, drawn & (not self.kind)
        return self._replayed[2]

    @property
    def kinds(self) -> list[str]:
        """The kinds of episodes it has: training's, and those of evaluations that were recorded."""
        return kinds_in(self.folder)

    def warning_texts(self) -> list[tuple[int, str]]:
        return warning_texts(self.warnings.by_step)


def _draws(step: int, row: dict[str, Any]) -> Iterator[Draw]:
    for draw in draws_of(row):
        played, _, number = str(draw["episode"]).partition("/")
        if played.isdecimal() and number.isdecimal() and len(played) < 10 and len(number) < 10:
            values = [draw.get(name) for name in ("advantage", "advantage_today")]
            then, today = map(number_in, values)
            place = int(played), int(number)
            task, success = one_line(str(draw.get("task", ""))), draw.get("success")
            yield Draw(step, place, then, today, task, None if success is None else bool(success))


class Runs:
    """The runs below a folder, or the folder itself if it is a run; nothing outside of it is ever opened."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is no folder: name a run or a folder of runs")
        self.root = root.resolve()
        self._open: dict[tuple[str, str], Run] = {}
        self._lock = RLock()

    @cached_property
    def is_single(self) -> bool:
        return _is_run(self.root)

    def names(self) -> list[str]:
        """Paths of runs below the folder, in order."""
        if self.is_single:
            return [self.root.name]
        found = list[str]()
        for folder, below, _ in os.walk(self.root, followlinks=False):
            here = Path(folder)
            depth = len(here.relative_to(self.root).parts)
            if depth and _is_run(here):
                name = here.relative_to(self.root).as_posix()
                found += [name] if _is_text(name) else []
                below.clear()
            below[:] = sorted(name for name in below if not name.startswith(".")) if depth < _DEPTH else []
            if len(found) >= _MAX_RUNS:
                break
        return found

    def get(self, name: str, *, kind: str = "", episodes: bool = False) -> Run:
        """A run, up to date; KeyError for one that is not there or not inside."""
        with self._lock:
            if (name, kind) not in self._open:
                folder = self.root if self.is_single and name == self.root.name else self.root / name
                is_plain = PurePosixPath(name).as_posix() == name and "\0" not in name  # one name per run
                if not is_plain or not folder.resolve().is_relative_to(self.root) or not _is_run(folder):
                    raise KeyError(f"there is no run {one_line(name)}")
                kind = kind if kind in (EVALUATED, *kinds_in(folder)) else ""
                self._open.setdefault((name, kind), Run(name, folder, kind))
            run = self._open[name, kind]
        return run.refresh(episodes=episodes)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8: no address can name it
        return False
    return True


def kinds_in(folder: Path) -> list[str]:
    """The kinds of episodes that a run folder has."""
    try:
        found = {m[1] for entry in os.scandir(folder / EVALUATIONS) if (m := _ALSO.fullmatch(entry.name))}
    except OSError:
        return [""]
    return ["", EVALUATED, *sorted(found)]


def kind_title(kind: str) -> str:
    """What the episodes of a kind are called."""
    if kind in ("", EVALUATED):
        return "Evaluated episodes" if kind else "Episodes"
    return f"Episodes evaluated on {kind.removeprefix('also_').removesuffix('_')}"


def _is_run(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in MARKS)
    except OSError:  # e.g. a name that is too long
        return False
