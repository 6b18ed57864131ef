"""The files that untrusted code may read: the standard library and the packages loaded for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

STANDARD = (
    *("array", "ast", "base64", "bisect", "bz2", "calendar", "cmath", "collections", "contextlib", "copy", "csv"),
    *("ctypes", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq"),
    *("inspect", "io", "itertools", "json", "linecache", "lzma", "math", "numbers", "operator", "pathlib", "pickle"),
    *("pprint", "queue", "random", "re", "secrets", "shutil", "signal", "sqlite3", "statistics", "string", "struct"),
    *("subprocess", "tempfile", "textwrap", "threading", "time", "timeit", "traceback", "typing", "unicodedata"),
    *("unittest", "uuid", "warnings", "zlib", "zoneinfo"),
)
"""Imported beforehand: for speed, and because a shared library cannot be opened later."""

LAZY = {"numpy": ("numpy.random", "numpy.linalg", "numpy.fft", "numpy.polynomial", "numpy.ma")}
"""Submodules that every child would otherwise import at first use."""

OTHERS_PACKAGES = ("site-packages", "dist-packages")
DEVICES = {"/dev/null": True, "/dev/zero": False, "/dev/urandom": False}
"""path -> whether it is writable. Not /dev/random: before Linux 5.6 any process can drain its pool."""


def preloaded(packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Import the packages: (their directories and files, packages that are not installed)."""
    missing = []
    for name in STANDARD:
        with suppress(ImportError):  # a Python built without it
            import_module(name)
    standard = set(sys.modules)
    for name in packages:
        try:
            for each in (name, *LAZY.get(name, ())):
                import_module(each)
        except ModuleNotFoundError as error:
            missing.append(f"{name} ({error})")
    loaded = {name.partition(".")[0] for name in set(sys.modules) - standard} - sys.stdlib_module_names
    return sorted({path for name in loaded for path in _paths(name)}), missing


def _paths(name: str) -> Iterator[str]:
    """The location of a loaded top-level module, and of the shared libraries that wheels install beside it."""
    module = sys.modules.get(name)
    file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
    for path in [*folders] if folders is not None else [file] if file else []:
        if os.path.exists(path):
            yield os.path.abspath(path)
            libraries = Path(path).parent / f"{name}.libs"
            if libraries.is_dir():
                yield os.path.abspath(libraries)
