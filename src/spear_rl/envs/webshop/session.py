"""The rules of the shop: what an action is, which page is open and what can be done there. Renders nothing."""

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from spear_rl.envs.shared.answer_tags import parsed_answer
from spear_rl.envs.webshop.data.product import Goal, Product, Purchase
from spear_rl.envs.webshop.data.shop import Shop
from spear_rl.envs.webshop.data.words import lowered
from spear_rl.envs.webshop.score import Score, score

PAGE_SIZE = 10
MAX_TURNS = 15
MAX_QUERY = 500  # characters: a query is the key of a cache
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
NOT_AN_ACTION = "not_an_action"  # why a turn is invalid: its command is neither a search nor a click
_ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.DOTALL)


class Action(NamedTuple):
    """search[words] or click[words], or in one word why the text is neither."""

    verb: str
    words: str
    invalid: str = ""


def parsed_action(text: str) -> Action:
    """The action in a policy's answer, in lower case and with single spaces.

    "<think>hm</think><action>Search[Red  Shoes]</action>" -> search, "red shoes"
    "click[buy now]"                                       -> click, "buy now"
    "<action>buy it</action>"                              -> not_an_action
    "<action>click[a"                                      -> unclosed_tag
    """
    found = _ACTION.fullmatch(lowered(text))
    if found is None:
        command, invalid = parsed_answer(text)
        if invalid:
            return Action("", "", invalid)
        found = _ACTION.fullmatch(command)
    return Action(found[1], found[2].strip()) if found else Action("", "", NOT_AN_ACTION)


class Kind(StrEnum):
    SEARCH = "search"
    RESULTS = "results"
    ITEM = "item"
    DESCRIPTION = "description"
    FEATURES = "features"
    REVIEWS = "reviews"
    CLOSED = "closed"


SUB_PAGES = (Kind.DESCRIPTION, Kind.FEATURES, Kind.REVIEWS)


@dataclass(frozen=True, slots=True)
class Page:
    """What the shopper sees. Of the goal it holds the instruction only."""

    kind: Kind
    instruction: str
    query: str = ""
    number: int = 1  # of a page of results
    num_results: int = 0
    listed: tuple[Product, ...] = ()  # the products on a page of results
    product: Product | None = None
    chosen: dict[str, str] = field(default_factory=dict)  # option name -> chosen value
    seen: frozenset[str] = frozenset()  # asins of the products that were opened since the search page
    page_size: int = PAGE_SIZE
    score: Score | None = None  # of the purchase, once it is made

    @property
    def has_more(self) -> bool:
        """Whether the next page of results has any."""
        return self.kind == Kind.RESULTS and self.number * self.page_size < self.num_results

    @property
    def has_next(self) -> bool:
        """Whether there is a button: as in the original, also where the next page has no results."""
        return self.kind == Kind.RESULTS

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
            names += [value for values in self.product.options.values() for value in values if value]
            names += [*SUB_PAGES, BUY]
        return tuple(dict.fromkeys(names))

    @property
    def state_key(self) -> str:
        """Equal on pages that allow the same actions, whatever was opened before."""
        asin = self.product.asin if self.product else ""
        return repr((str(self.kind), self.query, self.number, asin, sorted(self.chosen.items())))


class Session:
    def __init__(
        self,
        shop: Shop,
        goal: Goal,
        *,
        page_size: int = PAGE_SIZE,
        max_turns: int = MAX_TURNS,
        scorer: str = "spear",
    ) -> None:
        self._shop, self._goal, self._page_size, self._scorer = shop, goal, page_size, scorer
        self.turns_left = max_turns
        self._results: tuple[int, ...] = ()
        self.page = self._search_page()

    @property
    def is_open(self) -> bool:
        return self.page.kind != Kind.CLOSED

    def act(self, action: Action) -> str:
        """Take a turn; returns why nothing happened, or "". Invalid actions take turns too; the last one closes."""
        if not self.is_open:
            return "the shop is closed"
        self.turns_left -= 1
        if action.invalid:
            why = "say search[words] or click[something on this page]"
        else:
            why = self._search(action.words) if action.verb == "search" else self._click(action.words)
        if self.turns_left <= 0:
            self.close()
        return why

    def _search(self, words: str) -> str:
        if not words:
            return "the search is empty"
        words = words[:MAX_QUERY].strip()
        self._results = self._shop.results(words)
        self.page = self._result_page(words, 1, self.page.seen)
        return ""

    def _click(self, name: str) -> str:
        page, product = self.page, self.page.product
        # Answers are read with single spaces; option values are clicked and stored as they are spelled.
        known = {lowered(known): known for known in page.clickable}
        if lowered(name) not in known:
            return self._why_not(name)
        name = known[lowered(name)]
        if name == BACK:
            self.page = self._search_page()
        elif name == NEXT:
            self.page = self._result_page(page.query, page.number + 1, page.seen)
        elif name == PREVIOUS and page.kind in SUB_PAGES:
            self.page = replace(page, kind=Kind.ITEM)
        elif name == PREVIOUS:
            number = page.number if page.kind == Kind.ITEM else page.number - 1
            self.page = self._result_page(page.query, number, page.seen)
        elif page.kind == Kind.RESULTS:
            opened = next(product for product in page.listed if product.asin.lower() == name)
            self.page = replace(page, kind=Kind.ITEM, listed=(), product=opened, seen=page.seen | {opened.asin})
        elif name == BUY and product:
            purchase = Purchase(product, page.chosen)
            self.page = replace(page, kind=Kind.CLOSED, score=score(purchase, self._goal, self._scorer))
        elif name in SUB_PAGES:
            self.page = replace(page, kind=Kind(name))
        elif product:
            # Of several options with the same value the last one gets it, as in the original.
            *_, option = (option for option, values in product.options.items() if name in values)
            self.page = replace(page, chosen=page.chosen | {option: name})
        return ""

    def close(self) -> None:
        self.page = replace(self.page, kind=Kind.CLOSED)

    def _search_page(self) -> Page:
        return Page(Kind.SEARCH, self._goal.instruction, page_size=self._page_size)

    def _result_page(self, words: str, number: int, seen: frozenset[str]) -> Page:
        first, size = (number - 1) * self._page_size, self._page_size
        listed = tuple(self._shop.product(n) for n in self._results[first : first + size])
        count, instruction = len(self._results), self._goal.instruction
        return Page(Kind.RESULTS, instruction, words, number, count, listed, seen=seen, page_size=size)

    def _why_not(self, name: str) -> str:
        kind = self.page.kind
        if name == BUY or name in SUB_PAGES:
            return f"there is no {name!r} on this page, open a product first"
        if kind == Kind.SEARCH:
            return "there is nothing to click on the search page, search[...] first"
        if kind == Kind.RESULTS and name not in (NEXT, PREVIOUS):
            return f"there is no product {name[:60]!r} on this page of results"
        return f"there is no {name[:60]!r} to click on this page"
