"""A shop on disk: products, search index, goals and splits, written once and shared read-only by all processes."""

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
from typing import Any, BinaryIO, Literal

from spear_rl.envs.webshop.data.entries import DataError, Entry, Files, read_entries, usable
from spear_rl.envs.webshop.data.goals import SPLITS, human_goals, shuffled_order, split_of, synthetic_goals
from spear_rl.envs.webshop.data.optional import package
from spear_rl.envs.webshop.data.product import Goal, Product, as_dict, product_of
from spear_rl.envs.webshop.generated.catalogue import SEED, generated_entries, tiny_entries
from spear_rl.envs.webshop.search import Index, write_index
from spear_rl.io.cache import cache_folder, store, stored

FORMAT = 2  # raise it whenever the content of a folder changes in format or meaning, the generator's included
NUM_RESULTS = 50


@dataclass(frozen=True, slots=True)
class Source:
    """Everything that a shop is made from: equal sources give the same shop on every machine."""

    level: Literal["standard", "tiny", "files"] = "standard"
    num_products: int = 0  # to generate, or to read from the files; 0 is all of the files
    goals: Literal["human", "synthetic"] = "human"
    seed: int = SEED
    files: Files | None = None  # of the level `files`

    def entries(self) -> Iterator[Entry]:
        if self.files is not None:
            return read_entries(self.files, num_products=self.num_products)
        generate = tiny_entries if self.level == "tiny" else generated_entries
        return generate(self.num_products, seed=self.seed)

    def key(self) -> str:
        """The cache key of a shop; for files it includes their paths, sizes and modification times."""
        stats = [(os.path.realpath(path), os.stat(path)) for path in self.files or () if path]
        files = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats] if self.files else None
        fields = asdict(self) | {"files": files, "format": FORMAT}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:24]


class JsonLines:
    """A memory-mapped file of JSON lines, with an array of where each one ends; a line is parsed when it is read."""

    def __init__(self, path: Path) -> None:
        self._ends: Any = package("numpy").load(path.with_suffix(".npy"), mmap_mode="r")
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(self._ends) else b""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> Any:
        start = int(self._ends[number - 1]) if number else 0
        return json.loads(self._bytes[start : int(self._ends[number])])


class Shop:
    """A catalogue, its search index and its goals."""

    def __init__(self, folder: Path) -> None:
        self._products, self._goals = JsonLines(folder / "products.jsonl"), JsonLines(folder / "goals.jsonl")
        self._index = Index(folder)
        self.num_products = len(self._products)
        self._splits = {name: package("numpy").load(folder / f"{name}.npy", mmap_mode="r") for name in SPLITS}
        self.product = lru_cache(maxsize=8192)(lambda number: Product.from_dict(self._products[number]))
        self.results = lru_cache(maxsize=2048)(lambda query: tuple(self._index.best(query, NUM_RESULTS)))

    def goal(self, number: int) -> Goal:
        return Goal.from_dict(self._goals[number])

    def split(self, name: str) -> Any:
        """The numbers of a split's goals, in order: an array on disk."""
        return self._splits[name]


def open_shop(source: Source, cache: str = "") -> Shop:
    """The shop of a source, from the cache if it is there and complete; otherwise it is made and kept there."""
    return _open(source, cache_folder(cache) / "webshop" / f"{FORMAT}-{source.key()}")


@lru_cache(maxsize=8)
def _open(source: Source, folder: Path) -> Shop:
    if _is_complete(folder):
        return Shop(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
    except OSError:  # best effort: without a writable cache the shop is made for this process only
        made = Path(tempfile.mkdtemp(prefix="spear-webshop-"))
    # Removes what is not renamed below.
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    write_shop(source, made)
    if folder.exists() and not _is_complete(folder):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another process was faster, with the same content
        os.rename(made, folder)
    return Shop(folder if _is_complete(folder) else made)


def write_shop(source: Source, folder: Path) -> None:
    """Make a shop in a folder; its last file, whole.json, marks it as complete."""
    make_goals = human_goals if source.goals == "human" else synthetic_goals
    product_ends, goal_ends = list[int](), list[int]()
    keys: list[tuple[int, ...]] = []

    def indexed_texts() -> Iterator[str]:
        with open(folder / "products.jsonl", "wb") as products, open(folder / "goals.jsonl", "wb") as goals:
            for number, entry in enumerate(usable(source.entries())):
                product = product_of(entry, seed=source.seed)
                product_ends.append(_append(products, product))
                for goal in make_goals(entry, product, number, seed=source.seed):
                    goal_ends.append(_append(goals, goal))
                    digests = (hashlib.sha256(repr(key).encode("utf-8", "replace")).digest() for key in goal.keys)
                    keys.append(tuple(int.from_bytes(digest[:8], "big") for digest in digests))
                yield product.indexed_text

    write_index(indexed_texts(), folder)
    if not keys:
        raise DataError(f"there is no {source.goals} goal in the catalogue: its products ask for nothing")
    splits = split_of(shuffled_order(len(keys), seed=source.seed), keys)
    numpy = package("numpy")
    for name, numbers in ({"products": product_ends, "goals": goal_ends} | splits).items():
        numpy.save(folder / f"{name}.npy", numpy.array(numbers, dtype="int64"))
    store(folder / "whole.json", {path.name: path.stat().st_size for path in sorted(folder.iterdir())})


def _append(file: BinaryIO, record: Product | Goal) -> int:
    """Write a record as one line of JSON; returns the position where it ends."""
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=as_dict)
    file.write(line.encode("utf-8", "replace") + b"\n")
    return file.tell()


def _is_complete(folder: Path) -> bool:
    sizes = stored(folder / "whole.json") or {}
    try:
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def panel_hash(goals: Iterable[Goal]) -> str:
    """One hash of all goals in order; the names of their options are part of the instructions."""
    known = ({name: value for name, value in as_dict(goal).items() if name != "option_names"} for goal in goals)
    lines = (json.dumps(fields, sort_keys=True) for fields in known)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
