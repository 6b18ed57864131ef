"""Whether a framework that we extend is installed, in a version we know, with every name that we hook into."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pydoc import ErrorDuringImport, locate

from spear_rl.errors import ConfigError, MissingExtraError


def require_version(package: str, least: tuple[int, ...], below: tuple[int, ...]) -> str:
    """The installed version, if it is one of these; the extra has the package's name."""
    version = next((found.version for found in metadata.distributions(name=package)), None)
    if version is None:
        raise MissingExtraError(f"{package} is not installed: pip install 'spear-rl[{package}]'")
    if not least <= tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < below:
        low, high = (".".join(map(str, bound)) for bound in (least, below))
        raise ConfigError(f"{package} {version} is not supported: pip install '{package}>={low},<{high}'")
    return version


def require_names(package: str, names: Iterable[str]) -> None:
    """Refuse to start if one of these dotted names is gone."""
    if missing := [name for name in names if not _is_there(name)]:
        version = metadata.version(package)
        raise ConfigError(f"{package} {version} has no {', '.join(missing)}: pip install 'spear-rl[{package}]'")


def _is_there(name: str) -> bool:
    try:
        return locate(name) is not None
    except ErrorDuringImport:
        return False
