"""Rows of a data file, whatever its format: jsonl, json, parquet, or a Hugging Face dataset. Knows no columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from spear_rl.errors import MissingExtraError

Row = Mapping[str, Any]

HUGGING_FACE = "hf:"
"""hf:owner/name, or with more: hf:owner/name:config:split."""
FORMATS = (".jsonl", ".json", ".parquet")


def rows_in(source: str, *, split: str) -> list[Row]:
    """All rows of a file, or of a Hugging Face dataset (there of `split`, or of the only one there is)."""
    if source.startswith(HUGGING_FACE):
        return _hugging_face(source, split)
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".jsonl":
        return list(_json_lines(path))
    if path.suffix == ".json":
        return _json(path)
    raise ValueError(f"{path}: a file of problems ends in {', '.join(FORMATS)}")


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from error
                yield _row(row, f"{path}, line {number}")


def _json(path: Path) -> list[Row]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(table, list):
        raise ValueError(f"{path}: a list of problems was expected; one object a line belongs into a .jsonl file")
    return [_row(row, f"{path}, entry {number}") for number, row in enumerate(table, 1)]


def _row(row: object, place: str) -> Row:
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: an object with a problem and an answer was expected, not {type(row).__name__}")
    return row


def _parquet(path: Path) -> list[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{path.name} is a parquet file, which needs pyarrow: pip install pyarrow, or 'spear-rl[math]'"
        ) from error
    version = str(import_module("pyarrow").__version__)
    if [int(part) for part in version.split(".")[:3] if part.isdecimal()] < [14, 0, 1]:
        raise MissingExtraError(f"pyarrow {version} runs code that a file may hold: pip install 'pyarrow>=14.0.1'")
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow has a dozen of its own
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    return rows


def _hugging_face(source: str, split: str) -> list[Row]:
    try:
        datasets = import_module("datasets")
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{source} needs the package datasets: pip install datasets") from error
    name, config, own_split = [*source.removeprefix(HUGGING_FACE).split(":"), "", ""][:3]
    try:
        found = datasets.load_dataset(name, config or None)
    except Exception as error:  # from a wrong name to no network
        raise ValueError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
    names = list(found)
    chosen = own_split or (split if split in names else names[0] if len(names) == 1 else "")
    if chosen not in names:
        there = ", ".join(names)
        raise ValueError(f"{source} has no split {chosen or split!r} (there is {there}): name one after the config's :")
    return list(found[chosen])
