"""One visit to a shop: which page is open and what can be done there. Knows the rules, not how pages look."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from spear_rl.envs.webshop.action import Said
from spear_rl.envs.webshop.data.product import Goal, Product, Purchase
from spear_rl.envs.webshop.data.shelf import Shop
from spear_rl.envs.webshop.score import Score, score

PAGE_SIZE = 10
MAX_TURNS = 15
MAX_QUERY = 500
"""Characters of a search that count: results are remembered by it."""
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"


class Kind(StrEnum):
    """What kind of page is open."""

    SEARCH = "search"
    RESULTS = "results"
    ITEM = "item"
    DESCRIPTION = "description"
    FEATURES = "features"
    REVIEWS = "reviews"
    CLOSED = "closed"


_CLOSED = "the shop is closed"
SUB_PAGES = (Kind.DESCRIPTION, Kind.FEATURES, Kind.REVIEWS)


@dataclass(frozen=True, slots=True)
class Page:
    """What is seen. Everything on it is public: nothing here knows the goal but its instruction."""

    kind: Kind
    instruction: str
    query: str = ""
    number: int = 1
    """Of a page of results."""
    num_results: int = 0
    listed: tuple[Product, ...] = ()
    """The products on a page of results."""
    product: Product | None = None
    chosen: dict[str, str] = field(default_factory=dict)
    """Option name -> chosen value."""
    seen: frozenset[str] = frozenset()
    """The asins of products that were opened since the last search."""
    page_size: int = PAGE_SIZE
    score: Score | None = None
    """Of the purchase, once it is made."""

    @property
    def has_next(self) -> bool:
        return self.kind == Kind.RESULTS and self.number * self.page_size < self.num_results

    @property
    def has_previous(self) -> bool:
        return self.kind in (Kind.ITEM, *SUB_PAGES) or (self.kind == Kind.RESULTS and self.number > 1)

    @property
    def clickable(self) -> tuple[str, ...]:
        """What click[...] accepts here, in the order of the page."""
        if self.kind in (Kind.SEARCH, Kind.CLOSED):
            return ()
        names = [BACK, *([PREVIOUS] if self.has_previous else []), *([NEXT] if self.has_next else [])]
        names += [product.asin.lower() for product in self.listed]
        if self.kind == Kind.ITEM and self.product is not None:
            names += [value for values in self.product.options.values() for value in values]
            names += [*SUB_PAGES, BUY]
        return tuple(dict.fromkeys(names))

    @property
    def state_key(self) -> str:
        """Equal keys mean that the same can be done here; what was looked at before does not matter for that."""
        asin = self.product.asin if self.product else ""
        return repr((str(self.kind), self.query, self.number, asin, sorted(self.chosen.items())))


class Session:
    """A visit with a goal. Whatever is asked for is done, or answered by a sentence that says why not."""

    def __init__(self, shop: Shop, goal: Goal, *, page_size: int = PAGE_SIZE, max_turns: int = MAX_TURNS) -> None:
        self._shop, self._goal, self._page_size = shop, goal, page_size
        self.turns_left = max_turns
        self._results: tuple[int, ...] = ()
        self.page = self._search_page()
        self.purchase: Purchase | None = None

    @property
    def is_open(self) -> bool:
        return self.page.kind != Kind.CLOSED

    def act(self, said: Said) -> str:
        """Do what was said, which takes a turn in any case; an empty text if it worked. The last turn closes."""
        if not self.is_open:
            return _CLOSED
        self.turns_left -= 1
        if said.invalid:
            why = "say search[words] or click[something on this page]"
        else:
            why = self.search(said.words) if said.verb == "search" else self.click(said.words)
        if self.turns_left <= 0 and self.is_open:
            self.close()
        return why

    def search(self, words: str) -> str:
        """Search; an empty text if that worked."""
        if not self.is_open:
            return _CLOSED
        if self.page.kind != Kind.SEARCH:
            return f"there is no search bar on this page, click[{BACK}] leads to it"
        if not words:
            return "the search is empty"
        words = words[:MAX_QUERY].strip()
        self._results = self._shop.results(words)
        self.page = self._result_page(words, 1)
        return ""

    def click(self, name: str) -> str:
        """Click on a button, a product or an option; an empty text if that worked."""
        page = self.page
        if not self.is_open:
            return _CLOSED
        if name not in page.clickable:
            return self._why_not(name)
        if name == BACK:
            self.page = self._search_page()
        elif name == NEXT:
            self.page = self._result_page(page.query, page.number + 1, page.seen)
        elif name == PREVIOUS:
            self.page = self._previous(page)
        elif page.kind == Kind.RESULTS:
            opened = next(product for product in page.listed if product.asin.lower() == name)
            self.page = replace(page, kind=Kind.ITEM, listed=(), product=opened, seen=page.seen | {opened.asin})
        elif name == BUY:
            self._buy(page)
        elif name in tuple(SUB_PAGES):
            self.page = replace(page, kind=Kind(name))
        else:
            self._choose(page, name)
        return ""

    def close(self) -> None:
        """Nothing can be done any more."""
        self.page = replace(self.page, kind=Kind.CLOSED)

    def _search_page(self) -> Page:
        return Page(Kind.SEARCH, self._goal.instruction, page_size=self._page_size)

    def _result_page(self, words: str, number: int, seen: frozenset[str] = frozenset()) -> Page:
        first = (number - 1) * self._page_size
        return replace(
            self._search_page(),
            kind=Kind.RESULTS,
            query=words,
            number=number,
            num_results=len(self._results),
            listed=tuple(self._shop.product(n) for n in self._results[first : first + self._page_size]),
            seen=seen,
        )

    def _previous(self, page: Page) -> Page:
        if page.kind == Kind.RESULTS:
            return self._result_page(page.query, page.number - 1, page.seen)
        if page.kind == Kind.ITEM:
            return self._result_page(page.query, page.number, page.seen)
        return replace(page, kind=Kind.ITEM)

    def _choose(self, page: Page, value: str) -> None:
        assert page.product is not None
        names = [name for name, values in page.product.options.items() if value in values]
        # Where two options share a value the last one gets it, as in the original.
        self.page = replace(page, chosen=page.chosen | {names[-1]: value})

    def _buy(self, page: Page) -> None:
        assert page.product is not None
        self.purchase = Purchase(page.product, page.chosen)
        self.page = replace(page, kind=Kind.CLOSED, score=score(self.purchase, self._goal))

    def _why_not(self, name: str) -> str:
        kind = self.page.kind
        if name == BUY or name in tuple(SUB_PAGES):
            return f"there is no {name!r} on this page, open a product first"
        if kind == Kind.SEARCH:
            return "there is nothing to click on the search page, search[...] first"
        if kind == Kind.RESULTS and name not in (NEXT, PREVIOUS):
            return f"there is no product {name[:60]!r} on this page of results"
        return f"there is no {name[:60]!r} to click on this page"
