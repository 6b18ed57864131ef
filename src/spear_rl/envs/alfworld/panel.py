"""Which games make up a split: found in ALFWorld's folders, told apart by content, in an order no machine changes."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from spear_rl.envs.alfworld.gamefile import GAME_FILE, read_game_file
from spear_rl.envs.household.generation.sentences import FAMILIES
from spear_rl.io.cache import cache_folder, store, stored

DATASET = "json_2.1.1"
SPLITS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
"""Our names and ALFWorld's; both are understood."""

# The official loader leaves these out: its rules cannot play them.
_UNSUPPORTED = ("movable", "Sliced")
_FORMAT = 1


class Entry(NamedTuple):
    """One game of a panel."""

    id: str
    """alfworld/valid_seen/<task>/<trial>: the same on every machine."""
    family: str
    path: str
    sha256: str
    """Of the file's bytes."""


def dataset_folder(data: str = "") -> Path:
    """The folder of the splits, by ALFWorld's convention or in the folder given."""
    # Absolute, since a worker process may run in another folder.
    base = Path(os.path.abspath(os.path.expanduser(data or os.environ.get("ALFWORLD_DATA", "") or "~/.cache/alfworld")))
    folder = base / DATASET
    if not folder.is_dir():
        raise ValueError(
            f"there are no ALFWorld games in {base} ({DATASET} is missing): fetch them with `alfworld-download` "
            "of the package alfworld, and set ALFWORLD_DATA or the option data to their folder"
        )
    return folder


def playable_games(split: str, *, data: str = "", cache: str = "") -> tuple[Entry, ...]:
    """All playable games of a split, sorted by id.

    A game is read once; after that only its size and time are looked at, unless they change.
    """
    name = official_split(split)
    dataset = dataset_folder(data)
    folder = dataset / name
    if not folder.is_dir():
        there = ", ".join(sorted(entry.name for entry in dataset.iterdir() if entry.is_dir())) or "nothing"
        raise ValueError(f"{dataset} has no split {name} (there is {there}): fetch it with `alfworld-download`")
    place = os.path.realpath(folder)
    index = cache_folder(cache) / "alfworld" / f"panel-{_FORMAT}-{hashlib.sha256(place.encode()).hexdigest()[:24]}.json"
    known: Any = stored(index)
    seen: dict[str, list[Any]] = known if isinstance(known, dict) else {}
    facts: dict[str, list[Any]] = {}
    entries: list[Entry] = []
    for task, trial, path in _game_paths(folder):
        try:
            status = os.stat(path)
        except OSError:
            continue
        key = f"{task}/{trial}"
        fact = seen.get(key, [])
        if fact[:2] != [status.st_size, status.st_mtime_ns]:
            file = read_game_file(path)
            fact = [status.st_size, status.st_mtime_ns, file.sha256, file.is_solvable]
        facts[key] = fact
        if fact[3]:
            entries.append(Entry(f"alfworld/{name}/{key}", task.split("-", 1)[0], path, fact[2]))
    if facts != seen:
        store(index, facts)
    if not entries:
        raise ValueError(f"{folder} holds no playable game ({GAME_FILE}): fetch them with `alfworld-download`")
    return tuple(sorted(entries))


def official_split(split: str) -> str:
    """ALFWorld's name of a split."""
    name = SPLITS.get(split, split)
    if name not in SPLITS.values():
        raise ValueError(f"unknown split {split!r}: there is {', '.join([*SPLITS, *list(SPLITS.values())[1:]])}")
    return name


def in_turns(entries: Sequence[Entry]) -> list[Entry]:
    """The entries so that any first part of them is a fair one: types take turns, and within a type chance decides.

    Sorted by id the panel starts with some hundred games of one type. The chance is a hash of the id.
    """
    by_family: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: hashlib.sha256(entry.id.encode()).digest()):
        by_family[entry.family].append(entry)
    rounds = zip_longest(*(by_family[family] for family in FAMILIES))
    return [entry for entry in chain.from_iterable(rounds) if entry is not None]


def _game_paths(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(task folder, trial folder, path) of what may be a game."""
    for task in os.scandir(folder):
        supported = task.name.split("-", 1)[0] in FAMILIES and not any(word in task.name for word in _UNSUPPORTED)
        if supported and task.is_dir():
            for trial in os.listdir(task.path):
                yield task.name, trial, f"{task.path}/{trial}/{GAME_FILE}"
