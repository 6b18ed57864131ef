"""One visit per browser, found by an unguessable name. Knows neither HTTP nor HTML."""

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from spear_rl.envs.webshop import SPLITS, Source, page_size_of
from spear_rl.envs.webshop.data.product import Goal
from spear_rl.envs.webshop.data.shop import Shop, open_shop
from spear_rl.envs.webshop.data.words import lowered
from spear_rl.envs.webshop.session import PAGE_SIZE, Action, Session
from spear_rl.io.escaping import visible
from spear_rl.settings.ranges import require_known

MAX_VISITS = 500
IDLE_SECONDS = 3600.0  # a visit that was idle for so long may be removed to make room for a new one


class FullError(Exception):
    """There are MAX_VISITS active visits."""


class Visit:
    """One browser's tasks and scores."""

    def __init__(self, shop: Shop, numbers: Sequence[int], *, page_size: int) -> None:
        self._shop, self._numbers, self._page_size = shop, numbers, page_size
        self.num_tasks, self.lock = len(numbers), threading.Lock()
        self.used_at = time.monotonic()
        self.num_acts = 0  # actions and opened tasks; a form with another count comes from an earlier page
        self.scores: list[float] = []
        self.open(0)

    @property
    def has_acted(self) -> bool:
        """Whether removing the visit would lose anything: the first task is opened without an action."""
        return self.num_acts > 1

    def open(self, place: int) -> None:
        """Start the task at this place in the list."""
        self.place = place % self.num_tasks
        self.goal: Goal = self._shop.goal(self._numbers[self.place])
        self.session = Session(self._shop, self.goal, page_size=self._page_size)
        self.notice = ""
        self.num_acts += 1

    def act(self, verb: str, words: str) -> None:
        """Search or click as an agent would; a button may be named by its escaped text."""
        was_open = self.session.is_open
        words = lowered(words)
        if verb == "click" and words not in self.session.page.clickable:
            words = {lowered(visible(name)): name for name in self.session.page.clickable}.get(words, words)
        self.notice = self.session.act(Action(verb, words))
        self.num_acts += 1
        if was_open and not self.session.is_open:
            score = self.session.page.score
            self.scores.append(score.total if score else 0.0)


class Visits:
    """All visits by name.

    Anonymous requests cannot end a visit: a new one replaces only idle visits and those without an action, or is
    refused. Names are signed: a visit that was removed before its first action starts again under its name.
    """

    def __init__(self, shop: Shop, numbers: Sequence[int], *, page_size: int = PAGE_SIZE) -> None:
        self._new_visit = partial(Visit, shop, numbers, page_size=page_size)
        self._visits: OrderedDict[str, Visit] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)

    def find(self, name: str) -> Visit | None:
        """The visit with this name; None if the name is not one of ours."""
        with self._lock:
            if visit := self._visits.get(name):
                self._visits.move_to_end(name)
                visit.used_at = time.monotonic()
                return visit
        return self._add(name) if self._is_ours(name) else None

    def start(self) -> tuple[str, Visit]:
        """A new visit and its name; FullError if there is no room."""
        number = secrets.token_urlsafe(24)
        name = f"{number}.{self._signature(number)}"
        return name, self._add(name)

    def _add(self, name: str) -> Visit:
        visit = self._new_visit()
        with self._lock:
            if name not in self._visits and len(self._visits) >= MAX_VISITS:
                del self._visits[self._removable()]
            return self._visits.setdefault(name, visit)

    def _removable(self) -> str:
        for name, visit in self._visits.items():
            if not visit.has_acted or time.monotonic() - visit.used_at > IDLE_SECONDS:
                return name
        raise FullError

    def _signature(self, number: str) -> str:
        return hmac.new(self._key, number.encode(), hashlib.sha256).hexdigest()

    def _is_ours(self, name: str) -> bool:
        number, _, signature = name.rpartition(".")
        return name.isascii() and hmac.compare_digest(signature, self._signature(number))


def visits_of(split: str, source: Source, *, cache: str = "") -> Visits:
    """Visits to the shop made from `source`, with the tasks of a split."""
    require_known("split", split, SPLITS, what="split")
    shop = open_shop(source, cache)
    return Visits(shop, [int(number) for number in shop.split(split)], page_size=page_size_of(source))
