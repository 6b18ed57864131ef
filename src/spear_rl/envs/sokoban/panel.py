"""The seeds of the panels of a shape: recorded for the named levels, searched for otherwise."""

import time
from functools import cache
from pathlib import Path

from spear_rl.envs.shared import generated_panels
from spear_rl.envs.shared.generated_panels import LevelManifest, recorded_manifest
from spear_rl.envs.sokoban.generator import LEVELS, PUBLISHED, Shape, generated_level
from spear_rl.envs.sokoban.text import content_hash, grid_text

MANIFEST = Path(__file__).with_name("panels.json")
MAX_SECONDS = 300.0
"""Time limit of the search for the levels of a shape."""


def panel_seeds(shape: Shape, split: str) -> tuple[int, ...]:
    """The seeds of a split in panel order, which alternates between the numbers of pushes."""
    named = [name for name, known in {**LEVELS, "published": PUBLISHED}.items() if known == shape]
    letters = recorded_manifest(MANIFEST)[named[0]]["seeds"] if named else _assigned_seeds(shape)[0]
    return generated_panels.panel_seeds(letters, split, len(shape.pushes))


def rebuilt_manifest() -> dict[str, LevelManifest]:
    """The manifest that the generator gives now."""
    return {name: _manifest(shape) for name, shape in LEVELS.items()}


def _manifest(shape: Shape) -> LevelManifest:
    return generated_panels.level_manifest(*_assigned_seeds(shape), len(shape.pushes), separator="\n\n")


@cache
def _assigned_seeds(shape: Shape) -> tuple[str, list[str]]:
    deadline = time.monotonic() + MAX_SECONDS
    return generated_panels.assigned_seeds(
        lambda seed: grid_text(generated_level(shape, seed, deadline=deadline)),
        len(shape.pushes),
        content_hash=content_hash,
        is_distinct=shape.rooms == "ours",  # the published statistics count a room as often as it is made
    )


def main(arguments: list[str]) -> int:
    return generated_panels.write_or_check(
        arguments, {**rebuilt_manifest(), "published": _manifest(PUBLISHED)}, MANIFEST
    )
