"""Reading a run's episodes: one row per episode in memory, the turns of one on demand.

Files are untrusted and may be half-written: what cannot be read is named in `faults`, and the rest is shown.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spear_rl.io.episodes.columns import EPISODE, NAMES, SCHEMA, TURN, table_of_json
from spear_rl.io.episodes.parts import INDEX, PIECES, Part, episodes_of, parts_in, pieces_in
from spear_rl.io.escaping import one_line
from spear_rl.io.files import is_plain_file

_SCHEMA = pa.schema(
    [(name, pa.dictionary(pa.int32(), pa.string()) if name in NAMES else kind) for name, kind in EPISODE.items()]
)
_NONE = _SCHEMA.empty_table()
_CERTAIN = ("step", "group", "episode", "success", "turns", *NAMES)
"""Columns that every episode has."""
_JSON = re.compile(r"([\w.-]*?)step_(\d{6,9})\.jsonl")
_ERRORS = (
    pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError
)  # fmt: skip
_MAX_JSON = 256 * 2**20


@dataclass(frozen=True)
class Filter:
    """Which episodes are wanted; what is None or empty decides nothing."""

    step: tuple[int, int] | None = None
    """First and last."""
    task: str = ""
    """A part of the task's id, in any case."""
    family: str = ""
    success: bool | None = None
    stop: str = ""
    dropped: str = ""
    """A reason for which a turn of it did not train; "any" and "none" too."""
    group: int | None = None
    replayed: bool | None = None


