"""`python -m spear_rl.envs.alfworld.manifest SPLIT` prints the SHA-256 of every game file; `--verify FILE` compares."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from spear_rl.envs.alfworld.panel import HELD_OUT, games_of, official_split
from spear_rl.envs.shared.manifests import contents_sha256, printed_or_verified


def manifest_of(split: str, data: str = "", hold_out: int | Sequence[int] = 0) -> dict[str, Any]:
    """split, games (task id -> SHA-256 of its file) and sha256 (of all lines `id sha256`, sorted)."""
    games = {game.id: game.sha256 for game in games_of(split, hold_out=hold_out, data=data)}
    return {
        "split": split if split == HELD_OUT else official_split(split),
        "sha256": contents_sha256(games),
        "games": games,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.alfworld.manifest", description=__doc__)
    parser.add_argument("split")
    parser.add_argument("--data", default="", help="the folder that holds json_2.1.1, instead of $ALFWORLD_DATA")
    parser.add_argument("--hold-out-scenes", type=json.loads, default=0, help="as task.options.hold_out_scenes")
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = parser.parse_args(arguments)
    return printed_or_verified(
        lambda: manifest_of(given.split, given.data, given.hold_out_scenes), given.verify, tasks="games"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
