"""The files of a run's episodes: trajectories/steps_FIRST_LAST.parquet, whole or not there.

A step is written as a part of its own, so that a reader sees it at once. Every `MERGED` of them become one part. It is
there before its sources go, so after a kill both may be: a part within the steps of another counts for nothing.
A merged part has its index in its footer: a parquet file of one row per episode, five to fifty times quicker to read.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spear_rl.io.episodes.columns import EPISODE, NAMES, SCHEMA, Pieces, table_of, without_texts
from spear_rl.io.files import flush, is_leftover, writing
from spear_rl.io.jsonl import append_row, mend_rows, read_rows
from spear_rl.types import Group

MERGED = 32
SMALL = 4 * 2**20
"""Bytes of a part that is merged with others; a larger one is large enough."""
ROWS = 4096
"""Rows of a row group: what has to be read to show one episode, at least."""
PIECES = "token_texts.jsonl"
INDEX = b"spear_rl.episodes"
"""Key of the footer's metadata with the index, in base64 as the values are texts."""
_NAME = re.compile(r"steps_(\d{6,9})_(\d{6,9})(\.thin)?\.parquet")
_DICTIONARIES = [*NAMES, "turn_dropped", "invalid", "state_key", "observation", "prompt_ids.list.element"]
_FLOATS = ["logprobs.list.element", "entropies.list.element"]


@dataclass(frozen=True, order=True)
class Part:
    """One file: the first and the last step in it, and whether its texts were left out (`thin`)."""

    first: int
    last: int
    is_thin: bool
    path: Path = field(compare=False)

    @classmethod
    def of(cls, folder: Path, first: int, last: int, *, is_thin: bool = False) -> Part:
        thin = ".thin" if is_thin else ""
        return cls(first, last, is_thin, folder / f"steps_{first:06d}_{last:06d}{thin}.parquet")


def parts_in(folder: Path) -> list[Part]:
    """The parts that count, in order of steps."""
    counting = list[Part]()
    for part in sorted(_found(folder), key=lambda part: (part.first, -part.last, part.is_thin)):
        if not counting or part.last > counting[-1].last:
            counting.append(part)
    return counting


def _found(folder: Path) -> list[Part]:
    found = list[Part]()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            named = _NAME.fullmatch(entry.name)
            if named and int(named[1]) <= int(named[2]) and entry.is_file(follow_symlinks=False):
                found.append(Part(int(named[1]), int(named[2]), bool(named[3]), Path(entry.path)))
    return found


