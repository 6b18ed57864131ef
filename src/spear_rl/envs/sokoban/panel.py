"""Which levels make up the train, validation and test panel of a shape: recorded for the named levels, else worked out.

The split of a level hangs on nothing but what is in it, turned and mirrored alike, so no level can ever be in two.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypedDict

from spear_rl.envs.sokoban.generator import LEVELS, Shape, generated_level
from spear_rl.envs.sokoban.grid import content_hash, grid_text

SPLITS = {"train": 2000, "validation": 200, "test": 200}
"""How many levels each panel has; fewer where a shape has no more different ones."""

MANIFEST = Path(__file__).with_name("panels.json")
_LETTERS = {"train": "t", "validation": "v", "test": "e"}
_UNUSED = "-"
MAX_SECONDS = 300.0
"""After which the search for the levels of a shape is given up."""
_MAX_SEEDS = 20 * sum(SPLITS.values())


class LevelManifest(TypedDict):
    """One named level's part of the manifest file."""

    seeds: str
    """One letter a seed, from seed 0 on: which split its level is in, or that it is in none."""
    sha256: dict[str, str]
    """For each split the hash of its levels' texts, in the panel's order."""


class _Found(NamedTuple):
    letters: str
    texts: tuple[str, ...]


def panel_seeds(shape: Shape, split: str) -> tuple[int, ...]:
    """The seeds of a split in the panel's order, which takes turns in the pushes that are needed."""
    named = [name for name, known in LEVELS.items() if known == shape]
    letters = recorded_manifest()[named[0]]["seeds"] if named else _searched(shape).letters
    return _ordered(shape, split, letters)


@cache
def recorded_manifest() -> dict[str, LevelManifest]:
    """The manifest that is shipped."""
    manifest: dict[str, LevelManifest] = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return manifest


def rebuilt_manifest() -> dict[str, LevelManifest]:
    """The manifest as the generator gives it today."""
    out: dict[str, LevelManifest] = {}
    for name, shape in LEVELS.items():
        letters, texts = _searched(shape)
        digests = {split: panel_hash([texts[seed] for seed in _ordered(shape, split, letters)]) for split in SPLITS}
        out[name] = {"seeds": letters, "sha256": digests}
    return out


def content_split(content: str) -> str:
    """Which split a level belongs to: one in twelve is for validation, one in twelve for test."""
    return {0: "validation", 1: "test"}.get(int(content[:8], 16) % 12, "train")


def panel_hash(texts: list[str]) -> str:
    """One hash for all levels of a panel in their order."""
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()


@cache
def _searched(shape: Shape) -> _Found:
    """Every split filled with as many levels of each number of pushes, from seed 0 on, none of them twice."""
    share = {split: -(-size // len(shape.pushes)) for split, size in SPLITS.items()}
    left = {(split, turn): count for split, count in share.items() for turn in range(len(shape.pushes))}
    letters: list[str] = []
    texts: list[str] = []
    seen: set[str] = set()
    deadline = time.monotonic() + MAX_SECONDS
    while any(left.values()) and len(letters) < _MAX_SEEDS:
        seed = len(letters)
        texts.append(grid_text(generated_level(shape, seed, deadline=deadline)))
        content = content_hash(texts[-1])
        place = (content_split(content), seed % len(shape.pushes))
        is_used = content not in seen and left[place] > 0
        letters.append(_LETTERS[place[0]] if is_used else _UNUSED)
        left[place] -= is_used
        seen.add(content)
    return _Found("".join(letters), tuple(texts))


def _ordered(shape: Shape, split: str, letters: str) -> tuple[int, ...]:
    turns = len(shape.pushes)
    seeds = [seed for seed, letter in enumerate(letters) if letter == _LETTERS[split]]
    by_pushes = [[seed for seed in seeds if seed % turns == turn] for turn in range(turns)]
    return tuple(seed for round_ in zip_longest(*by_pushes) for seed in round_ if seed is not None)
