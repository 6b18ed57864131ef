"""The shop as an environment: the policy's text goes in, a page comes out, a perfect purchase pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spear_rl.envs.webshop.action import said_action
from spear_rl.envs.webshop.data.product import Goal
from spear_rl.envs.webshop.data.shelf import Shop
from spear_rl.envs.webshop.session import MAX_TURNS, PAGE_SIZE, Kind, Session
from spear_rl.envs.webshop.views import SEPARATOR, VIEWS
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

REWARD = 10.0
SEARCH_FORM = "search[<your query>]"
"""How a search is listed among the possible actions; said as it is, it searches for these very words."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How an episode is played and paid."""

    view: str = "text"
    reward: float = REWARD
    pays: Literal["success", "score"] = "success"
    """reward * [score = 1], or reward * score."""
    max_turns: int = MAX_TURNS
    page_size: int = PAGE_SIZE


class WebShopEnv:
    """One visit to the shop."""

    __slots__ = ("_begin", "_rules", "_session", "_view")

    def __init__(self, begin: Callable[[], tuple[Shop, Goal]], rules: Rules = Rules()) -> None:  # noqa: B008 - frozen
        self._begin, self._rules, self._view = begin, rules, VIEWS[rules.view]
        self._session: Session | None = None

    def reset(self) -> Observation:
        shop, goal = self._begin()
        self._session = Session(shop, goal, page_size=self._rules.page_size, max_turns=self._rules.max_turns)
        return self._observation(self._session)

    def step(self, action: str) -> StepResult:
        """Act; what cannot be done changes nothing but the number of turns left, and says why."""
        session = self._session
        if session is None:
            seen = Observation("Nothing happened: the shop is closed, reset() opens it.", state_key="closed")
            return StepResult(seen, done=True, invalid=INADMISSIBLE, success=False, metrics={"score": 0.0})
        said = said_action(action)
        why = session.act(said)
        return self._result(session, why, said.invalid or (INADMISSIBLE if why else ""))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _result(self, session: Session, why: str, invalid: str) -> StepResult:
        verdict = session.page.score
        total = verdict.total if verdict else 0.0
        is_won = verdict is not None and verdict.is_success
        # A purchase is paid once: when it is made.
        earned = 0.0 if invalid else float(is_won) if self._rules.pays == "success" else total
        return StepResult(
            self._observation(session, why),
            reward=self._rules.reward * earned,
            done=not session.is_open,
            used_tool=not invalid,
            invalid=invalid,
            success=is_won,
            metrics={"score": total},
        )

    def _observation(self, session: Session, why: str = "") -> Observation:
        page = session.page
        text = self._view(page)
        if why:
            glue = SEPARATOR if self._rules.view == "text" else "\n"
            text = f"Nothing happened: {why}.{glue}{text}"
        searches = (SEARCH_FORM,) if page.kind == Kind.SEARCH else ()
        return Observation(text, page.state_key, (*searches, *(f"click[{name}]" for name in page.clickable)))
