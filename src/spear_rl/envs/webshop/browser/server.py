"""The server of `spear shop`: pages and forms. Pages run no script and load only their style sheet.

The template escapes every expression: scraped catalogues hold arbitrary text.
"""

import html
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

import jinja2
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from spear_rl.envs.webshop.browser.visits import FullError, Visit, Visits
from spear_rl.envs.webshop.data.product import NO_LIMIT
from spear_rl.envs.webshop.session import SUB_PAGES
from spear_rl.io.escaping import visible
from spear_rl.io.http.look import asset, templates
from spear_rl.io.http.site import SiteServer, said

COOKIE = "spear_shop"
POLICY = (
    "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class ShopServer(SiteServer):
    """Serves one shop to many browsers."""

    def __init__(self, visits: Visits, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__("shop", _routes(visits), policy=POLICY, host=host, port=port)


def _routes(visits: Visits) -> list[Route]:
    def style(request: Request) -> Response:
        own = (resources.files(__package__) / "shop.css").read_text("utf-8")
        return Response(asset("page.css") + own, media_type="text/css")

    def answered(request: Request, body: bytes) -> Response:
        name = request.cookies.get(COOKIE, "")
        known = visits.find(name)
        try:
            name, visit = (name, known) if known else visits.start()
        except FullError:
            return said(503, "The shop is full: come back later.")
        answer: Response = RedirectResponse("/", 303)
        with visit.lock:
            if request.method != "POST":
                answer = HTMLResponse(document(visit))
            elif known:  # a form without our cookie is not from one of our pages
                _act(visit, request.scope["path"], body)
        answer.set_cookie(COOKIE, name, httponly=True, samesite="strict")
        return answer

    async def answer(request: Request) -> Response:
        return await run_in_threadpool(answered, request, await request.body())

    forms = [Route(path, answer, methods=["POST"]) for path in ("/search", "/click", "/task")]
    return [Route("/", answer), Route("/static/shop.css", style), *forms]


def _act(visit: Visit, path: str, body: bytes) -> None:
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=20)
    except ValueError:
        fields = {}
    form = {field: values[-1] for field, values in fields.items()}
    number = form.get("number", "")
    if form.get("acts") != str(visit.num_acts):
        visit.notice = "that page was an earlier one, this is where you are now"
    elif path in ("/search", "/click"):
        visit.act(path[1:], form.get("words", ""))
    elif number.isdecimal() and len(number) < 9:
        visit.open(max(int(number) - 1, 0))


def document(visit: Visit) -> str:
    """The HTML of the page that a visitor sees now."""
    template = _template()
    return template.render(visit=visit, page=visit.session.page, sub_pages=SUB_PAGES, no_limit=NO_LIMIT, site="shop")


def escaped(value: Any) -> Markup:
    """Text for HTML and for attribute values: no markup, no control or bidirectional character."""
    return value if isinstance(value, Markup) else Markup(html.escape(visible(str(value))))


@cache
def _template() -> jinja2.Template:
    made = templates(__package__, ".")
    made.finalize = escaped
    return made.get_template("shop.html.jinja")
