"""Products and goals, and how an entry of the files becomes a product: one spelling, numeric prices, gaps filled."""

import math
import re
from dataclasses import dataclass
from typing import Any, Self

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.entries import Entry

NO_LIMIT = 1_000_000.0  # the price limit of a goal that names none
NO_PRICE = 100.0  # the price of a product without one
CATEGORY_SEPARATOR = "\u203a"
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")


@dataclass(frozen=True, slots=True)
class Review:
    title: str
    stars: str
    text: str


@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # option name -> its values in lower case, repeated ones as in the files
    category: str
    query: str  # the search that the product was scraped from; products of one kind share it
    product_category: str
    pricing: tuple[float, ...]  # one number, or the two ends of a range
    price: float  # the number, or a draw from the range
    rating: str = "N.A."
    reviews: tuple[Review, ...] = ()

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.pricing)

    @property
    def indexed_text(self) -> str:
        """The text that is searched: of the bullet points only the first, as in the original's index."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        lists = {name: tuple(fields[name]) for name in ("bullets", "attributes", "pricing")}
        options = {name: tuple(values) for name, values in fields["options"].items()}
        reviews = tuple(Review(**review) for review in fields["reviews"])
        return cls(**fields | lists | {"options": options, "reviews": reviews})


@dataclass(frozen=True, slots=True)
class Goal:
    asin: str  # of the product that the goal was made from; another one may score as well
    number: int  # of that product in the catalogue
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]  # wanted option values, spelled as in the files
    price_limit: float
    category: str
    query: str
    product_category: str
    title: str
    option_names: tuple[str, ...] = ()  # of a goal whose options are given by name: a synthetic one

    @property
    def keys(self) -> tuple[object, object]:
        """What is wanted, without wording and price limit; and the wording. Goals that share either are the same."""
        wanted = (tuple(sorted(map(str.lower, texts))) for texts in (self.attributes, self.options))
        return (self.asin, *wanted), self.instruction

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {name: tuple(fields[name]) for name in ("attributes", "options", "option_names")})


@dataclass(frozen=True, slots=True)
class Purchase:
    product: Product
    options: dict[str, str]  # option name -> chosen value


def as_dict(record: Any) -> dict[str, Any]:
    """A record's fields, for JSON; faster than dataclasses.asdict, which copies deeply."""
    return {name: getattr(record, name) for name in record.__slots__}


def product_of(entry: Entry, *, seed: int) -> Product:
    """The product of an entry; a price range gives one price, drawn from the seed and the asin alone."""
    item = entry.item
    asin, pricing = str(item["asin"]), prices(item.get("pricing"))
    given = item.get("small_description")
    bullets = given if isinstance(given, list) else [] if given is None else [given]
    attributes = entry.attributes.get("attributes")
    price = pricing[0]
    if len(pricing) == 2:
        price += (pricing[1] - pricing[0]) * Dice("price", seed, asin).below(10**9) / 10**9
    return Product(
        asin=asin,
        title=_text(item.get("name")),
        description=_text(item.get("full_description")),
        bullets=tuple(map(_text, bullets)),
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
            texts = (str(value["value"]) for value in values if isinstance(value, dict) and "value" in value)
            options[str(name).lower()] = tuple(text.strip().replace("/", " | ").lower() for text in texts)
    return options


def _reviews(given: Any) -> tuple[Review, ...]:
    return tuple(
        Review(_text(r.get("title")), _text(r.get("stars", r.get("score"))), _text(r.get("review", r.get("body"))))
        for r in (given if isinstance(given, list) else [])
        if isinstance(r, dict)
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)
