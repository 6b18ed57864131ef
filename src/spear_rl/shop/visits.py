"""Who is shopping: one visit a browser, known by an unguessable name. Knows neither HTTP nor HTML."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence

from spear_rl.envs.webshop import SPLITS, Source, page_size_of
from spear_rl.envs.webshop.action import Said
from spear_rl.envs.webshop.product import Goal
from spear_rl.envs.webshop.session import MAX_TURNS, PAGE_SIZE, Session
from spear_rl.envs.webshop.shelf import Shop, opened_shop

MAX_VISITS = 500
"""Browsers remembered at once; the one that was away longest is forgotten first."""


class Visit:
    """A browser's way through the tasks."""

    def __init__(self, shop: Shop, numbers: Sequence[int], *, page_size: int, max_turns: int) -> None:
        self._shop, self._numbers, self._page_size, self._max_turns = shop, numbers, page_size, max_turns
        self.lock = threading.Lock()
        self.num_acts = 0
        """Counts everything that was done, so that a form from an earlier page can be told."""
        self.scores: list[float] = []
        self.open(0)

    @property
    def num_tasks(self) -> int:
        return len(self._numbers)

    def open(self, place: int) -> None:
        """Begin a task of the panel, by its place in it."""
        self.place = place % self.num_tasks
        self.goal: Goal = self._shop.goal(self._numbers[self.place])
        self.session = Session(self._shop, self.goal, page_size=self._page_size, max_turns=self._max_turns)
        self.notice = ""
        self.num_acts += 1

    def act(self, verb: str, words: str) -> None:
        """Search or click as an agent would."""
        was_open = self.session.is_open
        self.notice = self.session.act(Said(verb, " ".join(words.lower().split())))
        self.num_acts += 1
        if was_open and not self.session.is_open:
            score = self.session.page.score
            self.scores.append(score.total if score else 0.0)


class Visits:
    """All visits by name."""

    def __init__(
        self, shop: Shop, numbers: Sequence[int], *, page_size: int = PAGE_SIZE, max_turns: int = MAX_TURNS
    ) -> None:
        self._shop, self._numbers, self._page_size, self._max_turns = shop, numbers, page_size, max_turns
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, name: str) -> Visit | None:
        with self._lock:
            if name in self._visits:
                self._visits.move_to_end(name)
            return self._visits.get(name)

    def begun(self) -> tuple[str, Visit]:
        """A new visit and its name."""
        name = secrets.token_urlsafe(24)
        visit = Visit(self._shop, self._numbers, page_size=self._page_size, max_turns=self._max_turns)
        with self._lock:
            self._visits[name] = visit
            while len(self._visits) > MAX_VISITS:
                self._visits.popitem(last=False)
        return name, visit


def visits_of(split: str, source: Source, *, cache: str = "") -> Visits:
    """Visits to the shop made from `source`, with the tasks of a split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: there is {', '.join(SPLITS)}")
    opened = opened_shop(source, cache)
    return Visits(opened, [int(number) for number in opened.split(split)], page_size=page_size_of(source))
