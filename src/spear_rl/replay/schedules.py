"""Schedules that follow what a run has measured instead of the step count.

Standard library only.
"""

from dataclasses import dataclass, field
from statistics import fmean

from spear_rl.replay.buffer import Running


@dataclass(frozen=True, slots=True)
class BySuccess:
    """A schedule: from `start` without any success, in proportion, to `end` at a success rate of `target`."""

    start: float
    end: float
    target: float = 0.5
    running: Running = field(default_factory=Running, repr=False, compare=False)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, self.running.success / self.target)


@dataclass(frozen=True, slots=True)
class ByEntropy:
    """A schedule: `weight`, less in proportion while the entropy is below `share` of what the run started with."""

    weight: float
    share: float = 0.5
    running: Running = field(default_factory=Running, repr=False, compare=False)

    def __call__(self, step: int) -> float:
        first, entropy = self.running.first_entropies, self.running.entropy
        full = self.share * fmean(first) if first else 0.0
        return self.weight * min(1.0, max(entropy, 0.0) / full) if full > 0 and entropy is not None else self.weight
