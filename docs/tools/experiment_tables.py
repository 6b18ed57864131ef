"""Tables of the docs from the results of `spear experiment`, whose values per seed are kept beside the plans.

    python docs/tools/experiment_tables.py keep OUT/results.json experiments/results/NAME.csv
    python docs/tools/experiment_tables.py print experiments/results/NAME.csv [ARM ...]
    python docs/tools/experiment_tables.py changes experiments/results/NAME.csv REFERENCE

`print` writes two tables of differences to the arm `base` in points: by task and base algorithm, with a 95 % t-interval
over the seeds; and by task, with one over the seeds' means of all base algorithms. `changes` writes the differences of
all arms to REFERENCE: by task, with such an interval, and the mean of all pairs with its standard error. A test
compares the pages with them.
"""

import csv
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, stdev

from spear_rl.app.compare.estimates import over_seeds

COLUMNS = ["task", "base", "arm", "seed", "eval_mean", "eval_final"]


def kept(results: Path) -> Iterator[list[object]]:
    """Rows of COLUMNS, of every cell that has a result; `base` is empty where a plan has one base algorithm."""
    for block in json.loads(results.read_text("utf-8"))["blocks"]:
        task, _, base = block["block"].partition(" / ")
        for arm in block["arms"]:
            measures = [arm["measures"][name]["by_seed"] for name in COLUMNS[4:]]
            for seed in arm["seeds"]:
                yield [task, base, arm["arm"], seed, *(round(own[str(seed)], 4) for own in measures)]


class Cells:
    """The kept rows of an experiment."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.values = {(r["task"], r["base"], r["arm"], int(r["seed"])): float(r["eval_mean"]) for r in rows}
        names = ("task", "base", "arm")
        self.tasks, self.bases, self.arms = (list(dict.fromkeys(row[name] for row in rows)) for name in names)

    def differences(self, task: str, base: str, arm: str, reference: str = "base") -> dict[int, float]:
        """Seed -> arm minus reference in points, of the seeds that have both."""
        found = {}
        for (*cell, seed), value in self.values.items():
            other = self.values.get((task, base, reference, seed))
            if cell == [task, base, arm] and other is not None:
                found[seed] = 100 * (value - other)
        return found

    def by_seed(self, task: str, arm: str) -> list[float]:
        """The means over the base algorithms, of the seeds that all of them have."""
        each = [self.differences(task, base, arm) for base in self.bases]
        return [fmean(own[seed] for own in each) for seed in each[0] if all(seed in own for own in each)]

    def base_mean(self, task: str) -> float:
        return fmean(value for (own, _, arm, _), value in self.values.items() if (own, arm) == (task, "base"))


def interval(values: list[float]) -> str:
    """Mean and 95 % t-interval; bold where it is above zero."""
    if len(values) < 3:
        return "-"
    found = over_seeds(values)
    text = f"{found.value:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
    return f"**{text}**" if found.low > 0 else text


def tables(cells: Cells, arms: Iterable[str]) -> Iterator[str]:
    """Lines of Markdown."""
    for arm in arms:
        yield f"| {arm} - base | {' | '.join(cells.bases)} |"
        yield "|---" * (1 + len(cells.bases)) + "|"
        for task in cells.tasks:
            own = [interval(list(cells.differences(task, base, arm).values())) for base in cells.bases]
            yield f"| `{task}` | {' | '.join(own)} |"
        yield ""
        yield f"| task | base | {arm} |"
        yield "|---|---|---|"
        for task in cells.tasks:
            yield f"| `{task}` | {cells.base_mean(task):.3f} | {interval(cells.by_seed(task, arm))} |"
        yield ""


def changes(cells: Cells, reference: str) -> Iterator[str]:
    """Lines of Markdown, for a plan with one base algorithm."""
    yield f"| changed | {' | '.join(f'`{task}`' for task in cells.tasks)} | mean |"
    yield "|---" * (2 + len(cells.tasks)) + "|"
    for arm in cells.arms:
        if arm == reference:
            continue
        each = [list(cells.differences(task, "", arm, reference).values()) for task in cells.tasks]
        pairs = [value for own in each for value in own]
        mean = f"{fmean(pairs):+.1f} ({stdev(pairs) / math.sqrt(len(pairs)):.1f})"
        yield f"| {arm} | {' | '.join(map(interval, each))} | {mean} |"


def main() -> None:
    what, path, *others = sys.argv[1:]
    if what == "keep":
        with Path(others[0]).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *kept(Path(path))])
    elif what == "changes":
        print("\n".join(changes(Cells(Path(path)), *others)))
    else:
        print("\n".join(tables(Cells(Path(path)), others or ["ours"])))


if __name__ == "__main__":
    main()
