"""A shop on disk: products, index, goals and splits, written once and then shared, read-only, by all processes."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from spear_rl.envs.webshop.data.extra import package
from spear_rl.envs.webshop.data.files import DataError, Files, read_entries
from spear_rl.envs.webshop.data.goals import human_goals, shuffled_order, split_of, synthetic_goals
from spear_rl.envs.webshop.data.product import Goal, Product
from spear_rl.envs.webshop.data.reading import product_of, usable
from spear_rl.envs.webshop.generated.catalogue import SEED, Entry, generated_entries
from spear_rl.envs.webshop.generated.tiny import tiny_entries
from spear_rl.envs.webshop.search import Index, write_index
from spear_rl.io.cache import cache_folder, store, stored

FORMAT = 1
"""To be raised whenever a folder's content changes in shape or meaning, the generator's words included."""

NUM_RESULTS = 50


@dataclass(frozen=True, slots=True)
class Source:
    """What a shop is made from: all of it, so that two equal sources are the same shop everywhere."""

    level: Literal["standard", "tiny", "files"] = "standard"
    num_products: int = 0
    """Of a generated catalogue, or the first so many of the files; 0 is all of them."""
    goals: Literal["human", "synthetic"] = "human"
    seed: int = SEED
    files: Files | None = None
    """Of the level `files`."""

    def entries(self) -> Iterator[Entry]:
        if self.files is not None:
            return read_entries(self.files, num_products=self.num_products)
        if self.level == "tiny":
            return tiny_entries(self.num_products, seed=self.seed)
        return generated_entries(self.num_products, seed=self.seed)

    def key(self) -> str:
        """A name for the shop on this machine: files are told apart by place, size and time."""
        files = [_fingerprint(path) for path in self.files if path] if self.files else None
        fields = asdict(self) | {"files": files, "format": FORMAT}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:24]


class Rows:
    """Lines of JSON in a file, read one by one where they are needed."""

    def __init__(self, path: Path) -> None:
        numpy = package("numpy")
        self._ends: Any = numpy.load(path.with_suffix(".npy"), mmap_mode="r")
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(self._ends) else b""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> Any:
        start = int(self._ends[number - 1]) if number else 0
        return json.loads(self._bytes[start : int(self._ends[number])])


class Shop:
    """A catalogue, its search and its goals."""

    def __init__(self, folder: Path) -> None:
        self._products, self._goals = Rows(folder / "products.jsonl"), Rows(folder / "goals.jsonl")
        self._index = Index.opened(folder)
        numpy = package("numpy")
        self._splits = {
            name: numpy.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "validation", "test")
        }
        # As many as a busy process looks at again and again; a large catalogue stays on disk.
        self.product = lru_cache(maxsize=8192)(self._product)
        self.results = lru_cache(maxsize=2048)(self._results)

    @property
    def num_products(self) -> int:
        return len(self._products)

    def _product(self, number: int) -> Product:
        return Product.from_dict(self._products[number])

    def _results(self, query: str) -> tuple[int, ...]:
        """The numbers of the best products for a query, best first."""
        return tuple(self._index.best(query, NUM_RESULTS))

    def goal(self, number: int) -> Goal:
        return Goal.from_dict(self._goals[number])

    def split(self, name: str) -> Any:
        """The numbers of a split's goals, in order."""
        return self._splits[name]


def opened_shop(source: Source, cache: str = "") -> Shop:
    """The shop of a source: from the cache if it is there and whole, else made anew and kept."""
    return _opened(source, cache_folder(cache) / "webshop" / f"{FORMAT}-{source.key()}")


@lru_cache(maxsize=8)
def _opened(source: Source, folder: Path) -> Shop:
    if _is_whole(folder):
        return Shop(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
    except OSError:  # the cache is for speed only: a folder that cannot be written costs time and nothing else
        made = Path(tempfile.mkdtemp(prefix="spear-webshop-"))
    # What is not moved into its place, for whatever reason, goes with this process.
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    write_shop(source, made)
    if folder.exists() and not _is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another process was faster, with the same content
        os.rename(made, folder)
    return Shop(folder if _is_whole(folder) else made)


def write_shop(source: Source, folder: Path) -> None:
    """Make a shop in a folder; its last file says that it is whole."""
    numpy = package("numpy")
    make = human_goals if source.goals == "human" else synthetic_goals
    keys: list[tuple[int, ...]] = []

    def goals_of(entry: Entry, product: Product, number: int) -> Iterator[dict[str, Any]]:
        for goal in make(entry, product, number, seed=source.seed):
            digests = (hashlib.sha256(repr(key).encode("utf-8", "replace")).digest() for key in goal.keys)
            keys.append(tuple(int.from_bytes(digest[:8], "big") for digest in digests))
            yield goal.as_dict()

    def texts() -> Iterator[str]:
        with _RowWriter(folder / "products.jsonl") as products, _RowWriter(folder / "goals.jsonl") as goals:
            for number, entry in enumerate(usable(source.entries())):
                product = product_of(entry, seed=source.seed)
                products.write(product.as_dict())
                for goal in goals_of(entry, product, number):
                    goals.write(goal)
                yield product.indexed_text

    write_index(texts(), folder)
    if not keys:
        raise DataError(f"there is no {source.goals} goal in the catalogue: its products ask for nothing")
    splits = split_of(shuffled_order(len(keys), seed=source.seed), keys)
    for name, numbers in splits.items():
        numpy.save(folder / f"{name}.npy", numpy.array(numbers, dtype="int64"))
    store(folder / "whole.json", {path.name: path.stat().st_size for path in sorted(folder.iterdir())})


class _RowWriter:
    """Writes lines of JSON, and in a file beside them where each ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._ends = path, [0]

    def __enter__(self) -> _RowWriter:
        self._file = open(self._path, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        numpy = package("numpy")
        numpy.save(self._path.with_suffix(".npy"), numpy.array(self._ends[1:], dtype="int64"))

    def write(self, value: object) -> None:
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))


def _is_whole(folder: Path) -> bool:
    sizes = stored(folder / "whole.json") or {}
    try:
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def _fingerprint(path: str) -> list[object]:
    status = os.stat(path)
    return [os.path.realpath(path), status.st_size, status.st_mtime_ns]


def panel_hash(goals: Iterable[Goal]) -> str:
    """One hash for what all goals of a panel ask for, in order."""
    lines = (json.dumps(goal.as_dict(), sort_keys=True) for goal in goals)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
