"""Goals, their price limits, order and splits, all drawn from one seed, independent of workers and machines."""

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import product as combinations
from typing import Any

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.entries import Entry
from spear_rl.envs.webshop.data.product import NO_LIMIT, Goal, Product

SPLITS = ("train", "validation", "test")
_LIMITS = tuple(10.0 * number for number in range(1, 100))


def human_goals(entry: Entry, product: Product, number: int, *, seed: int) -> Iterator[Goal]:
    """One per written instruction; those that ask for no attribute are skipped, as in the original."""
    for written in entry.instructions:
        attributes = _texts(written.get("instruction_attributes")) if isinstance(written, dict) else ()
        if attributes:
            given = written.get("instruction_options")
            names, options = _texts(list(given)) if isinstance(given, dict) else (), _texts(given)
            limit = price_limit(product, written.get("instruction"), options, seed=seed)
            text = str(written.get("instruction") or "").strip(".") + _limit_text(limit)
            yield _goal(product, number, text, attributes, options, limit, names)


def synthetic_goals(entry: Entry, product: Product, number: int, *, seed: int) -> Iterator[Goal]:
    """One per combination of option values, all with the same price limit.

    A value that the files repeat is combined as often: the order of the goals, and so the published splits, depend on
    their number.
    """
    attributes = _texts(entry.attributes.get("instruction_attributes"))
    instruction = entry.attributes.get("instruction")
    if not attributes or instruction is None:
        return
    limit = price_limit(product, "", (), seed=seed)
    names = sorted(product.options)
    for values in combinations(*(product.options[name] for name in names)):
        chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
        text = f"{instruction}{' with ' if chosen else ''}{chosen}{_limit_text(limit)}"
        yield _goal(product, number, text, attributes, values, limit, tuple(names))


def price_limit(product: Product, instruction: object, options: Sequence[str], *, seed: int) -> float:
    """The larger of two of the next four multiples of ten above the price; no limit where there are not two."""
    above = [limit for limit in _LIMITS if limit > product.price][:4]
    if len(above) < 2:
        return NO_LIMIT
    return max(Dice("limit", seed, product.asin, str(instruction), tuple(options)).shuffled(above)[:2])


def shuffled_order(num_goals: int, *, seed: int) -> list[int]:
    """The order of the goals; with seed 233 it is the original's order for a list of that length."""
    order = list(range(num_goals))
    random.Random(seed).shuffle(order)
    return order


def split_of(order: Sequence[int], keys: Sequence[Collection[object]]) -> dict[str, list[int]]:
    """The goals of each split, in order: 500 for test, 1000 for validation and the rest for train, as published.

    With fewer than 3000 goals, test and validation get a sixth each. A goal that shares a key (see `Goal.keys`) with
    one of an earlier split is left out, so that no two splits share a goal.
    """
    test, validation = (500, 1500) if len(order) >= 3000 else (len(order) // 6, len(order) // 6 * 2)
    parts = {"test": order[:test], "validation": order[test:validation], "train": order[validation:]}
    taken: set[object] = set()
    splits: dict[str, list[int]] = {}
    for name, numbers in parts.items():
        splits[name] = [number for number in numbers if taken.isdisjoint(keys[number])]
        taken.update(key for number in splits[name] for key in keys[number])
    return splits


def _goal(
    product: Product,
    number: int,
    text: str,
    attributes: tuple[str, ...],
    options: tuple[str, ...],
    limit: float,
    names: tuple[str, ...],
) -> Goal:
    about = (product.category, product.query, product.product_category, product.title)
    return Goal(product.asin, number, text, attributes, options, limit, *about, names)


def _limit_text(limit: float) -> str:
    return "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"


def _texts(given: Any) -> tuple[str, ...]:
    values = list(given.values()) if isinstance(given, dict) else given
    return tuple(map(str, values)) if isinstance(values, list) else ()
