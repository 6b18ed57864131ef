"""Schedules that follow what a run has measured instead of the step count.

Standard library only.
"""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated

from spear_rl.replay.buffer import Running
from spear_rl.settings.ranges import Range, check_fields


@dataclass(frozen=True, slots=True)
class BySuccess:
    """A schedule: from `start` without any success, in proportion, to `end` at a success rate of `target`."""

    start: float
    end: float
    target: Annotated[float, Range(0, 1, "(]")] = 0.5
    running: Running = field(default_factory=Running, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, self.running.success / self.target)


@dataclass(frozen=True, slots=True)
class ByEntropy:
    """A schedule: `weight`, less in proportion while the entropy is below `share` of what the run started with."""

    weight: float
    share: Annotated[float, Range(0, 1, "(]")] = 0.5
    running: Running = field(default_factory=Running, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, step: int) -> float:
        first, entropy = self.running.first_entropies, self.running.entropy
        full = self.share * fmean(first) if first else 0.0
        return self.weight * min(1.0, max(entropy, 0.0) / full) if full > 0 and entropy is not None else self.weight
