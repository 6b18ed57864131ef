"""A panel on paper: `python -m spear_rl.envs.alfworld.manifest SPLIT` prints it, `--verify FILE` compares two.

Two machines whose manifests have the same sha256 play the same games.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TypedDict

from spear_rl.envs.alfworld.panel import Entry, official_split, playable_games
from spear_rl.envs.shared.manifests import contents_sha256, printed_or_verified


class Manifest(TypedDict):
    """The games of one split."""

    split: str
    sha256: str
    """Of all lines `id sha256`, sorted."""
    games: dict[str, str]
    """Task id -> SHA-256 of the game file's bytes."""


def manifest_of(split: str, entries: Iterable[Entry]) -> Manifest:
    """The manifest of a panel."""
    games = {entry.id: entry.sha256 for entry in sorted(entries)}
    return {"split": official_split(split), "sha256": contents_sha256(games), "games": games}


def main(arguments: Sequence[str]) -> int:
    """Prints a manifest, or the differences to one."""
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.alfworld.manifest", description=__doc__)
    parser.add_argument("split")
    parser.add_argument("--data", default="", help="the folder that holds json_2.1.1, instead of $ALFWORLD_DATA")
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = parser.parse_args(arguments)
    return printed_or_verified(
        lambda: manifest_of(given.split, playable_games(given.split, data=given.data)), given.verify, tasks="games"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
