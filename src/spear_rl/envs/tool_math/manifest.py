"""The SHA-256 of every problem of a split: `python -m spear_rl.envs.tool_math.manifest SPLIT` prints it, and with
`--verify FILE` compares it with another machine's.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from spear_rl.envs.shared.manifests import contents_sha256, printed_or_verified
from spear_rl.envs.tool_math.generated import LEVELS
from spear_rl.envs.tool_math.panel import SPLITS, Entry, Source, entries


def manifest_of(split: str, panel: Iterable[Entry]) -> dict[str, Any]:
    """split, problems (task id -> SHA-256 of question and answer) and sha256 (of all lines `id sha256`, sorted)."""
    contents = {entry.id: f"{entry.problem.content_hash()}\n{entry.problem.answer}" for entry in panel}
    problems = {name: hashlib.sha256(contents[name].encode()).hexdigest() for name in sorted(contents)}
    return {"split": split, "sha256": contents_sha256(problems), "problems": problems}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.tool_math.manifest", description=__doc__)
    parser.add_argument("split", choices=SPLITS)
    for name, default in Source._field_defaults.items():
        choices = LEVELS if name == "level" else None
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, choices=choices, help="as the option")
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = vars(parser.parse_args(arguments))
    split, verify = given.pop("split"), given.pop("verify")
    return printed_or_verified(lambda: manifest_of(split, entries(split, Source(**given))), verify, tasks="problems")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
