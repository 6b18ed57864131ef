"""What a product and a goal are, once the files have been read. Plain values that JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NO_LIMIT = 1_000_000.0
"""The price limit of a goal that names none."""
CATEGORY_SEPARATOR = "\u203a"
"""A single right-pointing quotation mark."""


@dataclass(frozen=True, slots=True)
class Review:
    """What a buyer wrote."""

    title: str
    stars: str
    text: str


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the shop."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    """Option name -> its values, all in lower case."""
    category: str
    query: str
    """The search that the product was found by; products of one kind share it."""
    product_category: str
    pricing: tuple[float, ...]
    """One number, or the two ends of a range."""
    price: float
    """What it costs: the number, or a draw from inside the range."""
    rating: str = "N.A."
    reviews: tuple[Review, ...] = ()

    @property
    def price_tag(self) -> str:
        """What the pages show."""
        return " to ".join(f"${price}" for price in self.pricing)

    @property
    def indexed_text(self) -> str:
        """What a search looks at."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets, options]).lower()

    def as_dict(self) -> dict[str, Any]:
        return _fields(self) | {"reviews": [_fields(review) for review in self.reviews]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Product:
        fields = dict(fields)
        for name in ("bullets", "attributes", "pricing"):
            fields[name] = tuple(fields[name])
        fields["options"] = {name: tuple(values) for name, values in fields["options"].items()}
        fields["reviews"] = tuple(Review(**review) for review in fields["reviews"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Goal:
    """What somebody wants to buy."""

    asin: str
    """Of the product the goal was made from; another one may serve as well."""
    number: int
    """Of that product in the catalogue."""
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Wanted option values."""
    price_limit: float
    category: str
    query: str
    product_category: str
    title: str

    @property
    def keys(self) -> tuple[object, object]:
        """What it asks for, however it is worded and whatever it may cost; and its very words.

        Two goals that share one of them count as the same goal.
        """
        return (self.asin, tuple(sorted(self.attributes)), tuple(sorted(self.options))), self.instruction

    def as_dict(self) -> dict[str, Any]:
        return _fields(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Goal:
        return cls(**fields | {"attributes": tuple(fields["attributes"]), "options": tuple(fields["options"])})


@dataclass(frozen=True, slots=True)
class Purchase:
    """A product with the options that were chosen."""

    product: Product
    options: dict[str, str]


def _fields(record: Any) -> dict[str, Any]:
    """What dataclasses.asdict gives, without its deep copies: a catalogue has very many of these."""
    return {name: getattr(record, name) for name in record.__slots__}
