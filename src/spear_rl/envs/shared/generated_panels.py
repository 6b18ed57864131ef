"""Panels of generated tasks: which seeds belong to train, validation and test, as a shipped manifest records them.

The content of a task decides its split, so no task is in two splits. Seed s gives a task of kind s % num_kinds.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TypedDict

SPLITS = {"train": 2000, "validation": 200, "test": 200}
"""Tasks per split, rounded up to equally many of each kind; fewer where the generator has no more."""
MAX_SEEDS = 20 * sum(SPLITS.values())

UNUSED = "-"
_LETTERS = {"train": "t", "validation": "v", "test": "e"}


class LevelManifest(TypedDict):
    """The entry of one level in a manifest file."""

    seeds: str
    """One letter per seed, from seed 0: the split of its task, or - for none."""
    sha256: dict[str, str]
    """Split -> hash of the contents of its tasks, in panel order."""


@cache
def recorded_manifest(file: Path) -> dict[str, LevelManifest]:
    """Level -> its entry in the shipped manifest."""
    manifest: dict[str, LevelManifest] = json.loads(file.read_text(encoding="utf-8"))
    return manifest


def content_split(content_hash: str) -> str:
    """The split of a task: one in twelve is for validation, one in twelve for test."""
    return {0: "validation", 1: "test"}.get(int(content_hash[:8], 16) % 12, "train")


def assigned_seeds(
    content: Callable[[int], str],
    num_kinds: int,
    *,
    content_hash: Callable[[str], str] = str,
    is_distinct: bool = True,
) -> tuple[str, list[str]]:
    """The letter and the content of every seed until each split is full, with equally many tasks of each kind.

    Without `is_distinct` a split has a task as often as the generator gives it.
    """
    left = {(split, kind): -(-size // num_kinds) for split, size in SPLITS.items() for kind in range(num_kinds)}
    letters: list[str] = []
    contents: list[str] = []
    seen: set[str] = set()
    while any(left.values()) and len(letters) < MAX_SEEDS:
        seed = len(letters)
        contents.append(content(seed))
        digest = content_hash(contents[-1])
        split, kind = content_split(digest), seed % num_kinds
        is_used = not (is_distinct and digest in seen) and left[split, kind] > 0
        letters.append(_LETTERS[split] if is_used else UNUSED)
        left[split, kind] -= is_used
        seen.add(digest)
    return "".join(letters), contents


def panel_seeds(letters: str, split: str, num_kinds: int) -> tuple[int, ...]:
    """The seeds of a split in panel order, which alternates between the kinds of task."""
    seeds = [seed for seed, letter in enumerate(letters) if letter == _LETTERS[split]]
    by_kind = [[seed for seed in seeds if seed % num_kinds == kind] for kind in range(num_kinds)]
    return tuple(seed for round_ in zip_longest(*by_kind) for seed in round_ if seed is not None)


def panel_hash(contents: Sequence[str], separator: str = "\n") -> str:
    return hashlib.sha256(separator.join(contents).encode()).hexdigest()


def level_manifest(letters: str, contents: list[str], num_kinds: int, *, separator: str = "\n") -> LevelManifest:
    """The entry of a level with these assigned seeds."""
    panels = {split: [contents[seed] for seed in panel_seeds(letters, split, num_kinds)] for split in SPLITS}
    return {"seeds": letters, "sha256": {split: panel_hash(own, separator) for split, own in panels.items()}}


def write_or_check(arguments: Sequence[str], rebuilt: Mapping[str, LevelManifest], file: Path) -> int:
    """Write the rebuilt manifest to its file; with --check only print whether the file is up to date."""
    if "--check" in arguments:
        is_current = rebuilt == recorded_manifest(file)
        print("the manifest is up to date" if is_current else "the manifest differs from what the generator gives")
        return 0 if is_current else 1
    file.write_text(json.dumps(rebuilt, indent=1) + "\n", encoding="utf-8")
    return 0
