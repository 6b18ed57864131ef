"""Pages as text: WebShop's `text` and `text_rich` observations (`text`, `rich`), or for small models (`short`)."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from spear_rl.envs.shared.scenes import MAX_TEXT, Scene, Seen, WebPage
from spear_rl.envs.webshop.session import SUB_PAGES, Kind, Page

SEPARATOR = " [SEP] "
_ASCII_SPACE = " \t\n\r\f"
_HTML_SAFE = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&'"})
_THANKS, _SCORE = "Thank you for shopping with us!", "Your score (min 0.0, max 1.0)"


class Element(NamedTuple):
    text: str
    role: str = ""  # button, option, chosen, product, seen; empty for what cannot be clicked


def text_view(page: Page) -> str:
    """The elements of a page, separated: the observation that WebShop's agents are trained on."""
    return SEPARATOR.join(element.text.strip() for element in _shown(page))


def rich_view(page: Page) -> str:
    """One element per line, with marks around buttons; what was clicked last on the page comes first."""
    clicked, lines = list[str](), list[str]()
    for text, role in _shown(page):
        mark = "clicked button" if role in ("chosen", "seen") else "button"
        before = {"option": "  ", "chosen": "  ", "product": "\n", "seen": "\n"}.get(role, "")
        lines.append(f"{before}[{mark}] {text} [{mark}_]\n" if role else f"{text}\n")
        if role == "chosen":
            clicked.insert(0, f"You have clicked {text}.\n")
    return "".join(clicked + lines)


def short_view(page: Page) -> str:
    """Only what is new on a page: the instruction once, and no buttons that every page has."""
    product = page.product
    if page.kind == Kind.SEARCH:
        return page.instruction
    if page.kind == Kind.RESULTS:
        listed = [f"{p.asin.lower()} {p.title} {p.price_tag}" for p in page.listed]
        more = [f"page {page.number}, next >"] if page.has_more else []
        return "\n".join(listed + more) or "no results"
    if page.kind == Kind.CLOSED and page.score is not None:
        return f"{_THANKS}\n{_SCORE}\n{page.score.total}"
    if page.kind == Kind.ITEM and product is not None:
        lines = [f"{product.title} {product.price_tag}"]
        for name, values in product.options.items():
            shown = (f"[{value}]" if page.chosen.get(name) == value else value for value in values)
            lines.append(f"{name}: {', '.join(shown)}")
        return "\n".join(lines)
    return "\n".join(element.text.strip() for element in _content(page)) or "nothing"


VIEWS: dict[str, Callable[[Page], str]] = {"text": text_view, "rich": rich_view, "short": short_view}


def _shown(page: Page) -> Iterator[Element]:
    """The elements that have a text in the original, which parses its pages from HTML.

    An empty text is none there. Of one that is ASCII space a line break is not shown, and the rest is one blank.
    """
    for element in _elements(page):
        if element.text.strip(_ASCII_SPACE):
            yield element
        elif element.text and "\n" not in element.text:
            yield element._replace(text=" ")


def _elements(page: Page) -> Iterator[Element]:
    if page.kind == Kind.SEARCH:
        texts = ("WebShop", "Instruction: ", page.instruction)
        yield from (*map(Element, texts), Element("Search", "button"))
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
        yield from map(Element, _closing(page))
    elif product is None:
        return
    elif page.kind == Kind.ITEM:
        # The original looks a value up in the page's address, which holds the query and the choices as JSON.
        address = f"{page.query.replace(' ', '+')}/{json.dumps(page.chosen)}"
        for name, values in product.options.items():
            yield Element(name)
            yield from (Element(value, "chosen" if f'"{value}"' in address else "option") for value in values)
        yield from map(Element, (product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}"))
        yield from (Element(name, "button") for name in (*map(str.capitalize, SUB_PAGES), "Buy Now"))
    elif page.kind == Kind.DESCRIPTION:
        yield Element(product.description)
    elif page.kind == Kind.FEATURES:
        yield from (Element(f" {bullet}") for bullet in product.bullets)
    else:
        for review in product.reviews:
            yield from map(Element, (f'"{review.title}"', review.stars, review.text))


def _closing(page: Page) -> tuple[str, ...]:
    """The page after the purchase: its labels are there without values, as in the original's text environment."""
    if page.score is None or page.product is None:
        return ("The shop is closed.",)
    chosen = json.dumps(page.chosen, sort_keys=True).translate(_HTML_SAFE)
    code = ("Your code: ", "None", " (Paste it in your MTurk interface.)")
    bought = ("Purchased", "asin", page.product.asin, "options", chosen)
    unknown = (text for label in ("attrs", "category", "query", "product category") for text in (label, "None"))
    wanted = ("asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query")
    reward = ("Reward", _SCORE, str(page.score.total), "Reward Details ", "None")
    return (_THANKS, *code, *bought, *unknown, "Target", *wanted, "Goal ", "None", *reward)


_BUTTONS = frozenset({"Search", "Back to Search", "< Prev", "Next >", "Buy Now", *map(str.capitalize, SUB_PAGES)})
_ASIN = re.compile(r"B0[A-Za-z0-9]{8}", re.IGNORECASE)
_MARKED = re.compile(r"\[(clicked )?button\] (.*) \[(?:clicked )?button_\]")


def shown_pages(turns: Sequence[Seen]) -> list[Scene | None]:
    """The pages of an episode from their texts; which options are chosen is in the key of the state."""
    return [_page_of(turn) if turn.observation else None for turn in turns]


def _page_of(turn: Seen) -> WebPage:
    text, chosen = turn.observation[:MAX_TEXT], _chosen_in(turn.state_key)
    parts = text.split(SEPARATOR) if SEPARATOR in text else text.split("\n")
    elements = list[tuple[str, str]]()
    for part in filter(None, map(str.strip, parts)):
        if marked := _MARKED.fullmatch(part):
            name, role = marked[2], "chosen" if marked[1] else "button"
        else:
            name, role = part, "button" if part in _BUTTONS else "chosen" if part in chosen else ""
        elements.append((name, "product" if _ASIN.match(name) else role))
    return WebPage(tuple(elements))


def _chosen_in(state_key: str) -> set[str]:
    try:
        return {str(value) for _, value in ast.literal_eval(state_key[:MAX_TEXT])[4]}
    except (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError):
        return set()
