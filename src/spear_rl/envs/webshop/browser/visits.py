"""Who is shopping: one visit a browser, known by an unguessable name. Knows neither HTTP nor HTML."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from spear_rl.envs.webshop import SPLITS, Source, page_size_of
from spear_rl.envs.webshop.action import Said
from spear_rl.envs.webshop.data.product import Goal
from spear_rl.envs.webshop.data.shelf import Shop, opened_shop
from spear_rl.envs.webshop.session import MAX_TURNS, PAGE_SIZE, Session
from spear_rl.io.escaping import visible

MAX_VISITS = 500
"""Browsers remembered at once."""
IDLE_SECONDS = 3600.0
"""A visit that was left alone for so long may be forgotten when there is no room for a new one."""


class FullError(Exception):
    """Every visit there is room for is under way."""


class Visit:
    """A browser's way through the tasks."""

    def __init__(self, shop: Shop, numbers: Sequence[int], *, page_size: int, max_turns: int) -> None:
        self._shop, self._numbers, self._page_size, self._max_turns = shop, numbers, page_size, max_turns
        self.lock = threading.Lock()
        self.used_at = time.monotonic()
        self.num_acts = 0
        """Counts everything that was done, so that a form from an earlier page can be told."""
        self.scores: list[float] = []
        self.open(0)

    @property
    def num_tasks(self) -> int:
        return len(self._numbers)

    @property
    def has_acted(self) -> bool:
        """Whether there is anything to lose: opening the first task is the one thing that nobody asked for."""
        return self.num_acts > 1

    def open(self, place: int) -> None:
        """Begin a task of the panel, by its place in it."""
        self.place = place % self.num_tasks
        self.goal: Goal = self._shop.goal(self._numbers[self.place])
        self.session = Session(self._shop, self.goal, page_size=self._page_size, max_turns=self._max_turns)
        self.notice = ""
        self.num_acts += 1

    def act(self, verb: str, words: str) -> None:
        """Search or click as an agent would; a button may be named as the page shows it."""
        was_open = self.session.is_open
        words = _spelled(words)
        if verb == "click" and words not in self.session.page.clickable:
            words = {_spelled(visible(name)): name for name in self.session.page.clickable}.get(words, words)
        self.notice = self.session.act(Said(verb, words))
        self.num_acts += 1
        if was_open and not self.session.is_open:
            score = self.session.page.score
            self.scores.append(score.total if score else 0.0)


class Visits:
    """All visits by name.

    Requests without a name cannot cost anybody a visit: to make room for a new one only visits are forgotten in which
    nothing was done yet, or that were left alone for long; where there is none, the new one is refused. Names are
    signed, so a visit that was forgotten before anything was done begins again under its own name.
    """

    def __init__(
        self, shop: Shop, numbers: Sequence[int], *, page_size: int = PAGE_SIZE, max_turns: int = MAX_TURNS
    ) -> None:
        self._shop, self._numbers, self._page_size, self._max_turns = shop, numbers, page_size, max_turns
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        """The one that was away longest first."""
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)

    def known(self, name: str) -> Visit | None:
        """The visit of a name that was given out here."""
        with self._lock:
            if visit := self._visits.get(name):
                self._visits.move_to_end(name)
                visit.used_at = time.monotonic()
                return visit
        return self._stored(name) if self._is_ours(name) else None

    def begun(self) -> tuple[str, Visit]:
        """A new visit and its name; FullError if there is no room."""
        number = secrets.token_urlsafe(24)
        name = f"{number}.{self._signature(number)}"
        return name, self._stored(name)

    def _stored(self, name: str) -> Visit:
        visit = Visit(self._shop, self._numbers, page_size=self._page_size, max_turns=self._max_turns)
        with self._lock:
            if name not in self._visits and len(self._visits) >= MAX_VISITS:
                del self._visits[self._least()]
            return self._visits.setdefault(name, visit)

    def _least(self) -> str:
        """The visit that matters least."""
        for name, visit in self._visits.items():
            if not visit.has_acted or time.monotonic() - visit.used_at > IDLE_SECONDS:
                return name
        raise FullError

    def _signature(self, number: str) -> str:
        return hmac.new(self._key, number.encode(), hashlib.sha256).hexdigest()

    def _is_ours(self, name: str) -> bool:
        number, _, signature = name.rpartition(".")
        return name.isascii() and hmac.compare_digest(signature, self._signature(number))


def _spelled(words: str) -> str:
    """In lower case, with single spaces."""
    return " ".join(words.lower().split())


def visits_of(split: str, source: Source, *, cache: str = "") -> Visits:
    """Visits to the shop made from `source`, with the tasks of a split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: there is {', '.join(SPLITS)}")
    opened = opened_shop(source, cache)
    return Visits(opened, [int(number) for number in opened.split(split)], page_size=page_size_of(source))