@dataclass
class EpisodeWriter:
    """Writes the episodes of a run, step by step, within a bound on disk use.

    Beyond `max_bytes` the oldest parts lose their texts, and if that is not enough they are deleted; the newest step
    stays.
    """

    folder: Path
    max_bytes: int
    pieces: Pieces | None = None
    """For the texts of single tokens, which go into PIECES as they come up."""
    _known: set[int] | None = field(default=None, init=False)

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        turn_advantages: Sequence[Sequence[float]] | None = None,
        dropped: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Add the episodes of a step."""
        part = Part.of(self.folder, step, step)
        with writing(part.path):
            self.folder.mkdir(parents=True, exist_ok=True)
        table = table_of(step, groups, turn_advantages, dropped)
        self._write_pieces(step, table)
        write_part(part.path, [table])
        self._merge_steps(parts_in(self.folder), MERGED)
        self._keep_bound()

    def _merge_steps(self, parts: Sequence[Part], fewest: int) -> None:
        """Small parts of one step into larger ones, once there are enough; what is between them stays between them."""
        is_small = [part.first == part.last and not part.is_thin and _size(part) <= SMALL for part in parts]
        if sum(is_small) < fewest:
            return
        run = list[tuple[Part, pa.Table]]()
        for part, small in zip(parts, is_small, strict=True):
            table = _read(part) if small else None
            if table is not None:
                run.append((part, table))
            else:
                self._merge(run)
                run = []
        self._merge(run)

    def _merge(self, run: Sequence[tuple[Part, pa.Table]]) -> None:
        if len(run) > 1:
            merged = Part.of(self.folder, run[0][0].first, run[-1][0].last)
            write_part(merged.path, [table for _, table in run], is_merged=True)
            _remove([part for part, _ in run])

    def _keep_bound(self) -> None:
        parts = parts_in(self.folder)
        if sum(map(_size, parts)) <= self.max_bytes:
            return
        if all(part.is_thin or part.first == part.last for part in parts[:-1]):
            self._merge_steps(parts[:-1], 2)  # most of a small part without its texts is its header
            parts = parts_in(self.folder)
        sizes = {part: _size(part) for part in parts}
        total = sum(sizes.values())
        for part in parts[:-1]:
            if total <= self.max_bytes:
                return
            if part.is_thin:
                continue
            thin, table = Part.of(self.folder, part.first, part.last, is_thin=True), _read(part)
            if table is not None:
                write_part(thin.path, [without_texts(table)], is_merged=True)
                total += _size(thin)
            _remove([part])
            total -= sizes[part]
        for part in parts_in(self.folder)[:-1]:
            if total > self.max_bytes:
                total -= _size(part)
                _remove([part])

    def _write_pieces(self, step: int, table: pa.Table) -> None:
        """The texts of the tokens that come up for the first time."""
        if self.pieces is None:
            return
        path = self.folder / PIECES
        if self._known is None:
            self._known = set(pieces_in(path))
        ids = {*_different(table, "token_ids"), *_different(table, "prompt_ids")} - self._known
        if ids:
            new = sorted(ids)
            append_row(path, {"step": step, "pieces": dict(zip(map(str, new), self.pieces(new), strict=True))})
            self._known |= ids


def _different(table: pa.Table, column: str) -> list[int]:
    found: list[int] = pc.unique(pc.list_flatten(table.column(column))).to_pylist()
    return found


def pieces_in(path: Path) -> dict[int, str]:
    """Token id -> its text, as far as the file can be read."""
    found: dict[int, str] = {}
    for row in read_rows(path).by_step.values():
        pieces = row.get("pieces")
        for token, text in pieces.items() if isinstance(pieces, dict) else ():
            if token.isdecimal() and isinstance(text, str):
                found[int(token)] = text
    return found


def write_part(path: Path, tables: Sequence[pa.Table], *, is_merged: bool = False) -> None:
    """Write a part under another name and rename it; one that replaces others has an index, and is flushed."""
    draft = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            with pq.ParquetWriter(
                draft,
                SCHEMA,
                compression="zstd",
                use_dictionary=_DICTIONARIES,
                use_byte_stream_split=_FLOATS,
                write_statistics=["step", "group", "episode"],
            ) as writer:
                whole = pa.concat_tables(tables)
                writer.write_table(whole, row_group_size=ROWS)
                if is_merged:
                    writer.add_key_value_metadata({INDEX: _index(whole)})
            if is_merged:
                flush(draft)
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        if is_merged:
            flush(path.parent)


def episodes_of(rows: pa.Table) -> pa.Table:
    """The columns of episodes, one row per episode, of rows per turn."""
    return rows.filter(pc.less_equal(rows.column("turn"), 0)).select(list(EPISODE))


def _index(rows: pa.Table) -> bytes:
    index = pa.BufferOutputStream()
    pq.write_table(episodes_of(rows), index, compression="zstd", write_statistics=False, store_schema=False)
    return base64.b64encode(index.getvalue())


def remove_later_steps(folder: Path, step: int) -> None:
    """Delete the episodes from `step` on, which a resumed run plays again, and what a kill left unfinished."""
    if not folder.is_dir():
        return
    with writing(folder):
        counting = parts_in(folder)
        for part in counting:
            if part.first < step <= part.last and (table := _read(part)) is not None:
                kept = table.filter(pc.less(table.column("step"), step))
                last = pc.max(kept.column("step")).as_py()
                if last is not None:
                    write_part(Part.of(folder, part.first, last, is_thin=part.is_thin).path, [kept], is_merged=True)
        _remove([part for part in _found(folder) if part.last >= step])
        _remove([part for part in _found(folder) if part not in parts_in(folder)])
        for entry in os.scandir(folder):
            if is_leftover(entry.name) and _NAME.fullmatch(entry.name.removeprefix(".").removesuffix(".part")):
                os.unlink(entry.path)
    if (folder / PIECES).is_file():
        mend_rows(folder / PIECES, from_step=step)


def _read(part: Part) -> pa.Table | None:
    """The rows of a part; None if it is damaged, which readers report."""
    try:
        return pq.read_table(part.path, schema=SCHEMA, partitioning=None, use_threads=False)
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None


def _size(part: Part) -> int:
    try:
        return part.path.stat().st_size
    except OSError:
        return 0


def _remove(parts: Sequence[Part]) -> None:
    for part in parts:
        with writing(part.path):
            part.path.unlink(missing_ok=True)
