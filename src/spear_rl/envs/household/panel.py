"""`python -m spear_rl.envs.household.panel` rebuilds the panels and writes their manifest; `--check` compares them."""

import sys
from collections.abc import Iterable

from spear_rl.envs.household import MANIFEST
from spear_rl.envs.household.experts import EXPERTS
from spear_rl.envs.household.generator import LEVELS, generated_problem
from spear_rl.envs.household.rules.game import grounded_game
from spear_rl.envs.shared.generated_panels import UNUSED, LevelManifest, assigned_seeds, level_manifest, write_or_check


def rebuilt_manifest(levels: Iterable[str] = tuple(LEVELS)) -> dict[str, LevelManifest]:
    """The manifest that the generator gives now."""
    return {level: _rebuilt_level(level) for level in levels}


def _rebuilt_level(level: str) -> LevelManifest:
    num_families = len(LEVELS[level].families)
    letters, hashes = assigned_seeds(lambda seed: generated_problem(level, seed).content_hash(), num_families)
    for seed, letter in enumerate(letters):
        if letter == UNUSED:
            continue
        game = grounded_game(generated_problem(level, seed))
        # An expert raises if the game cannot be won, and returns no commands if it is won at the start.
        if not all(expert(game, 0) for expert in EXPERTS.values()):
            raise ValueError(f"the game of level {level}, seed {seed} is won before it starts")
    return level_manifest(letters, hashes, num_families)


def main(arguments: list[str]) -> int:
    return write_or_check(arguments, rebuilt_manifest(), MANIFEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
