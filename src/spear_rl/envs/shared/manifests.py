"""Manifests: the content hash of every task of a panel. Equal manifests mean that two machines play the same tasks."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spear_rl.errors import UserError
from spear_rl.io.escaping import visible


def contents_sha256(contents: Mapping[str, str]) -> str:
    """One hash of all lines `id content`, in their order."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in contents.items()).encode()).hexdigest()


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """One line per task that differs between two panels of id -> content."""
    lines = [f"{name}: only here" for name in here.keys() - there.keys()]
    lines += [f"{name}: missing here" for name in there.keys() - here.keys()]
    lines += [f"{name}: another content" for name in here.keys() & there.keys() if here[name] != there[name]]
    return sorted(lines)


def printed_or_verified(manifest: Callable[[], Mapping[str, Any]], verify: str | None, *, tasks: str) -> int:
    """Print a manifest, or its differences from the one in the file `verify`; `tasks` is the key of its tasks."""
    try:
        mine = manifest()
        other = json.loads(Path(verify).read_text(encoding="utf-8")) if verify else mine
        found = differences(mine[tasks], other[tasks])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        print(visible(f"error: {type(error).__name__}: {error}"), file=sys.stderr)
        return 2
    if not verify:
        print(json.dumps(mine, indent=1))
        return 0
    print(visible("\n".join(found)) or f"the same {len(mine[tasks])} {tasks}, {mine['sha256']}")
    return 1 if found else 0
