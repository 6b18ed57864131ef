"""`python -m spear_rl.envs.sokoban` writes down the panels of the named levels; with --check it only compares them."""

from __future__ import annotations

import json
import sys

from spear_rl.envs.sokoban.panel import MANIFEST, rebuilt_manifest, recorded_manifest


def main(arguments: list[str]) -> int:
    """Writes the manifest; with --check only says whether it is as it should be."""
    rebuilt = rebuilt_manifest()
    if "--check" in arguments:
        is_current = rebuilt == recorded_manifest()
        print("the manifest is up to date" if is_current else "the manifest differs from what the generator gives")
        return 0 if is_current else 1
    MANIFEST.write_text(json.dumps(rebuilt, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
