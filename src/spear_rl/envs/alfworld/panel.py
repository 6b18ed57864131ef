"""The games of a split, found in ALFWorld's folders and identified by content, in an order that no machine changes."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from spear_rl.envs.alfworld.gamefile import GAME_FILE, read_game_file
from spear_rl.envs.household.families import FAMILIES
from spear_rl.errors import OptionError
from spear_rl.io.cache import cache_folder, store, stored
from spear_rl.io.jsonl import spans

DATASET = "json_2.1.1"
SPLITS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
"""Our names -> ALFWorld's; both are accepted."""
HELD_OUT = "held_out"
"""The split of the training games in the scenes that hold_out_scenes leaves out of train."""
ROOMS = {0: "kitchen", 2: "living room", 3: "bedroom", 4: "bathroom"}
"""Hundreds of a scene's number -> type of room, in AI2-THOR."""

# The official loader skips these too: its rules cannot play them.
_UNSUPPORTED = ("movable", "Sliced")
_FORMAT = 1


class Entry(NamedTuple):
    """One game of a panel."""

    id: str
    """alfworld/valid_seen/<task>/<trial>: the same on every machine."""
    family: str
    path: str
    sha256: str

    @property
    def scene(self) -> int | None:
        """The room that it is played in, the last number of <task>."""
        number = self.id.split("/")[2].rpartition("-")[2]
        return int(number) if number.isdecimal() else None


def games_of(split: str, *, hold_out: int | Sequence[int] = 0, data: str = "", cache: str = "") -> tuple[Entry, ...]:
    """The playable games of a split; those of train without the held-out scenes, which are the split held_out.

    Args:
        hold_out: scene numbers, or how many scenes of each type of room; 0 or none: train is whole.
    """
    if split == HELD_OUT and not hold_out:
        raise ValueError("no scene is held out: set task.options.hold_out_scenes, e.g. to 4 of each type of room")
    entries = playable_games("train" if split == HELD_OUT else split, data=data, cache=cache)
    if not hold_out or split not in ("train", HELD_OUT):
        return entries
    scenes = _held_out_scenes(entries, hold_out)
    return tuple(entry for entry in entries if (entry.scene in scenes) == (split == HELD_OUT))


def _held_out_scenes(entries: Sequence[Entry], hold_out: int | Sequence[int]) -> set[int]:
    """The scenes, chosen by a hash if only their number is given: those of n are among those of n + 1."""
    known = {entry.scene for entry in entries if entry.scene is not None}
    if isinstance(hold_out, int):
        rooms: defaultdict[str, list[int]] = defaultdict(list)
        for scene in sorted(known, key=lambda scene: hashlib.sha256(f"scene {scene}".encode()).digest()):
            rooms[ROOMS.get(scene // 100, "other room")].append(scene)
        fewest = min(rooms, key=lambda room: len(rooms[room]), default="numbered")
        if hold_out >= len(rooms[fewest]):
            there = f"the training games have {len(rooms[fewest])} {fewest} scenes, and one must be left to train on"
            rule = f"it is how many scenes of each type of room; for scene {hold_out} alone write [{hold_out}]"
            raise OptionError(f"hold_out_scenes={hold_out} is too many: {there} ({rule})")
        return {scene for scenes in rooms.values() for scene in scenes[:hold_out]}
    if unknown := sorted(set(hold_out) - known):
        there = spans(sorted(known)) or "none"
        raise OptionError(f"hold_out_scenes: no training game is in scene {unknown[0]}; there is {there}")
    if all(entry.scene in hold_out for entry in entries):
        raise OptionError("hold_out_scenes holds every scene, which leaves no game to train on: leave some out of it")
    return set(hold_out)


def dataset_folder(data: str = "") -> Path:
    """The folder of the splits: in `data`, $ALFWORLD_DATA or ~/.cache/alfworld."""
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
    """All playable games of a split, sorted by id. A file is read again only if its size or time has changed."""
    name = official_split(split)
    dataset = dataset_folder(data)
    folder = dataset / name
    if not folder.is_dir():
        found = ", ".join(sorted(entry.name for entry in dataset.iterdir() if entry.is_dir())) or "nothing"
        raise ValueError(f"{dataset} has no split {name} (there is {found}): fetch it with `alfworld-download`")
    location = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:24]
    index = cache_folder(cache) / "alfworld" / f"panel-{_FORMAT}-{location}.json"
    cached: Any = stored(index)
    known: dict[str, list[Any]] = cached if isinstance(cached, dict) else {}
    current: dict[str, list[Any]] = {}
    entries: list[Entry] = []
    for task, trial, path in _game_paths(folder):
        try:
            status = os.stat(path)
        except OSError:
            continue
        key = f"{task}/{trial}"
        record = known.get(key, [])
        if record[:2] != [status.st_size, status.st_mtime_ns]:
            file = read_game_file(path)
            record = [status.st_size, status.st_mtime_ns, file.sha256, file.is_solvable]
        current[key] = record
        if record[3]:
            entries.append(Entry(f"alfworld/{name}/{key}", task.split("-", 1)[0], path, record[2]))
    if current != known:
        store(index, current)
    if not entries:
        raise ValueError(f"{folder} holds no playable game ({GAME_FILE}): fetch them with `alfworld-download`")
    return tuple(sorted(entries))


def official_split(split: str) -> str:
    """ALFWorld's name of a split."""
    name = SPLITS.get(split, split)
    if name not in SPLITS.values():
        raise ValueError(
            f"unknown split {split!r}: there is {', '.join([*SPLITS, *list(SPLITS.values())[1:], HELD_OUT])}"
        )
    return name


def interleaved(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with the families alternating, each ordered by hashed ids, so that any prefix is representative."""
    by_family: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: hashlib.sha256(entry.id.encode()).digest()):
        by_family[entry.family].append(entry)
    rounds = zip_longest(*(by_family[family] for family in FAMILIES))
    return [entry for entry in chain.from_iterable(rounds) if entry is not None]


def _game_paths(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(task folder, trial folder, path) of every possible game."""
    for task in os.scandir(folder):
        supported = task.name.split("-", 1)[0] in FAMILIES and not any(word in task.name for word in _UNSUPPORTED)
        if supported and task.is_dir():
            for trial in os.listdir(task.path):
                yield task.name, trial, f"{task.path}/{trial}/{GAME_FILE}"
