"""Differences between arms, paired by seed and by task, and what they show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from spear_rl.app.compare.arms import Arm
from spear_rl.app.compare.estimates import NO_WIDTH, Estimate, over_seeds, over_tasks, sign_test
from spear_rl.app.compare.runs import RunRecord


@dataclass(frozen=True, slots=True)
class Pair:
    """`arm` minus `base` over the seeds both have."""

    arm: str
    base: str
    seeds: list[int]
    """With a success after in both."""
    difference: Estimate | None
    """Of success after, over seeds; None with fewer than two."""
    per_task: Estimate | None
    """Of success after, over the tasks both were evaluated on."""
    better: int
    """Tasks `arm` solves more often."""
    worse: int
    sign_test_p: float | None

    @property
    def text(self) -> str:
        if not self.seeds:
            over_seeds = "no seed with a success after in both, so nothing can be paired."
        elif self.difference is None:
            over_seeds = "1 seed in common, too few to say anything about the algorithms."
        else:
            shift, count = points(self.difference), len(self.seeds)
            shown = conclusion(self.difference)
            over_seeds = f"success after {shift} over {count} seeds in common (95 % t-interval): {shown}."
        said = f"{self.arm} minus {self.base}: {over_seeds}"
        if self.per_task is None or self.sign_test_p is None:
            return said
        return (
            f"{said} Task by task: {points(self.per_task)} over the tasks both played, "
            f"{self.better} better, {self.worse} worse, sign test p = {self.sign_test_p:.2g}; "
            "this holds for these trained policies, not for training in general."
        )


def pairs_of(arms: Sequence[Arm]) -> list[Pair]:
    """Arms of one base algorithm with each other, so spear-x with x; one without a partner with the first."""
    pairs = [(arm, base) for base, arm in combinations(arms, 2) if arm.base_algorithm == base.base_algorithm]
    partnered = {arm.label for pair in pairs for arm in pair}
    first = next((arm for arm in arms if arm.label in partnered), arms[0])
    pairs += [(arm, first) for arm in arms if arm is not first and arm.label not in partnered]
    return [_pair(arm, base) for arm, base in pairs]


def paired(mine: Mapping[int, float], its: Mapping[int, float]) -> dict[int, float]:
    """Seed -> difference, of the seeds that both have."""
    return {seed: mine[seed] - its[seed] for seed in sorted(mine.keys() & its.keys())}


def _pair(arm: Arm, base: Arm) -> Pair:
    by_seed = paired(arm.after_by_seed, base.after_by_seed)
    seeds = list(by_seed)
    tasks: dict[str, list[float]] = {}
    for seed in seeds:
        own, other = _solved(arm.of_seed(seed)), _solved(base.of_seed(seed))
        for task in sorted(own.keys() & other.keys()):
            tasks.setdefault(task, []).append(own[task] - other[task])
    differences = [fmean(values) for values in tasks.values()]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Pair(
        arm=arm.label,
        base=base.label,
        seeds=seeds,
        difference=over_seeds(list(by_seed.values())) if len(seeds) > 1 else None,
        per_task=over_tasks(differences) if differences else None,
        better=better,
        worse=worse,
        sign_test_p=sign_test(better, worse) if differences else None,
    )


def _solved(runs: Sequence[RunRecord]) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for run in runs:
        for task, share in run.solved.items():
            shares.setdefault(task, []).append(share)
    return {task: fmean(values) for task, values in shares.items()}


def conclusion(d: Estimate) -> str:
    """What an interval of a difference shows."""
    if d.high - d.low < NO_WIDTH:
        return "all seeds differ by the same amount, so this interval says nothing"
    if d.low <= 0 <= d.high:
        return "no difference shown"
    return "higher" if d.low > 0 else "lower"


def points(d: Estimate) -> str:
    """A difference of shares with its interval, in percentage points."""
    return f"{100 * d.value:+.1f} points ({100 * d.low:+.1f} to {100 * d.high:+.1f})"
