"""Checks that raise one sentence: the framework's version, the names that we use of it, the losses it can express."""

from collections.abc import Iterable, Mapping
from importlib import metadata
from pydoc import ErrorDuringImport, locate
from typing import Any

from spear_rl.algorithms import ClippedSurrogate
from spear_rl.algorithms.wrapping import label
from spear_rl.errors import ConfigError, MissingExtraError


def require_version(package: str, least: tuple[int, ...], below: tuple[int, ...]) -> str:
    """The installed version, if it is within these bounds; our extra has the package's name."""
    version = next((found.version for found in metadata.distributions(name=package)), None)
    if version is None:
        raise MissingExtraError(f"{package} is not installed: pip install 'spear-rl[{package}]'")
    if not least <= tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < below:
        low, high = (".".join(map(str, bound)) for bound in (least, below))
        raise ConfigError(f"{package} {version} is not supported: pip install '{package}>={low},<{high}'")
    return version


def require_names(package: str, names: Iterable[str]) -> None:
    """Raise if one of these dotted names does not exist."""
    if missing := [name for name in names if not _exists(name)]:
        version = metadata.version(package)
        raise ConfigError(f"{package} {version} has no {', '.join(missing)}: pip install 'spear-rl[{package}]'")


def _exists(name: str) -> bool:
    try:
        return locate(name) is not None
    except ErrorDuringImport:
        return False


def require_surrogate(loss: Any, reductions: Mapping[Any, str], *, setting: str, framework: str) -> ClippedSurrogate:
    """The loss, if it is a ClippedSurrogate with one of the framework's reductions."""
    if isinstance(loss, ClippedSurrogate) and type(loss.reduction) in reductions:
        return loss
    known = ", ".join(kind.__name__ for kind in reductions)
    raise ConfigError(f"{setting}: {framework} needs a ClippedSurrogate reduced by {known}, not {label(loss)}")
