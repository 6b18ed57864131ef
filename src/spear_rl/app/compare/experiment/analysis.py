"""The results of blocks of arms: means over seeds with intervals, paired differences, a summary over blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from spear_rl.app.compare.arms import Arm
from spear_rl.app.compare.estimates import Estimate, over_seeds
from spear_rl.app.compare.experiment.measures import COSTS, MEASURES, TOTALS, evaluations
from spear_rl.app.compare.pairs import conclusion, paired, points
from spear_rl.io.jsonl import spans


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds with its 95 % t-interval, which one seed alone does not have."""

    value: float
    low: float | None
    high: float | None
    by_seed: dict[int, float]


def mean_of(by_seed: Mapping[int, float]) -> Mean | None:
    """None without any value."""
    if not by_seed:
        return None
    if len(by_seed) == 1:
        return Mean(fmean(by_seed.values()), None, None, dict(by_seed))
    found = over_seeds(list(by_seed.values()))
    return Mean(found.value, found.low, found.high, dict(by_seed))


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm minus the reference in one measure, paired by seed."""

    arm: str
    reference: str
    measure: str
    by_seed: dict[int, float]
    estimate: Estimate | None
    """None with fewer than two seeds in common."""

    @property
    def text(self) -> str:
        if self.estimate:
            return points(self.estimate)
        return f"{100 * fmean(self.by_seed.values()):+.1f} points (one seed)" if self.by_seed else "-"

    @property
    def shown(self) -> str:
        """What it shows, in words."""
        return conclusion(self.estimate) if self.estimate else "too few seeds in common for an interval"

    @property
    def value(self) -> float | None:
        return fmean(self.by_seed.values()) if self.by_seed else None


@dataclass(frozen=True)
class Block:
    """Arms that ran under the same circumstances."""

    label: str
    arms: list[Arm]
    """Only arms with at least one finished run."""
    reference: str
    measures: list[str]
    """The primary one first."""

    @cached_property
    def table(self) -> dict[str, dict[str, Mean | None]]:
        """Arm -> measure or cost -> its mean."""
        kinds = {name: MEASURES[name] for name in self.measures} | {name: kind for name, (kind, _) in COSTS.items()}
        return {arm.label: {name: mean_of(arm.by_seed(kind)) for name, kind in kinds.items()} for arm in self.arms}

    @cached_property
    def differences(self) -> list[Difference]:
        """Of every arm but the reference, in every measure."""
        base = next((arm for arm in self.arms if arm.label == self.reference), None)
        if base is None:
            return []
        return [_difference(arm, base, measure) for arm in self.arms if arm is not base for measure in self.measures]

    def difference(self, arm: str, measure: str) -> Difference | None:
        return next((d for d in self.differences if (d.arm, d.measure) == (arm, measure)), None)

    def as_dict(self) -> dict[str, Any]:
        arms = [
            {"arm": arm.label, "seeds": arm.seeds}
            | {"runs": [{"path": str(run.path), "seed": run.seed, "algorithm": run.algorithm} for run in arm.runs]}
            | {"measures": {name: mean and asdict(mean) for name, mean in self.table[arm.label].items()}}
            for arm in self.arms
        ]
        return {"block": self.label, "reference": self.reference, "arms": arms} | {
            "differences": [asdict(d) | {"value": d.value, "shown": d.shown} for d in self.differences]
        }


def _difference(arm: Arm, base: Arm, measure: str) -> Difference:
    by_seed = paired(arm.by_seed(MEASURES[measure]), base.by_seed(MEASURES[measure]))
    estimate = over_seeds(list(by_seed.values())) if len(by_seed) > 1 else None
    return Difference(arm.label, base.label, measure, by_seed, estimate)


@dataclass(frozen=True, slots=True)
class Summary:
    """An arm against the reference over all blocks, in the primary measure."""

    arm: str
    reference: str
    measure: str
    blocks: int
    """Blocks in which both arms have this measure on at least one common seed."""
    planned: int
    """Blocks of the plan."""
    above: int
    """Blocks in which the 95 % interval of the paired difference lies above zero."""
    below: int
    without: int
    """Blocks without an interval: both arms share a single seed there."""
    mean: float
    """Of the blocks' differences."""
    worst: float
    worst_block: str

    @property
    def text(self) -> str:
        where = f" (in {self.worst_block})" if self.blocks > 1 and self.worst_block else ""
        blocks = f"{self.blocks} block{'s' * (self.blocks != 1)}"
        planned = f" (of {self.planned} planned)" if self.planned > self.blocks else ""
        without = f", {self.without} without an interval" if self.without else ""
        return (
            f"{self.arm} beats {self.reference} in {self.above} of {blocks}{planned} with an interval above zero, and "
            f"is below it in {self.below} with one below zero{without}; mean difference {100 * self.mean:+.1f} points, "
            f"worst {100 * self.worst:+.1f} points{where}"
        )


