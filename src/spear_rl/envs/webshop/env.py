"""The shop as an environment: free text in, pages out, a reward for the purchase."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spear_rl.envs.webshop.data.product import Goal
from spear_rl.envs.webshop.data.shop import Shop
from spear_rl.envs.webshop.session import MAX_TURNS, PAGE_SIZE, Kind, Session, parsed_action
from spear_rl.envs.webshop.views import SEPARATOR, VIEWS
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

REWARD = 10.0
SEARCH_FORM = "search[<your query>]"  # in the list of possible actions; said like this, it searches for these words

METRICS = {"score": "Mean score of a purchase between 0 and 1; 0 for an episode without one (`webshop` only)."}


@dataclass(frozen=True, slots=True)
class Rules:
    """How an episode is shown and rewarded."""

    view: str = "text"
    reward: float = REWARD
    pays: Literal["success", "score"] = "success"  # reward * [score = 1], or reward * score
    max_turns: int = MAX_TURNS
    page_size: int = PAGE_SIZE
    scorer: str = "spear"  # one of SCORERS


class WebShopEnv:
    def __init__(self, open_: Callable[[], tuple[Shop, Goal]], rules: Rules = Rules()) -> None:  # noqa: B008 - frozen
        self._open, self._rules, self._view = open_, rules, VIEWS[rules.view]
        self._session: Session | None = None

    def reset(self) -> Observation:
        rules = self._rules
        self._session = Session(
            *self._open(), page_size=rules.page_size, max_turns=rules.max_turns, scorer=rules.scorer
        )
        return self._observation(self._session)

    def step(self, action: str) -> StepResult:
        """Act; an action that cannot be done takes a turn and returns why, and changes nothing else."""
        session = self._session
        if session is None:
            closed = Observation("Nothing happened: the shop is closed, reset() opens it.", state_key="closed")
            return StepResult(closed, done=True, invalid=INADMISSIBLE, success=False, metrics={"score": 0.0})
        parsed = parsed_action(action)
        why = session.act(parsed)
        invalid = parsed.invalid or (INADMISSIBLE if why else "")
        score = session.page.score
        total, success = (score.total, score.is_success) if score else (0.0, False)
        # A purchase is rewarded once: when it is made.
        earned = 0.0 if invalid else float(success) if self._rules.pays == "success" else total
        return StepResult(
            self._observation(session, why),
            reward=self._rules.reward * earned,
            done=not session.is_open,
            used_tool=not invalid,
            invalid=invalid,
            success=success,
            metrics={"score": total},
            action="" if parsed.invalid else f"{parsed.verb}[{parsed.words}]",
        )

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _observation(self, session: Session, why: str = "") -> Observation:
        page = session.page
        text = self._view(page)
        if why:
            separator = SEPARATOR if self._rules.view == "text" else "\n"
            text = f"Nothing happened: {why}.{separator}{text}"
        searches = (SEARCH_FORM,) if page.kind == Kind.SEARCH else ()
        return Observation(text, page.state_key, (*searches, *(f"click[{name}]" for name in page.clickable)))
