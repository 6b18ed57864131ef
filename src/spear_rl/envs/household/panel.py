"""Works the panels out from the generator; `python -m spear_rl.envs.household.panel` writes their manifest.

The split of a game hangs on nothing but what is in it, so no game can ever be in two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from spear_rl.envs.household.experts.demonstrations import EXPERTS
from spear_rl.envs.household.generation.generator import LEVELS, generated_problem
from spear_rl.envs.household.manifest import (
    LETTERS,
    MANIFEST,
    SPLITS,
    LevelManifest,
    ordered_seeds,
    panel_hash,
    recorded_manifest,
)
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.shared.manifests import written_or_checked

_UNUSED = "-"


def rebuilt_manifest(levels: Iterable[str] = tuple(LEVELS)) -> dict[str, LevelManifest]:
    """The manifest as the generator gives it today."""
    return {level: _rebuilt_level(level) for level in levels}


def content_split(content_hash: str) -> str:
    """Which split a game belongs to: one in twelve is for validation, one in twelve for test."""
    return {0: "validation", 1: "test"}.get(int(content_hash[:8], 16) % 12, "train")


def _rebuilt_level(level: str) -> LevelManifest:
    families = LEVELS[level].families
    # The same number for every family: the size divided by the families, rounded up.
    left = {(split, family): -(-size // len(families)) for split, size in SPLITS.items() for family in families}
    letters: list[str] = []
    hashes: list[str] = []
    seen: set[str] = set()
    while any(left.values()):
        seed = len(letters)
        problem = generated_problem(level, seed)
        content = problem.content_hash()
        place = (content_split(content), families[seed % len(families)])
        if content in seen or not left[place]:
            letters.append(_UNUSED)
        else:
            left[place] -= 1
            letters.append(LETTERS[place[0]])
            game = Game(problem)
            # An expert raises on a game that cannot be won, and does nothing in one that is won already.
            if not all(expert(game, 0) for expert in EXPERTS.values()):
                raise ValueError(f"the game of level {level}, seed {seed} is won before it starts")
        seen.add(content)
        hashes.append(content)
    digests = {split: panel_hash(hashes[seed] for seed in ordered_seeds(level, split, letters)) for split in SPLITS}
    return {"seeds": "".join(letters), "sha256": digests}


def main(arguments: list[str]) -> int:
    """Writes the manifest; with --check only says whether it is as it should be."""
    return written_or_checked(arguments, rebuilt_manifest(), recorded_manifest, MANIFEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
