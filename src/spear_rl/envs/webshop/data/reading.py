"""From an entry of the files to a product: names and values in one spelling, prices as numbers, gaps filled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.product import Product, Review
from spear_rl.envs.webshop.generated.catalogue import Entry

NO_PRICE = 100.0
"""Of a product whose price is not known."""

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")


def usable(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Without the products that WebShop skips: no asin, one of more than ten characters, or one that came before."""
    seen: set[str] = set()
    for entry in entries:
        asin = entry.item.get("asin")
        if isinstance(asin, str) and asin and asin != "nan" and len(asin) <= 10 and asin not in seen:
            seen.add(asin)
            yield entry


def product_of(entry: Entry, *, seed: int) -> Product:
    """The product of an entry; a price range gives one price, drawn from the seed and the asin alone."""
    item = entry.item
    asin, pricing = str(item["asin"]), prices(item.get("pricing"))
    bullets = item.get("small_description")
    attributes = entry.attributes.get("attributes")
    price = pricing[0]
    if len(pricing) == 2:
        price += (pricing[1] - pricing[0]) * Dice("price", seed, asin).below(10**9) / 10**9
    return Product(
        asin=asin,
        title=_text(item.get("name")),
        description=_text(item.get("full_description")),
        bullets=tuple(_text(b) for b in (bullets if isinstance(bullets, list) else [bullets]) if b),
        attributes=tuple(_text(a) for a in attributes) if isinstance(attributes, list) else (),
        options=_options(item.get("customization_options")),
        category=_text(item.get("category")),
        query=_text(item.get("query")).lower().strip(),
        product_category=_text(item.get("product_category")),
        pricing=pricing,
        price=price,
        rating=_text(item.get("average_rating")) or "N.A.",
        reviews=_reviews(item.get("reviews")),
    )


def prices(pricing: Any) -> tuple[float, ...]:
    """ "$12.99" -> (12.99,), "$5 to $9" -> (5.0, 9.0), nothing -> (100.0,)."""
    found = [part for part in str(pricing or "").split("$")[1:] if _NUMBER.search(part)]
    numbers = [float(_NUMBER.findall(part)[0].replace(",", "")) for part in found][:2]
    return tuple(numbers) if numbers and all(map(math.isfinite, numbers)) else (NO_PRICE,)


def _options(given: Any) -> dict[str, tuple[str, ...]]:
    options: dict[str, tuple[str, ...]] = {}
    for name, values in given.items() if isinstance(given, dict) else ():
        if isinstance(values, list):
            texts = (_text(value.get("value")) for value in values if isinstance(value, dict))
            spelled = (" ".join(text.strip().replace("/", " | ").lower().split()) for text in texts)
            kept = tuple(dict.fromkeys(value for value in spelled if value))
            if kept:
                options[" ".join(str(name).lower().split())] = kept
    return options


def _reviews(given: Any) -> tuple[Review, ...]:
    reviews = [review for review in given if isinstance(review, dict)] if isinstance(given, list) else []
    return tuple(
        Review(_text(r.get("title")), _text(r.get("stars", r.get("score"))), _text(r.get("review", r.get("body"))))
        for r in reviews
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)
