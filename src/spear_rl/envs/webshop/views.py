"""How a page reads: as agents know WebShop (`text`), with marks for what can be clicked (`rich`), or in brief."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from spear_rl.envs.webshop.session import SUB_PAGES, Kind, Page

SEPARATOR = " [SEP] "


class Piece(NamedTuple):
    """A text on a page."""

    text: str
    role: str = ""
    """button, option, chosen, product, seen; empty for what cannot be clicked."""


def text_view(page: Page) -> str:
    """The pieces of a page, separated: the observation that WebShop's agents are trained on."""
    return SEPARATOR.join(piece.text for piece in _pieces(page))


def rich_view(page: Page) -> str:
    """One piece a line, with marks around buttons; first the options that were chosen."""
    lines = [f"You have clicked {value}." for value in page.chosen.values()] if page.kind == Kind.ITEM else []
    for piece in _pieces(page):
        clicked = "clicked " if piece.role in ("chosen", "seen") else ""
        lines.append(f"[{clicked}button] {piece.text} [{clicked}button_]" if piece.role else piece.text)
    return "\n".join(lines)


def short_view(page: Page) -> str:
    """Only what is new on a page, for small models: the instruction once, no buttons that every page has."""
    product = page.product
    if page.kind == Kind.SEARCH:
        return page.instruction
    if page.kind == Kind.RESULTS:
        listed = [f"{p.asin.lower()} {p.title} {p.price_tag}" for p in page.listed]
        more = [f"page {page.number}, next >"] if page.has_next else []
        return "\n".join(listed + more) or "no results"
    if page.kind == Kind.ITEM and product is not None:
        lines = [f"{product.title} {product.price_tag}"]
        for name, values in product.options.items():
            shown = (f"[{value}]" if page.chosen.get(name) == value else value for value in values)
            lines.append(f"{name}: {', '.join(shown)}")
        return "\n".join(lines)
    return "\n".join(piece.text for piece in _body(page))


VIEWS: dict[str, Callable[[Page], str]] = {"text": text_view, "rich": rich_view, "short": short_view}


def _pieces(page: Page) -> Iterator[Piece]:
    if page.kind == Kind.CLOSED:
        yield from _body(page)
        return
    if page.kind == Kind.SEARCH:
        yield Piece("WebShop")
    yield Piece("Instruction:")
    yield Piece(page.instruction)
    if page.kind == Kind.SEARCH:
        yield Piece("Search", "button")
        return
    yield Piece("Back to Search", "button")
    if page.kind == Kind.RESULTS:
        yield Piece(f"Page {page.number} (Total results: {page.num_results})")
    if page.has_previous:
        yield Piece("< Prev", "button")
    if page.has_next:
        yield Piece("Next >", "button")
    yield from _body(page)


def _body(page: Page) -> Iterator[Piece]:
    product = page.product
    if page.kind == Kind.RESULTS:
        for listed in page.listed:
            yield Piece(listed.asin, "seen" if listed.asin in page.seen else "product")
            yield Piece(listed.title)
            yield Piece(listed.price_tag)
    elif page.kind == Kind.CLOSED:
        yield Piece("Thank you for shopping with us!" if page.score else "The shop is closed.")
        if page.score:
            yield Piece("Your score (min 0.0, max 1.0)")
            yield Piece(str(page.score.total))
    elif product is None:
        return
    elif page.kind == Kind.ITEM:
        for name, values in product.options.items():
            yield Piece(name)
            for value in values:
                yield Piece(value, "chosen" if page.chosen.get(name) == value else "option")
        yield Piece(product.title)
        yield Piece(f"Price: {product.price_tag}")
        yield Piece(f"Rating: {product.rating}")
        for name in SUB_PAGES:
            yield Piece(name.capitalize(), "button")
        yield Piece("Buy Now", "button")
    elif page.kind == Kind.DESCRIPTION:
        yield Piece(product.description or "None")
    elif page.kind == Kind.FEATURES:
        yield from map(Piece, product.bullets or ("None",))
    else:
        for review in product.reviews:
            yield from map(Piece, (f'"{review.title}"', review.stars, review.text))
        if not product.reviews:
            yield Piece("No reviews found")
