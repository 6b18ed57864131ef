"""Arms: runs that differ in the seed alone; and the differences that make two arms incomparable."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from spear_rl.app.compare.estimates import Estimate, over_seeds
from spear_rl.app.compare.runs import RunRecord

_NO_EFFECT = ("engine.micro_batch_tokens", "eval.every", "algorithm.imitation.profile")
_SPEAR_ONLY = ("algorithm.bonus.", "algorithm.imitation.", "algorithm.covariance.replay")


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: list[RunRecord]

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    @property
    def base_algorithm(self) -> str:
        """The algorithm without SPEAR: grpo, of grpo and of spear-grpo."""
        return self.algorithm.removeprefix("spear-")

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    def of_seed(self, seed: int) -> list[RunRecord]:
        return [run for run in self.runs if run.seed == seed]

    def by_seed(self, measure: Callable[[RunRecord], float | None]) -> dict[int, float]:
        """Seed -> what is measured; runs that repeat a seed are one seed, so they count as their mean."""
        found = {seed: [v for run in self.of_seed(seed) if (v := measure(run)) is not None] for seed in self.seeds}
        return {seed: fmean(values) for seed, values in found.items() if values}

    @cached_property
    def after_by_seed(self) -> dict[int, float]:
        """Seed -> success after."""
        return self.by_seed(lambda run: run.after.value if run.after else None)

    @property
    def success_before(self) -> float | None:
        return _mean([run.before.value for run in self.runs if run.before])

    @property
    def success_after(self) -> Estimate | None:
        if len(self.after_by_seed) > 1:
            mean = over_seeds(list(self.after_by_seed.values()))
            return Estimate(mean.value, max(mean.low, 0.0), min(mean.high, 1.0), mean.method)
        return next((run.after for run in self.runs if run.after), None)

    def last(self, key: str) -> float | None:
        """The moving average at the end, averaged over runs."""
        return _mean([list(s.values())[-1] for run in self.runs if (s := run.smoothed(key))])

    def best(self, key: str) -> float | None:
        return _mean([max(s.values()) for run in self.runs if (s := run.smoothed(key))])

    def mean(self, key: str) -> float | None:
        return _mean([fmean(s.values()) for run in self.runs if (s := run.series(key))])

    def as_dict(self) -> dict[str, Any]:
        """Every number of the table, and those of each run behind it."""
        return {
            "label": self.label,
            "algorithm": self.algorithm,
            "seeds": self.seeds,
            "success_before": self.success_before,
            "success_after": self.success_after and asdict(self.success_after),
            "best_reward": self.best("rollout/reward"),
            "last_reward": self.last("rollout/reward"),
            "entropy": self.last("policy/entropy"),
            "tool_turns": self.last("rollout/tool_turns"),
            "seconds_a_step": self.mean("time/step"),
            "replay_fired": self.mean("replay/fired"),
            "runs": [
                {"path": str(run.path), "seed": run.seed, "steps": run.taken, "note": run.note}
                | {"success_before": run.before and run.before.value, "success_after": run.after and run.after.value}
                for run in self.runs
            ],
        }


def arms_of(runs: Sequence[RunRecord]) -> list[Arm]:
    """Runs by algorithm, and by the settings in which runs of one algorithm differ; each base before its SPEAR."""
    arms: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda r: (r.seed, str(r.path))):
        alike = [other for other in runs if other.algorithm == run.algorithm]
        keys = sorted({key for other in alike for key in other.settings if _matters(key, run.algorithm)})
        varying = [key for key in keys if len({_setting(other, key) for other in alike}) > 1]
        own = ", ".join(f"{key}={_setting(run, key)}" for key in varying)
        arms.setdefault(f"{run.algorithm} [{own}]" if own else run.algorithm, []).append(run)
    return sorted(
        (Arm(label, members) for label, members in arms.items()),
        key=lambda arm: (arm.base_algorithm, arm.algorithm != arm.base_algorithm, arm.label),
    )


def _matters(key: str, algorithm: str) -> bool:
    """Whether a setting can change a run's result; the seed, which does, is left out."""
    if key.startswith(_SPEAR_ONLY):
        return algorithm.startswith("spear-") and not key.startswith(_NO_EFFECT)
    return key == "run.steps" or not key.startswith(("run.", *_NO_EFFECT))


def warnings_of(arms: Sequence[Arm]) -> list[str]:
    """Every reason why the arms are not like for like."""
    short = "its arm's curves have only the steps that all its runs have"
    said = [f"{run.path} is {run.note}; {short}" for arm in arms for run in arm.runs if run.note]
    for arm in arms:
        repeated = [seed for seed in arm.seeds if len(arm.of_seed(seed)) > 1]
        if repeated:
            seeds = str(repeated)[1:-1]
            said.append(f"{arm.label} has several runs of seed {seeds}: they count as one seed, by their mean")
    said += _unlike("seeds are", {arm.label: str(arm.seeds)[1:-1] for arm in arms})
    for key in sorted({key for arm in arms for key in arm.runs[0].settings} - {"algorithm.name"}):
        is_in_labels = key.startswith("algorithm.") and any(f"{key}=" in arm.label for arm in arms)
        if not is_in_labels:
            concerned = [arm for arm in arms if _matters(key, arm.algorithm)]
            said += _unlike(f"{key} is", {arm.label: _setting(arm.runs[0], key) for arm in concerned})
    return said


def _unlike(subject: str, values: Mapping[str, str]) -> Iterator[str]:
    """The warning that a value, given as arm's label -> text, differs between arms, if it does."""
    labels: dict[str, list[str]] = {}
    for label, value in values.items():
        labels.setdefault(value, []).append(label)
    if len(labels) > 1:
        parts = (f"{value} in {', '.join(having)}" for value, having in labels.items())
        yield f"not like for like: {subject} {'; '.join(parts)}"


def _setting(run: RunRecord, key: str) -> str:
    """A setting in words. The cold start that an experiment's cells share has one folder per seed: it is one model."""
    value = run.settings.get(key)
    if key == "engine.model" and isinstance(value, str) and "cold_starts/" in value:
        value = value.replace(f"/seed_{run.seed}/", "/seed_*/")
    return value if isinstance(value, str) else "unset" if value is None else json.dumps(value)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
