"""`python -m spear_rl.envs.tool_math.manifest SPLIT` prints the SHA-256 of every problem; `--verify FILE` compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spear_rl.envs.shared import manifests
from spear_rl.envs.tool_math.data.panel import SPLITS, Entry, Source, entries


def manifest_of(split: str, panel: Iterable[Entry]) -> Mapping[str, Any]:
    """The manifest of a panel: task id -> SHA-256 of question and answer."""
    return manifests.manifest_of(split, {entry.id: entry.sha256 for entry in panel}, key="problems")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.tool_math.manifest", description=__doc__)
    parser.add_argument("split", choices=SPLITS)
    for name in Source._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", default=Source._field_defaults[name], help="as the option")
    return manifests.run_command(parser, arguments, _manifest, key="problems")


def _manifest(given: argparse.Namespace) -> Mapping[str, Any]:
    source = Source(**{name: getattr(given, name) for name in Source._fields})
    return manifest_of(given.split, entries(given.split, source))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
