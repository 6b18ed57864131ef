"""JSON lines: a run's own rows with a step, as metrics.jsonl, whose unreadable lines are reported; a user's files."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spear_rl.errors import ConfigError
from spear_rl.io.escaping import in_words
from spear_rl.io.files import flush, write_whole, writing

_STEPS = 10**9
"""More than a run takes. A row of a later step is damage: what counts or draws steps would not end."""


@dataclass
class Rows:
    """What was read from a file of rows."""

    by_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step -> row, in order of steps; of several rows of one step the last."""
    lines: dict[int, int] = field(default_factory=dict)
    """Step -> number of its line."""
    faults: dict[int, str] = field(default_factory=dict)
    """Number of a line -> what is wrong with it."""
    damaged: list[bytes] = field(default_factory=list)
    """The lines at fault, as they are."""

    def sentences(self, name: str) -> list[str]:
        return [f"{name}, line {number} {fault}" for number, fault in self.faults.items()]


def read_rows(path: Path) -> Rows:
    """All rows of a file that can be read; none if there is no file."""
    found = Rows()
    *whole, last = (path.read_bytes() if path.is_file() else b"").split(b"\n")
    for number, line in enumerate([*whole, last], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < _STEPS:
                raise ValueError("is no JSON object with a step")
        except (ValueError, RecursionError) as error:
            if number <= len(whole):  # an incomplete last line, as after a kill, is no fault
                found.damaged.append(line)
                found.faults[number] = _fault(error)
            continue
        if row["step"] in found.by_step:
            found.faults[found.lines[row["step"]]] = f"is a second row of step {row['step']}"
        found.by_step[row["step"]] = row
        found.lines[row["step"]] = number
    found.by_step = dict(sorted(found.by_step.items()))
    return found


def numbered_lines(path: str, *, key: str) -> Iterator[tuple[int, Any]]:
    r"""(number of the line, its value) of a user's file, without blank lines; an error names `key` as the setting.

    A line ends with \n alone: a JSON text may hold other separators as they are, e.g. U+2028.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {in_words(error)}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{key}: {path}, line {number} is not valid JSON: {in_words(error)}") from error


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row in one write."""
    with writing(path), path.open("ab") as file:
        file.write(json.dumps(row).encode() + b"\n")


def mend_rows(path: Path, *, from_step: int, complete: bool = False) -> list[str]:
    """Remove rows from `from_step` on, which a resumed run writes again, and damaged lines; returns notes.

    Damaged lines are kept in `path`.damaged.

    Args:
        complete: there should be a row for every step before `from_step`.
    """
    with writing(path):
        found = read_rows(path)
        kept = {step: row for step, row in found.by_step.items() if step < from_step}
        notes = found.sentences(path.name)
        if found.damaged:
            aside = path.with_name(f"{path.name}.damaged")
            notes[-1] += f"; damaged lines are kept in {aside.name}"
            before = aside.read_bytes() if aside.is_file() else b""
            new = [line for line in found.damaged if line not in before.split(b"\n")]
            write_whole(aside, before + b"".join(line + b"\n" for line in new))
        if complete and (missing := gaps(kept, from_step)):
            notes.append(f"{path.name} lacks the rows of steps {missing}; they cannot be made again")
        content = b"".join(json.dumps(row).encode() + b"\n" for row in kept.values())
        if path.exists() and content != path.read_bytes():
            write_whole(path, content)
    return notes


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges, e.g. 3, 5-8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def gaps(numbers: Iterable[int], end: int) -> str:
    """What ascending numbers from 0 leave out before `end`, as ranges; found without counting up to there."""
    parts, start = list[str](), 0
    for number in [*(number for number in numbers if number < end), end]:
        if number > start:
            parts.append(f"{start}-{number - 1}" if number - 1 > start else str(start))
        start = number + 1
    return ", ".join(parts)


def flush_rows(run_dir: Path) -> None:
    """Flush all rows of a run to disk."""
    for name in ("metrics.jsonl", "eval.jsonl", "draws.jsonl", "buffer.jsonl", "warnings.jsonl"):
        path = run_dir / name
        with writing(path):
            if path.is_file():
                flush(path)
    if os.path.isdir(run_dir):
        with writing(run_dir):
            flush(run_dir)


def _fault(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "is not valid UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error}"
    return str(error) if str(error).startswith("is no ") else "is not valid JSON"