@dataclass
class Episodes:
    """The episodes of one run; `refresh` reads what was added since."""

    folder: Path
    prefix: str = ""
    """Of the names of its JSON lines."""
    faults: list[str] = field(default_factory=list)
    """One sentence per file that cannot be read, or not wholly."""
    table: pa.Table = field(default_factory=lambda: _NONE)
    """The columns EPISODE, one row per episode in order of steps."""
    _read: dict[tuple[str, int, int], tuple[pa.Table, str]] = field(default_factory=dict, init=False)
    """A file by name, time and size -> its episodes, and what is wrong with it."""
    _pieces: tuple[int, dict[int, str]] = field(default=(-1, {}), init=False)

    def refresh(self) -> bool:
        """Read the files that are new; whether anything changed."""
        found: dict[tuple[str, int, int], tuple[pa.Table, str]] = {}
        for path, read in self._files():
            try:
                stat = path.stat()
            except OSError:
                continue  # merged meanwhile: the next refresh finds it
            key = (path.name, stat.st_mtime_ns, stat.st_size)
            found[key] = self._read.get(key) or _tried(read, path)
        if found.keys() == self._read.keys():
            return False
        self._read = found
        tables = [table for table, _ in found.values() if len(table)]
        self.table = pa.concat_tables(tables).unify_dictionaries().combine_chunks() if tables else _NONE
        self.faults = [fault for _, fault in found.values() if fault]
        return True

    def _files(self) -> list[tuple[Path, Callable[[Path], tuple[pa.Table, str]]]]:
        """Parts and dumps in order of steps; a step in both counts once, as a part. Links lead nowhere."""
        if self.folder.is_symlink():
            return []
        parts = [] if self.prefix else parts_in(self.folder)
        found = [(_JSON.fullmatch(path.name), path) for path in self.folder.glob(f"{self.prefix}step_*.jsonl")]
        named = [(int(m[2]), path) for m, path in found if m and m[1] == self.prefix and is_plain_file(path)]
        dumps = [(step, path) for step, path in named if not any(part.first <= step <= part.last for part in parts)]
        files: list[tuple[int, Path, Callable[[Path], tuple[pa.Table, str]]]] = [
            *((part.first, part.path, _of_part) for part in parts),
            *((step, path, _of_dump) for step, path in dumps),
        ]
        return [(path, read) for _, path, read in sorted(files, key=lambda file: (file[0], file[1].name))]

    def where(self, wanted: Filter, replayed: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """The numbers of the rows that are wanted; `replayed` says of every row whether replay drew it."""
        keeps = np.ones(len(self.table), dtype=bool)
        if wanted.step is not None:
            steps = self.numbers("step")
            keeps &= (steps >= wanted.step[0]) & (steps <= wanted.step[1])
        if wanted.success is not None:
            keeps &= self.numbers("success").astype(bool) == wanted.success
        if wanted.group is not None:
            keeps &= self.numbers("group") == wanted.group
        if wanted.replayed is not None and replayed is not None:
            keeps &= replayed == wanted.replayed
        for name in ("family", "stop"):
            if value := getattr(wanted, name):
                keeps &= self._matches(name, value.__eq__)
        if wanted.task:
            keeps &= self._matches("task", lambda text: wanted.task.casefold() in text.casefold())
        if wanted.dropped:
            keeps &= self._matches("dropped", lambda text: _is_dropped(wanted.dropped, text))
        return np.flatnonzero(keeps)

    def _matches(self, name: str, holds: Callable[[str], bool]) -> np.ndarray[Any, Any]:
        """Of every row whether its text is wanted; each different text is looked at once."""
        codes, values = self._coded(name)
        wanted: np.ndarray[Any, Any] = np.array([*(holds(value) for value in values), False])[codes]
        return wanted

    def _coded(self, name: str) -> tuple[np.ndarray[Any, Any], list[str]]:
        column = self.table.column(name)
        if not column.num_chunks:
            return np.zeros(0, dtype=np.int64), []
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        values: list[str] = array.dictionary.to_pylist()
        return array.indices.fill_null(len(values)).to_numpy(zero_copy_only=False), values

    def values(self, name: str) -> list[str]:
        """The different texts of a column, in order."""
        return sorted({value for value in self._coded(name)[1] if value})

    def numbers(self, name: str) -> np.ndarray[Any, Any]:
        """A column of numbers, of every row; null is nan."""
        found: np.ndarray[Any, Any] = self.table.column(name).to_numpy()
        return found

    def largest(self, name: str) -> float:
        """The largest absolute value of a column of numbers; 0 without any."""
        sizes = np.abs(self.numbers(name).astype(float))
        return float(sizes[np.isfinite(sizes)].max(initial=0.0))

    def ordered(self, rows: np.ndarray[Any, Any], by: str, *, descending: bool) -> np.ndarray[Any, Any]:
        """The same rows sorted by a column, equal ones by step and place."""
        if by in NAMES:
            codes, values = self._coded(by)
            rank = np.full(len(values) + 1, np.nan)
            rank[sorted(range(len(values)), key=values.__getitem__)] = np.arange(len(values))
            keys = rank[codes[rows]]
        else:
            keys = self.numbers(by)[rows].astype(float)
        keys = np.where(np.isnan(keys), np.inf, -keys if descending else keys)
        return rows[np.argsort(keys, kind="stable")]

    def newest_first(self) -> np.ndarray[Any, Any]:
        """All rows, the newest step first and a step's episodes in their order."""
        return np.argsort(-self.numbers("step"), kind="stable")

    def rows(self, numbers: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        """Episodes by the number of their row."""
        found: list[dict[str, Any]] = self.table.take(pa.array(numbers)).to_pylist()
        return found

    def episode(self, step: int, number: int) -> dict[str, Any] | None:
        """An episode with its turns; None if there is none or its part cannot be read, which `faults` then says."""
        for path, read in self._files():
            table = None
            try:
                if read is _of_part:
                    part = next(part for part in parts_in(self.folder) if part.path == path)
                    table = _turns(part, step, number) if part.first <= step <= part.last else None
                elif path.name == f"{self.prefix}step_{step:06d}.jsonl":
                    whole = _dump(path)[0]
                    table = whole.filter(pc.equal(whole.column("episode"), number))
            except (*_ERRORS, StopIteration):
                fault = f"{one_line(path.name)} is damaged: the episode cannot be shown"
                self.faults += [fault] if fault not in self.faults else []
            if table is not None and len(table):
                return _episode(table)
        return None

    def pieces(self) -> dict[int, str]:
        """Token id -> its text."""
        path = self.folder / PIECES
        size = path.stat().st_size if is_plain_file(path) and not self.folder.is_symlink() else 0
        if size != self._pieces[0]:
            self._pieces = size, pieces_in(path) if size else {}
        return self._pieces[1]


def _is_dropped(wanted: str, reasons: str) -> bool:
    if wanted in ("any", "none"):
        return bool(reasons) == (wanted == "any")
    return wanted in reasons.split(",")


def _tried(read: Callable[[Path], tuple[pa.Table, str]], path: Path) -> tuple[pa.Table, str]:
    try:
        return read(path)
    except _ERRORS:
        return _NONE, f"{one_line(path.name)} is damaged: its episodes are not shown"


def _of_part(path: Path) -> tuple[pa.Table, str]:
    # A schema that a file brings along may name types of its own; ours is what counts.
    with pq.ParquetFile(path, read_dictionary=list(NAMES)) as file:
        index = (file.metadata.metadata or {}).get(INDEX)
        if index is None:
            table = episodes_of(file.read(columns=[*EPISODE, "turn"], use_threads=False))
        else:
            source = pa.BufferReader(base64.b64decode(index))
            table = pq.ParquetFile(source, read_dictionary=list(NAMES)).read(columns=list(EPISODE), use_threads=False)
    table = table.select(_SCHEMA.names).replace_schema_metadata()
    if any(table.column(name).null_count for name in _CERTAIN):
        raise ValueError("it lacks what every episode has")
    return table if table.schema.equals(_SCHEMA) else table.cast(_SCHEMA), ""


def _of_dump(path: Path) -> tuple[pa.Table, str]:
    table, fault = _dump(path)
    return episodes_of(table).cast(_SCHEMA), fault


def _dump(path: Path) -> tuple[pa.Table, str]:
    """The episodes of a file of JSON lines; lines that are none keep their place as empty episodes."""
    if path.stat().st_size > _MAX_JSON:
        return SCHEMA.empty_table(), f"{one_line(path.name)} is larger than 256 MiB: its episodes are not shown"
    episodes, damaged, left_out = list[Mapping[str, Any]](), list[str](), 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            episode = json.loads(line)
            if type(episode.get("left_out")) is int:
                left_out += episode["left_out"]
                continue
            if not all(isinstance(turn, dict) for turn in episode["turns"]):
                raise ValueError("no episode")
            table_of_json([episode], 0)
        except _ERRORS:
            damaged.append(str(number))
            episode = {"stop": "damaged", "turns": []}
        episodes.append(episode)
    named = _JSON.fullmatch(path.name)
    notes = [f"damaged or cut off in lines {', '.join(damaged[:20])}"] if damaged else []
    notes += [f"{left_out} episodes were not kept, as there are too many"] if left_out else []
    fault = f"{one_line(path.name)}: {'; '.join(notes)}" if notes else ""
    return table_of_json(episodes, int(named[2]) if named else 0), fault


def _turns(part: Part, step: int, number: int) -> pa.Table:
    """The rows of one episode: only the row groups that can hold it are read."""
    with pq.ParquetFile(part.path) as file:
        places = [
            place for place in range(file.metadata.num_row_groups) if _may_hold(file.metadata.row_group(place), step)
        ]
        rows = file.read_row_groups(places, columns=["step", "episode"])
        keeps = pc.and_(pc.equal(rows.column("step"), step), pc.equal(rows.column("episode"), number))
        if not pc.any(keeps).as_py():
            return SCHEMA.empty_table()
        sizes = np.cumsum([0, *(file.metadata.row_group(place).num_rows for place in places)])
        rows_kept = np.flatnonzero(keeps.to_numpy())
        wanted = sorted({int(np.searchsorted(sizes, row, "right")) - 1 for row in rows_kept})
        table = file.read_row_groups([places[place] for place in wanted], columns=SCHEMA.names)
    keeps = pc.and_(pc.equal(table.column("step"), step), pc.equal(table.column("episode"), number))
    return table.filter(keeps)


def _may_hold(group: Any, step: int) -> bool:
    column = next((group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "step"), None)
    known = column.statistics if column is not None else None
    return known is None or not known.has_min_max or known.min <= step <= known.max


def _episode(table: pa.Table) -> dict[str, Any]:
    rows = table.sort_by("turn").to_pylist()
    about = {name: rows[0][name] for name in EPISODE}
    turns = [{name: row[name] for name in TURN} for row in rows if row["turn"] >= 0]
    prompt, images = list[int](), list[bytes]()
    for turn in turns:
        prompt = prompt[: turn["prompt_kept"] or 0] + (turn["prompt_ids"] or [])
        images = images[: turn["images_kept"] or 0] + (turn["images"] or [])
        turn |= {"prompt_ids": prompt, "images": images}
        prompt = prompt + (turn["token_ids"] or [])
    about |= {"turns": turns, "num_turns": rows[0]["turns"], "last_observation": rows[-1]["last_observation"]}
    return about | {"has_texts": any(turn["text"] is not None for turn in turns)}
