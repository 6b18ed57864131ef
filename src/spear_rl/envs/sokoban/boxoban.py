"""Boxoban's levels (10 x 10, four boxes), read from a copy of github.com/google-deepmind/boxoban-levels.

Its folders are unfiltered/{train,valid,test}, medium/{train,valid} and hard, with text files of up to 1,000 levels.
"""

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from spear_rl.envs.shared.generated_panels import content_split
from spear_rl.envs.sokoban.rules import Level, is_solved
from spear_rl.envs.sokoban.text import content_hash, read_level
from spear_rl.errors import ConfigError

SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "unfiltered": {"unfiltered/train": ("train",), "unfiltered/valid": ("validation",), "unfiltered/test": ("test",)},
    "medium": {"medium/train": ("train",), "medium/valid": ("validation", "test")},
    "hard": {"hard": ("train", "validation", "test")},
}
"""Set -> folder -> the splits its levels go to; where there are several, the content of a level decides."""

_PRECEDENCE = ("test", "validation", "train")
"""A level that is published in several splits belongs to the first of these."""
_HEAD = re.compile(r"^;[^\n]*\n", re.MULTILINE)


class Entry(NamedTuple):
    """One level of a panel."""

    id: str
    """boxoban/unfiltered/test/000/017: the same on every machine."""
    path: str
    number: int


def boxoban_entries(set_name: str, split: str, *, data: str = "", max_levels: int | None = None) -> list[Entry]:
    """The first levels of a split, by file and number; a level that is published twice is in one split only."""
    base = data_folder(data)
    preceding = _PRECEDENCE[: _PRECEDENCE.index(split)]
    held_out = {text for other in preceding for _, text in _published(base, set_name, other)}
    kept = (entry for entry, text in _published(base, set_name, split) if text not in held_out)
    return list(islice(kept, max_levels))


def data_folder(data: str = "") -> Path:
    """The folder of the levels."""
    given = data or os.environ.get("BOXOBAN_DATA", "")
    if not given:
        raise ConfigError(
            "Boxoban's levels are not shipped: get github.com/google-deepmind/boxoban-levels and set BOXOBAN_DATA or "
            "task.options.data to its folder"
        )
    # Absolute, since a worker process may run in another folder.
    base = Path(os.path.abspath(os.path.expanduser(given)))
    if not base.is_dir():
        raise ConfigError(f"Boxoban's levels: there is no folder {base}; set BOXOBAN_DATA or task.options.data")
    return base


def boxoban_level(path: str, number: int) -> Level:
    """The level at a position in a file."""
    try:
        level = read_level(_levels_in(path)[number])
    except (OSError, UnicodeDecodeError, IndexError, ValueError) as error:
        raise ConfigError(f"{path}: level {number} cannot be read: {error}") from error
    if is_solved(level.room, level.start):
        raise ConfigError(f"{path}: level {number} is solved before it starts")
    return level


def _published(base: Path, set_name: str, split: str) -> Iterator[tuple[Entry, str]]:
    """The levels of a split and their grids."""
    for folder, splits in SETS[set_name].items():
        if split not in splits:
            continue
        paths = sorted((base / folder).glob("*.txt"))
        if not paths:
            raise ConfigError(f"Boxoban's levels: {base / folder} has no level files (*.txt)")
        for path in paths:
            name = path.relative_to(base).with_suffix("").as_posix()
            for number, text in enumerate(_levels_in(str(path))):
                if len(splits) == 1 or _content_split(text, splits) == split:
                    yield Entry(f"boxoban/{name}/{number:03d}", str(path), number), text


def _content_split(text: str, splits: tuple[str, ...]) -> str:
    content = content_hash(text)
    return content_split(content) if "train" in splits else splits[int(content[:8], 16) % len(splits)]


@lru_cache(maxsize=64)
def _levels_in(path: str) -> tuple[str, ...]:
    """The grids in a file, without the line `; number` above each."""
    try:
        text = Path(path).read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return tuple(level for part in _HEAD.split(text) if (level := part.strip("\n")))
