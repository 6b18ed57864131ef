"""What every metric means, in the words of the module that makes it: its METRICS, name -> one sentence.

A part in braces stands for any text: `rollout/stop_{reason}`.
"""

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from spear_rl.errors import ConfigError

_TERMS = ("policy/", "replay/")
SOURCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("train.step", ("",)),
    ("train.loop", ("",)),
    ("engines.base", _TERMS),
    ("functional.losses", _TERMS),
    ("replay.buffer", ("",)),
    ("algorithms.base", ("",)),
    ("train.evaluate", ("",)),
    ("train.cold_start", ("",)),
    ("envs.webshop.env", ("rollout/",)),
)
"""Module of spear_rl with METRICS, and what stands before each of its names in a run."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A metric or a pattern of metrics."""

    name: str
    meaning: str
    module: str

    def is_of(self, metric: str) -> bool:
        parts = (re.escape(part) for part in re.split(r"\{\w+\}", self.name))
        return re.fullmatch(".+".join(parts), metric, re.DOTALL) is not None


def explained_metrics() -> list[Explained]:
    """All that a run can write, in the order of SOURCES."""
    return list(_explained())


def _explained() -> Iterator[Explained]:
    for module, prefixes in SOURCES:
        meanings = importlib.import_module(f"spear_rl.{module}").METRICS
        for prefix in prefixes:
            for name, meaning in meanings.items():
                yield Explained(f"{prefix}{name}", meaning, module)


def metrics_text(wanted: str = "") -> str:
    """One line per metric under the module that makes it; `wanted` is a part of the names to show, or a whole name."""
    known = explained_metrics()
    found = [entry for entry in known if wanted in entry.name]
    if not found:  # perhaps one that only a pattern has, e.g. rollout/stop_done
        found = [entry for entry in known if entry.is_of(wanted)][:1]
    if not found:
        raise ConfigError(f"no metric has {wanted!r} in its name: `spear show metrics` lists all")
    width, lines = max(len(entry.name) for entry in found), list[str]()
    for module in dict.fromkeys(entry.module for entry in found):
        lines += ["", f"of spear_rl.{module}:"]
        lines += [f"  {entry.name:{width}s}  {entry.meaning}" for entry in found if entry.module == module]
    return "\n".join(lines[1:])
