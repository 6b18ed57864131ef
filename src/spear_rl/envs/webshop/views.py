"""Pages as text: WebShop's observation (`text`), with marks around buttons (`rich`), or for small models (`short`)."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from spear_rl.envs.webshop.session import SUB_PAGES, Kind, Page

SEPARATOR = " [SEP] "


class Element(NamedTuple):
    text: str
    role: str = ""  # button, option, chosen, product, seen; empty for what cannot be clicked


def text_view(page: Page) -> str:
    """The elements of a page, separated: the observation that WebShop's agents are trained on."""
    return SEPARATOR.join(element.text for element in _elements(page))


def rich_view(page: Page) -> str:
    """One element per line, with marks around buttons; the chosen options come first."""
    lines = [f"You have clicked {value}." for value in page.chosen.values()] if page.kind == Kind.ITEM else []
    for element in _elements(page):
        clicked = "clicked " if element.role in ("chosen", "seen") else ""
        lines.append(f"[{clicked}button] {element.text} [{clicked}button_]" if element.role else element.text)
    return "\n".join(lines)


def short_view(page: Page) -> str:
    """Only what is new on a page: the instruction once, and no buttons that every page has."""
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
    return "\n".join(element.text for element in _content(page))


VIEWS: dict[str, Callable[[Page], str]] = {"text": text_view, "rich": rich_view, "short": short_view}


def _elements(page: Page) -> Iterator[Element]:
    if page.kind == Kind.SEARCH:
        yield from (Element("WebShop"), Element("Instruction:"), Element(page.instruction), Element("Search", "button"))
        return
    if page.kind != Kind.CLOSED:
        yield from (Element("Instruction:"), Element(page.instruction), Element("Back to Search", "button"))
    if page.kind == Kind.RESULTS:
        yield Element(f"Page {page.number} (Total results: {page.num_results})")
    if page.has_previous:
        yield Element("< Prev", "button")
    if page.has_next:
        yield Element("Next >", "button")
    yield from _content(page)


def _content(page: Page) -> Iterator[Element]:
    product = page.product
    if page.kind == Kind.RESULTS:
        for listed in page.listed:
            yield Element(listed.asin, "seen" if listed.asin in page.seen else "product")
            yield from map(Element, (listed.title, listed.price_tag))
    elif page.kind == Kind.CLOSED:
        score = page.score
        thanks = ("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", str(score.total)) if score else ()
        yield from map(Element, thanks or ("The shop is closed.",))
    elif product is None:
        return
    elif page.kind == Kind.ITEM:
        for name, values in product.options.items():
            yield Element(name)
            for value in values:
                yield Element(value, "chosen" if page.chosen.get(name) == value else "option")
        yield from map(Element, (product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}"))
        yield from (Element(name, "button") for name in (*map(str.capitalize, SUB_PAGES), "Buy Now"))
    elif page.kind == Kind.DESCRIPTION:
        yield Element(product.description or "None")
    elif page.kind == Kind.FEATURES:
        yield from map(Element, product.bullets or ("None",))
    elif product.reviews:
        for review in product.reviews:
            yield from map(Element, (f'"{review.title}"', review.stars, review.text))
    else:
        yield Element("No reviews found")
