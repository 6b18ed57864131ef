"""`python -m spear_rl.envs.sokoban` writes down the panels of the named levels; with --check it only compares them."""

from __future__ import annotations

import sys

from spear_rl.envs.shared.manifests import written_or_checked
from spear_rl.envs.sokoban.panel import MANIFEST, rebuilt_manifest, recorded_manifest


def main(arguments: list[str]) -> int:
    """Writes the manifest; with --check only says whether it is as it should be."""
    return written_or_checked(arguments, rebuilt_manifest(), recorded_manifest, MANIFEST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
