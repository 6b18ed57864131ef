"""Manifests: the content hash of every task of a panel. Equal manifests mean that two machines play the same tasks."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spear_rl.errors import UserError
from spear_rl.io.escaping import visible


def manifest_of(split: str, hashes: Mapping[str, str], *, key: str) -> dict[str, Any]:
    """The manifest of a panel of task id -> content hash, stored under `key`, with one hash of all lines `id hash`."""
    hashes = dict(sorted(hashes.items()))
    lines = "".join(f"{name} {content}\n" for name, content in hashes.items())
    return {"split": split, "sha256": hashlib.sha256(lines.encode()).hexdigest(), key: hashes}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One line per task that differs between two panels of id -> content hash."""
    lines = [f"{name}: only here" for name in here.keys() - there.keys()]
    lines += [f"{name}: missing here" for name in there.keys() - here.keys()]
    lines += [f"{name}: another content" for name in here.keys() & there.keys() if here[name] != there[name]]
    return sorted(lines)


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    manifest: Callable[[argparse.Namespace], Mapping[str, Any]],
    *,
    key: str,
) -> int:
    """Print the manifest for the parsed arguments or, with --verify FILE, its differences from the one in the file."""
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = parser.parse_args(arguments)
    try:
        mine = manifest(given)
        other = json.loads(Path(given.verify).read_text(encoding="utf-8")) if given.verify else mine
        found = differences(mine[key], other[key])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        print(visible(f"error: {type(error).__name__}: {error}"), file=sys.stderr)
        return 2
    if not given.verify:
        print(json.dumps(mine, indent=1))
        return 0
    print(visible("\n".join(found)) or f"the same {len(mine[key])} {key}, {mine['sha256']}")
    return 1 if found else 0
