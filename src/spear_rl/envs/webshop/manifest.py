"""Hashes of the goals: `python -m spear_rl.envs.webshop.manifest` prints one per split.

Machines that print the same hashes play the same goals. `--check` compares the generated shops with the shipped
hashes, `--write` records new ones.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from spear_rl.envs.webshop import source_of
from spear_rl.envs.webshop.data.goals import SPLITS
from spear_rl.envs.webshop.data.shop import Source, open_shop, panel_hash

MANIFEST = Path(__file__).with_name("panels.json")
EMBEDDED = ("standard", "tiny")


def hashes(source: Source, cache: str = "") -> dict[str, str]:
    """Split -> hash of its goals, price limits included, in order."""
    shop = open_shop(source, cache)
    return {split: panel_hash(shop.goal(int(number)) for number in shop.split(split)) for split in SPLITS}


def recorded() -> dict[str, dict[str, str]]:
    """Level -> split -> shipped hash."""
    known: dict[str, dict[str, str]] = json.loads(MANIFEST.read_text("utf-8"))
    return known


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.webshop.manifest", description=__doc__)
    parser.add_argument("--data", default="", help="a folder with WebShop's files, instead of the generated shops")
    parser.add_argument("--size", default="", help="1000 for the small catalogue")
    parser.add_argument("--goals", default="human", choices=("human", "synthetic"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    if given.data:
        print(json.dumps(hashes(source_of(data=given.data, size=given.size, goals=given.goals)), indent=1))
        return 0
    found = {level: hashes(source_of(level=level)) for level in EMBEDDED}
    if given.write:
        MANIFEST.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    elif given.check:
        print("the panels are as shipped" if found == recorded() else "the panels differ from those shipped")
        return int(found != recorded())
    else:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
