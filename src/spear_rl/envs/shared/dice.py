"""Seeded draws that are the same on every Python version and machine: only `Random.random` guarantees that."""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A seeded random stream."""

    __slots__ = ("_random",)

    def __init__(self, *seed: object) -> None:
        digest = hashlib.sha256(repr(seed).encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big")).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """An option, with probability proportional to its weight."""
        mark = self._random() * sum(weights)
        for option, weight in zip(options, weights, strict=True):
            mark -= weight
            if mark < 0:
                return option
        return options[-1]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        order = list(options)
        for last in range(len(order) - 1, 0, -1):
            swap = self.below(last + 1)
            order[last], order[swap] = order[swap], order[last]
        return order