def summaries(blocks: Sequence[Block], measure: str, planned: int) -> list[Summary]:
    """One per arm that has a difference to a reference of the same name; `planned` blocks may have no runs yet."""
    found: dict[tuple[str, str], list[tuple[str, Difference]]] = {}
    for block in blocks:
        for difference in block.differences:
            if difference.measure == measure and difference.by_seed:
                found.setdefault((difference.arm, difference.reference), []).append((block.label, difference))
    return [_summary(arm, base, measure, entries, planned) for (arm, base), entries in found.items()]


def missing(blocks: Sequence[Block], measure: str) -> str:
    """Why no arm can be compared with the reference."""
    arms = [(block, arm) for block in blocks for arm in block.arms]
    measured = [(block, arm) for block, arm in arms if arm.by_seed(MEASURES[measure])]
    for found, what in ((arms, "finished run"), (measured, f"run with {measure}")):
        are_references = {arm.label == block.reference for block, arm in found}
        if not found:
            return f"there is no {what}"
        if True not in are_references:
            return f"the reference {blocks[0].reference} has no {what}"
        if False not in are_references:
            return f"no arm but the reference {blocks[0].reference} has a {what}"
    return "no arm has a seed in common with the reference"


def _summary(
    arm: str, reference: str, measure: str, entries: Sequence[tuple[str, Difference]], planned: int
) -> Summary:
    values = {label: fmean(difference.by_seed.values()) for label, difference in entries}
    worst = min(values, key=lambda label: values[label])
    # Seeds that all differ by the same amount have an interval without a width, which shows nothing.
    shown = [conclusion(difference.estimate) for _, difference in entries if difference.estimate]
    above, below = shown.count("higher"), shown.count("lower")
    mean, without = fmean(values.values()), len(entries) - len(shown)
    return Summary(arm, reference, measure, len(entries), planned, above, below, without, mean, values[worst], worst)


def lacking(blocks: Sequence[Block]) -> Iterator[str]:
    """A sentence for each finished run that is left out of a measure, total or curve because a file lost something."""
    for block in blocks:
        runs = [run for arm in block.arms for run in arm.runs]
        kinds = {name: MEASURES[name] for name in block.measures} | {name: COSTS[name][0] for name in TOTALS}
        known = {name: kind for name, kind in kinds.items() if any(kind(run) is not None for run in runs)}
        for run in runs:
            if not run.is_whole:
                yield f"{run.path} is {run.note}: it is left out of totals and of the curves of success"
            if (done := evaluations(run)) and run.taken not in done:
                last = f"eval.jsonl has none after step {max(done)} of {run.taken}"
                yield f"{run.path} is without its last evaluation ({last}): it has no eval_mean and no eval_final"
            elif run.is_whole and (lost := [name for name, kind in known.items() if kind(run) is None]):
                yield f"{run.path} has no {' and no '.join(lost)}: it is left out of their means"


def unlike_evaluations(blocks: Sequence[Block]) -> Iterator[str]:
    """Arms that were not evaluated at the same steps, or not on the same tasks, as the reference with the same seed."""
    for block in blocks:
        where = f"{block.label}: " if len(blocks) > 1 else ""
        base = next((arm for arm in block.arms if arm.label == block.reference), None)
        for arm in block.arms if base else ():
            assert base
            pairs = [(run, other) for run in arm.runs for other in base.of_seed(run.seed)]
            odd = [(run, its) for run, its in pairs if evaluations(run).keys() != evaluations(its).keys()]
            if odd:
                mine, its = (spans(sorted(evaluations(run))) or "none" for run in odd[0])
                steps = f"at steps {mine} in {arm.label} and {its} in {base.label} with seed {odd[0][0].seed}"
                yield f"{where}not evaluated alike: {steps} (eval.every), so eval_mean is over other steps"
            if any(run.solved and its.solved and run.solved.keys() != its.solved.keys() for run, its in pairs):
                yield f"{where}not evaluated alike: {arm.label} and {base.label} played other tasks at the end"


def notes_on(blocks: Sequence[Block]) -> Iterator[str]:
    """What the counts of real runs say about whether arms are like for like."""
    for column in ("optimizer steps", "episodes", "success before"):
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for block in blocks:
            base = block.table.get(block.reference, {}).get(column)
            for arm in block.arms:
                mine = block.table[arm.label][column]
                if mine and base and any(abs(shift) > 1e-9 for shift in paired(mine.by_seed, base.by_seed).values()):
                    found.setdefault((arm.label, block.reference), []).append((mine.value, base.value))
        for (arm_label, reference), values in found.items():
            where = f" (in {len(values)} of {len(blocks)} blocks)" if len(blocks) > 1 else ""
            yield _unlike(arm_label, reference, column, values) + where
    num = sum(d.estimate is not None for block in blocks for d in block.differences)
    if num > 1:
        yield f"each of the {num} intervals of a difference is a 95 % one, not corrected for there being several"


def _unlike(arm: str, reference: str, column: str, values: Sequence[tuple[float, float]]) -> str:
    if column == "success before":
        return f"{arm} begins RL with another success than {reference} on some seed"
    factors = sorted(mine / base if base else math.inf for mine, base in values)
    low, high = f"{factors[0]:.2f}", f"{factors[-1]:.2f}"
    return f"{arm} took {low if low == high else f'{low} to {high}'} times as many {column} as {reference}"
