"""What a result was made with."""

from __future__ import annotations

import platform
from importlib import metadata


def versions(*packages: str) -> dict[str, str]:
    """Ours, Python's and those of `packages`, without importing any."""
    named = {"spear_rl": _version("spear-rl"), "python": platform.python_version()}
    return named | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from source"
