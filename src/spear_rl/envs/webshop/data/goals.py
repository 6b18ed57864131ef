"""What is to be bought: goals, their price limits, their order and their split, all from one seed.

No draw knows a worker, a machine or how many goals there are; a price limit hangs on the seed and the goal alone.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import product as combinations
from typing import Any

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.product import NO_LIMIT, Goal, Product
from spear_rl.envs.webshop.generated.catalogue import Entry

SPLITS = ("train", "validation", "test")
_TEST, _VALIDATION = 500, 1000
_LIMITS = tuple(10.0 * number for number in range(1, 100))


def human_goals(entry: Entry, product: Product, number: int, *, seed: int) -> Iterator[Goal]:
    """One a written instruction; one that asks for no attribute is left out, as in the original."""
    for said in entry.wishes:
        attributes = _texts(said.get("instruction_attributes")) if isinstance(said, dict) else ()
        if attributes:
            options = _texts(said.get("instruction_options"))
            limit = price_limit(product, said.get("instruction"), options, seed=seed)
            text = str(said.get("instruction") or "").strip(".") + _limit_text(limit)
            yield _goal(product, number, text, attributes, options, limit)


def synthetic_goals(entry: Entry, product: Product, number: int, *, seed: int) -> Iterator[Goal]:
    """One a combination of option values; their product's limit is the same for all."""
    attributes, instruction = (
        _texts(entry.attributes.get("instruction_attributes")),
        entry.attributes.get("instruction"),
    )
    if not attributes or not instruction:
        return
    limit = price_limit(product, "", (), seed=seed)
    names = sorted(product.options)
    for values in combinations(*(product.options[name] for name in names)):
        chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
        text = f"{instruction}{' with ' if chosen else ''}{chosen}{_limit_text(limit)}"
        yield _goal(product, number, text, attributes, tuple(values), limit)


def price_limit(product: Product, instruction: object, options: Sequence[str], *, seed: int) -> float:
    """The larger of two of the next four multiples of ten above the price; no limit where there are not two."""
    above = [limit for limit in _LIMITS if limit > product.price][:4]
    if len(above) < 2:
        return NO_LIMIT
    return max(Dice("limit", seed, product.asin, str(instruction), tuple(options)).shuffled(above)[:2])


def shuffled_order(num_goals: int, *, seed: int) -> list[int]:
    """The order of the goals. With seed 233 it is the one that the original's shuffle gives a list of that length."""
    order = list(range(num_goals))
    random.Random(seed).shuffle(order)
    return order


def split_of(order: Sequence[int], keys: Sequence[Collection[object]]) -> dict[str, list[int]]:
    """The goals of each split, in order: 500 for test, 1000 for validation and the rest for train, as published.

    Fewer than 3000 goals give a sixth to each of the first two. A goal that shares a key (what it asks for, its very
    words) with one of an earlier part is left out of the later one, so that no two splits share a goal.
    """
    num_test, num_validation = (_TEST, _VALIDATION) if len(order) >= 3000 else (len(order) // 6, len(order) // 6)
    parts = {
        "test": order[:num_test],
        "validation": order[num_test : num_test + num_validation],
        "train": order[num_test + num_validation :],
    }
    taken: set[object] = set()
    splits: dict[str, list[int]] = {}
    for name, numbers in parts.items():
        splits[name] = [number for number in numbers if taken.isdisjoint(keys[number])]
        taken.update(key for number in splits[name] for key in keys[number])
    return splits


def _goal(
    product: Product, number: int, text: str, attributes: tuple[str, ...], options: tuple[str, ...], limit: float
) -> Goal:
    return Goal(
        asin=product.asin,
        number=number,
        instruction=" ".join(text.split()),
        attributes=attributes,
        options=options,
        price_limit=limit,
        category=product.category,
        query=product.query,
        product_category=product.product_category,
        title=product.title,
    )


def _limit_text(limit: float) -> str:
    return "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"


def _texts(given: Any) -> tuple[str, ...]:
    values = list(given.values()) if isinstance(given, dict) else given
    return tuple(str(value).lower() for value in values) if isinstance(values, list) else ()
