"""The shop's pages as HTML. The template escapes every expression: scraped catalogues hold arbitrary text."""

import html
from functools import cache
from importlib import resources
from typing import Any

from spear_rl.envs.webshop.browser.visits import Visit
from spear_rl.envs.webshop.data.optional import package
from spear_rl.envs.webshop.data.product import NO_LIMIT
from spear_rl.envs.webshop.session import SUB_PAGES
from spear_rl.io.escaping import visible


def escape(text: str) -> str:
    """Text for HTML and for attribute values: no markup, no control or bidirectional character."""
    return html.escape(visible(text))


def document(visit: Visit) -> str:
    """The page that a visit is on."""
    return str(_template().render(visit=visit, page=visit.session.page, sub_pages=SUB_PAGES, no_limit=NO_LIMIT))


@cache
def _template() -> Any:
    jinja2, markup = package("jinja2"), package("markupsafe").Markup

    def escaped(value: Any) -> Any:
        return value if isinstance(value, markup) else markup(escape(str(value)))

    options = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
    environment = jinja2.Environment(autoescape=True, finalize=escaped, **options)
    return environment.from_string((resources.files(__package__) / "page.html.jinja").read_text("utf-8"))
