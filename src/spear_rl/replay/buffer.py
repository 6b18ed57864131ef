"""What is kept between steps: good episodes, and the mean rewards of recent groups. Standard library only."""

import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """One remembered episode; `item` is whatever the trainer at hand trains on."""

    item: T
    reward: float
    """The task's own reward: no bonus, no format term."""
    step: int
    """The training step whose policy played it."""
    size: int = 1
    """What it takes of the buffer's capacity."""


@dataclass
class ReplayBuffer(Generic[T]):
    """At most `capacity` episodes, or so much by their sizes, none older than `max_age` steps; oldest out first."""

    capacity: int
    max_age: int
    items: deque[Stored[T]] = field(default_factory=deque, repr=False)

    def __len__(self) -> int:
        return len(self.items)

    def add(
        self, scored: Iterable[tuple[T, float]], step: int, *, size_of: Callable[[T], int] = lambda item: 1
    ) -> None:
        """Remember (episode, reward) pairs that were played at `step`; each takes `size_of` it of the capacity."""
        self.items.extend(Stored(item, reward, step, size_of(item)) for item, reward in scored)
        excess = sum(stored.size for stored in self.items) - self.capacity
        while excess > 0:
            excess -= self.items.popleft().size

    def drop_stale(self, step: int) -> None:
        """Forget what is older than `max_age` at `step`."""
        self.items = deque(s for s in self.items if step - s.step <= self.max_age)

    def sample(
        self, count: int, rng: random.Random, *, where: Callable[[Stored[T]], bool] = lambda stored: True
    ) -> list[Stored[T]]:
        """Up to `count` different episodes for which `where` holds."""
        eligible = [stored for stored in self.items if where(stored)]
        return rng.sample(eligible, min(count, len(eligible)))

    def clear(self) -> None:
        self.items.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"items": [(s.item, s.reward, s.step, s.size) for s in self.items]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = deque(Stored(*entry) for entry in state["items"])


@dataclass
class RewardHistory:
    """Mean reward of the last `size` groups: what a replayed episode must beat today."""

    size: int
    means: deque[float] = field(default_factory=deque, repr=False)
    stds: deque[float] = field(default_factory=deque, repr=False)
    """Of the rewards in each of the last `size` groups that had any spread."""

    def __len__(self) -> int:
        return len(self.means)

    def add(self, group_means: Iterable[float], stds: Iterable[float] = ()) -> None:
        """Take in groups, and the standard deviations within them; one of 0 is left out, as it compares nothing."""
        self.means.extend(group_means)
        self.stds.extend(std for std in stds if std > 0)
        for window in (self.means, self.stds):
            while len(window) > self.size:
                window.popleft()

    @property
    def typical_std(self) -> float | None:
        """The median of the groups' standard deviations, never 0; None before any group had a spread."""
        return statistics.median(self.stds) if self.stds else None

    def median(self) -> float:
        """The paper's baseline."""
        return self.percentile(50.0)

    def percentile(self, percent: float) -> float:
        """Linear interpolation between the two nearest ranks; 0 is the smallest mean, 100 the largest."""
        if not self.means:
            raise ValueError("a percentile of an empty reward history: add group means first")
        ordered = sorted(self.means)
        position = (len(ordered) - 1) * percent / 100
        below = math.floor(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)

    def state_dict(self) -> dict[str, Any]:
        return {"means": list(self.means), "stds": list(self.stds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means, self.stds = deque(state["means"]), deque(state.get("stds", ()))
