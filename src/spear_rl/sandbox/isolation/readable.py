"""Which files the untrusted code may read: the standard library and the packages loaded for it, nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
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
"""Loaded beforehand: the usual ones for speed, those with a shared library because it cannot be opened later."""

LAZY = {"numpy": ("numpy.random", "numpy.linalg", "numpy.fft", "numpy.polynomial", "numpy.ma")}
"""What a package would load at first use, in every child anew."""

OTHERS_PACKAGES = ("site-packages", "dist-packages")
DEVICES = {"/dev/null": True, "/dev/zero": False, "/dev/urandom": False}
"""path -> whether it may be written to. Not /dev/random: before Linux 5.6 any process can drain its pool."""


def preloaded(packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Import what untrusted code will want: (folders and files of the packages, packages that are not installed)."""
    before = set(sys.modules)
    missing: list[str] = []
    for name in STANDARD:
        try:
            import_module(name)
        except ImportError:  # a Python built without it
            continue
    standard = set(sys.modules)
    for name in packages:
        try:
            for each in (name, *LAZY.get(name, ())):
                import_module(each)
        except ModuleNotFoundError as error:
            missing.append(f"{name} ({error})")
    loaded = {name.partition(".")[0] for name in set(sys.modules) - standard - before} - sys.stdlib_module_names
    return sorted({path for name in loaded for path in _paths(name)}), missing


def standard_rules(folders: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """(path, whether it is only listed) of the standard library, less other people's packages that lie inside it."""
    for folder in folders:
        if not os.path.isdir(folder):
            if os.path.exists(folder):
                yield folder, False
            continue
        yield folder, True
        for entry in os.scandir(folder):
            if entry.name not in OTHERS_PACKAGES and os.path.exists(entry.path):
                yield entry.path, False


def _paths(name: str) -> Iterator[str]:
    """Where a loaded top-level module lies, with the shared libraries that wheels put beside it."""
    module = sys.modules.get(name)
    file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
    for path in [*folders] if folders is not None else [file] if file else []:
        if os.path.exists(path):
            yield os.path.abspath(path)
            libraries = Path(path).parent / f"{name}.libs"
            if libraries.is_dir():
                yield os.path.abspath(libraries)
