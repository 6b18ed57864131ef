"""The packages of the extra `webshop`, imported when they are first needed; one sentence says which is missing."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from spear_rl.errors import MissingExtraError


def package(name: str) -> Any:
    """A module of the extra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"webshop needs {error.name}: pip install 'spear-rl[webshop]'") from error


@cache
def fuzz() -> Any:
    """Ratios of texts."""
    return package("rapidfuzz.fuzz")


@cache
def plain() -> Any:
    """Text -> lower case, with spaces for all that is neither letter nor digit, as the original compares texts."""
    return package("rapidfuzz.utils").default_process
