"""Imports of the optional packages in the extra `webshop`."""

from importlib import import_module
from typing import Any

from spear_rl.errors import MissingExtraError


def package(name: str) -> Any:
    """The module `name`; MissingExtraError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"webshop needs {error.name}: pip install 'spear-rl[webshop]'") from error
