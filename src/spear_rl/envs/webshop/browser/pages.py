"""The shop's pages as HTML. The template escapes every expression: scraped catalogues hold arbitrary text."""

from __future__ import annotations

import html
from functools import cache
from importlib import resources
from typing import Any

from spear_rl.envs.webshop.browser.visits import Visit
from spear_rl.envs.webshop.data.optional import package
from spear_rl.envs.webshop.data.product import NO_LIMIT, Goal
from spear_rl.envs.webshop.score import Score
from spear_rl.envs.webshop.session import BACK, NEXT, PREVIOUS, SUB_PAGES, Kind
from spear_rl.io.escaping import visible

_BUTTONS = {BACK: "Back to Search", PREVIOUS: "< Prev", NEXT: "Next >"}
_TITLES = {Kind.ITEM: "Product", Kind.CLOSED: "Your score"}


def escape(text: str) -> str:
    """Text for HTML and for attribute values: no markup, no control or bidirectional character."""
    return html.escape(visible(text))


def document(visit: Visit) -> str:
    """The page that a visit is on."""
    page = visit.session.page
    text: str = _template().render(
        visit=visit,
        page=page,
        title=_TITLES.get(page.kind, page.kind.capitalize()),
        turns_left=visit.session.turns_left,
        mean_score=sum(visit.scores) / max(len(visit.scores), 1),
        buttons=_BUTTONS,
        sub_pages=SUB_PAGES,
        num_pages=max(-(-page.num_results // page.page_size), 1),
        score=page.score,
        conditions=_conditions(page.score, visit.goal) if page.score else [],
    )
    return text


def _conditions(score: Score, goal: Goal) -> list[tuple[str, bool]]:
    """What the goal asks for, and whether the purchase has it."""
    limit = "no price limit" if goal.price_limit == NO_LIMIT else f"costs at most {goal.price_limit:.2f} dollars"
    return [
        *((f"has “{name}”", is_met) for name, is_met in score.attributes.items()),
        *((f"option “{name}” chosen", is_met) for name, is_met in score.options.items()),
        (limit, score.is_affordable),
    ]


@cache
def _template() -> Any:
    jinja2, markup = package("jinja2"), package("markupsafe").Markup

    def escaped(value: Any) -> Any:
        return value if isinstance(value, markup) else markup(escape(str(value)))

    options = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
    environment = jinja2.Environment(autoescape=True, finalize=escaped, **options)
    return environment.from_string((resources.files(__package__) / "page.html.jinja").read_text("utf-8"))
