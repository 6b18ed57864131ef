"""A panel on paper: `python -m spear_rl.envs.tool_math.manifest SPLIT` prints it, `--verify FILE` compares two.

Two machines whose manifests have the same sha256 play the same problems with the same answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TypedDict

from spear_rl.envs.shared.manifests import contents_sha256, printed_or_verified
from spear_rl.envs.tool_math.data.panel import SPLITS, Entry, Source, entries


class Manifest(TypedDict):
    """The problems of one split."""

    split: str
    sha256: str
    """Of all lines `id sha256`, sorted."""
    problems: dict[str, str]
    """Task id -> SHA-256 of question and answer."""


def manifest_of(split: str, panel: Iterable[Entry]) -> Manifest:
    """The manifest of a panel."""
    problems = {entry.id: entry.sha256 for entry in sorted(panel, key=lambda entry: entry.id)}
    return {"split": split, "sha256": contents_sha256(problems), "problems": problems}


def main(arguments: Sequence[str]) -> int:
    """Prints a manifest, or the differences to one."""
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.tool_math.manifest", description=__doc__)
    parser.add_argument("split", choices=SPLITS)
    for name in Source._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", default=Source._field_defaults[name], help="as the option")
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = parser.parse_args(arguments)
    source = Source(**{name: getattr(given, name) for name in Source._fields})
    return printed_or_verified(
        lambda: manifest_of(given.split, entries(given.split, source)), given.verify, tasks="problems"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
