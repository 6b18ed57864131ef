"""Which seeds make up the train, validation and test panel of each level, as the shipped manifest records it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypedDict

from spear_rl.envs.household.generation.generator import LEVELS

SPLITS = {"train": 2000, "validation": 200, "test": 200}
"""How many games each panel has, rounded up to a multiple of the level's families."""

MANIFEST = Path(__file__).with_name("panels.json")
LETTERS = {"train": "t", "validation": "v", "test": "e"}


class LevelManifest(TypedDict):
    """One level's part of the manifest file."""

    seeds: str
    """One letter a seed, from seed 0 on: which split its game is in, or that it is in none."""
    sha256: dict[str, str]
    """For each split the hash of its panel."""


class Panel(NamedTuple):
    """One split of one level."""

    seeds: tuple[int, ...]
    sha256: str
    """Of the content hashes of its games, in order."""


@cache
def recorded_manifest() -> dict[str, LevelManifest]:
    """The manifest that is shipped."""
    manifest: dict[str, LevelManifest] = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return manifest


@cache
def recorded_panel(level: str, split: str) -> Panel:
    """The games of one split of one level."""
    entry = recorded_manifest()[level]
    return Panel(ordered_seeds(level, split, entry["seeds"]), entry["sha256"][split])


def ordered_seeds(level: str, split: str, letters: Sequence[str]) -> tuple[int, ...]:
    """The seeds of a split in the panel's order, which takes turns in the kinds of task."""
    num_families = len(LEVELS[level].families)
    seeds = [seed for seed, letter in enumerate(letters) if letter == LETTERS[split]]
    by_family = [[seed for seed in seeds if seed % num_families == family] for family in range(num_families)]
    return tuple(chain.from_iterable(zip(*by_family, strict=True)))


def panel_hash(content_hashes: Iterable[str]) -> str:
    """One hash for all games of a panel in their order."""
    return hashlib.sha256("\n".join(content_hashes).encode()).hexdigest()
