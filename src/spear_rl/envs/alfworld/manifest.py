"""`python -m spear_rl.envs.alfworld.manifest SPLIT` prints the SHA-256 of every game file; `--verify FILE` compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spear_rl.envs.alfworld.panel import official_split, playable_games
from spear_rl.envs.shared.manifests import manifest_of, run_command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.alfworld.manifest", description=__doc__)
    parser.add_argument("split")
    parser.add_argument("--data", default="", help="the folder that holds json_2.1.1, instead of $ALFWORLD_DATA")
    return run_command(parser, arguments, _manifest, key="games")


def _manifest(given: argparse.Namespace) -> Mapping[str, Any]:
    games = {game.id: game.sha256 for game in playable_games(given.split, data=given.data)}
    return manifest_of(official_split(given.split), games, key="games")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
