"""Whether a framework is installed in a supported version, with every name that we override or call."""

from collections.abc import Iterable
from importlib import metadata
from pydoc import ErrorDuringImport, locate

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
