"""A panel on paper: `python -m spear_rl.envs.tool_math.manifest SPLIT` prints it, `--verify FILE` compares two.

Two machines whose manifests have the same sha256 play the same problems with the same answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from spear_rl.envs.tool_math.panel import SPLITS, Entry, Source, entries
from spear_rl.errors import UserError


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
    lines = "".join(f"{name} {digest}\n" for name, digest in problems.items())
    return {"split": split, "sha256": hashlib.sha256(lines.encode()).hexdigest(), "problems": problems}


def differences(mine: Manifest, other: Manifest) -> list[str]:
    """What differs between two manifests, one line a problem; empty means the same panel."""
    here, there = mine["problems"], other["problems"]
    lines = [f"{name}: only here" for name in here.keys() - there.keys()]
    lines += [f"{name}: missing here" for name in there.keys() - here.keys()]
    lines += [f"{name}: another content" for name in here.keys() & there.keys() if here[name] != there[name]]
    return sorted(lines)


def main(arguments: Sequence[str]) -> int:
    """Prints a manifest, or the differences to one."""
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.tool_math.manifest", description=__doc__)
    parser.add_argument("split", choices=SPLITS)
    for name in Source._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", default=Source._field_defaults[name], help="as the option")
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = parser.parse_args(arguments)
    try:
        panel = entries(given.split, Source(**{name: getattr(given, name) for name in Source._fields}))
        mine = manifest_of(given.split, panel)
        other = json.loads(Path(given.verify).read_text(encoding="utf-8")) if given.verify else mine
        found = differences(mine, other)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if not given.verify:
        print(json.dumps(mine, indent=1))
        return 0
    print("\n".join(found) or f"the same {len(mine['problems'])} problems, {mine['sha256']}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
