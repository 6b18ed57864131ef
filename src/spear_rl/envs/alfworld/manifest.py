"""A panel on paper: `python -m spear_rl.envs.alfworld.manifest SPLIT` prints it, `--verify FILE` compares two.

Two machines whose manifests have the same sha256 play the same games.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from spear_rl.envs.alfworld.panel import Entry, official_split, playable_games


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
    lines = "".join(f"{name} {digest}\n" for name, digest in games.items())
    return {"split": official_split(split), "sha256": hashlib.sha256(lines.encode()).hexdigest(), "games": games}


def differences(mine: Manifest, other: Manifest) -> list[str]:
    """What differs between two manifests, one line a game; empty means the same panel."""
    here, there = mine["games"], other["games"]
    lines = [f"{name}: only here" for name in here.keys() - there.keys()]
    lines += [f"{name}: missing here" for name in there.keys() - here.keys()]
    lines += [f"{name}: another content" for name in here.keys() & there.keys() if here[name] != there[name]]
    return sorted(lines)


def main(arguments: Sequence[str]) -> int:
    """Prints a manifest, or the differences to one."""
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.alfworld.manifest", description=__doc__)
    parser.add_argument("split")
    parser.add_argument("--data", default="", help="the folder that holds json_2.1.1, instead of $ALFWORLD_DATA")
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = parser.parse_args(arguments)
    try:
        mine = manifest_of(given.split, playable_games(given.split, data=given.data))
        other = json.loads(Path(given.verify).read_text(encoding="utf-8")) if given.verify else mine
        found = differences(mine, other)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if not given.verify:
        print(json.dumps(mine, indent=1))
        return 0
    print("\n".join(found) or f"the same {len(mine['games'])} games, {mine['sha256']}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
