"""The server of `spear view`: its addresses. It only reads, and answers GET alone; `io.http.site` says who may ask."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from spear_rl.app.show.view import pages
from spear_rl.app.show.view.runs import Run, Runs
from spear_rl.io.http.look import asset, view_style
from spear_rl.io.http.site import SiteServer, said

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
ASSETS = ("view.css", "uPlot.min.css", "view.js", "uPlot.min.js")
MAX_COMPARED = 12


def routes_of(root: Path) -> list[Route]:
    """The pages of the runs in a folder."""
    runs, lock = Runs(root), Lock()
    pages.compiled()

    def asked(request: Request, *, episodes: bool = False) -> list[Run]:
        names = list(dict.fromkeys(request.query_params.getlist("run"))) or (runs.names() if runs.is_single else [])
        kind = request.query_params.get("kind", "")
        return [runs.get(name, kind=kind, episodes=episodes) for name in names[:MAX_COMPARED]]

    def index(request: Request) -> Response:
        if runs.is_single:
            return RedirectResponse(pages.link("/curves", run=runs.root.name), 303)
        return HTMLResponse(pages.runs_page(runs))

    def curves(request: Request) -> Response:
        chosen = asked(request)
        return HTMLResponse(pages.curves_page(chosen)) if chosen else RedirectResponse("/", 303)

    def table(made: Callable[[list[Run], pages.Query], str]) -> Callable[[Request], Response]:
        """A page of what a query selects."""

        def answer(request: Request) -> Response:
            chosen = asked(request, episodes=True)
            if not chosen:
                return RedirectResponse("/", 303)
            return HTMLResponse(made(chosen, pages.Query.of(request.query_params)))

        return answer

    def episode(request: Request) -> Response:
        chosen, given = asked(request, episodes=True), request.query_params
        step, number = given.get("step", ""), given.get("episode", "")
        if not chosen or not re.fullmatch(r"[0-9]{1,9}", step) or not re.fullmatch(r"[0-9]{1,9}", number):
            return said(404, "There is no such episode.")
        colour, full = given.get("colour", "advantage"), given.get("full") == "1"
        found = pages.episode_page(chosen[0], int(step), int(number), colour=colour, full=full)
        if found is None:
            why = "; ".join(chosen[0].faults) or "the run has none at this step and place"
            return said(404, f"There is no such episode: {why}.")
        return HTMLResponse(found)

    def replays(request: Request) -> Response:
        chosen, step = asked(request, episodes=True), request.query_params.get("step", "")
        if not chosen:
            return RedirectResponse("/", 303)
        at = int(step) if re.fullmatch(r"[0-9]{1,9}", step) else None
        return HTMLResponse(pages.replays_page(chosen, at))

    def state(request: Request) -> Response:
        names = asked(request)
        if not names:
            names = [runs.get(name) for name in runs.names()]
        return JSONResponse([[r.name, r.step, len(r.evaluations.by_step), r.is_finished] for r in names])

    def curves_data(request: Request) -> Response:
        return JSONResponse(pages.curves_data(asked(request)))

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return said(404, "There is no such file.")
        text = view_style() if name == "view.css" else asset(name)
        return Response(text, media_type="text/javascript" if name.endswith(".js") else "text/css")

    def answered(page: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            try:
                with lock:  # an index that is read anew while a page is made would number its rows otherwise
                    return page(request)
            except KeyError:
                return said(404, "There is no such run in this folder.")
            except OSError as error:
                return said(500, f"A file cannot be read: {error.strerror}.")

        return answer

    routes = {
        "/": index, "/curves": curves, "/episodes": table(pages.episodes_page), "/episode": episode,
        "/groups": table(pages.groups_page), "/replays": replays, "/data/state": state,
        "/data/curves": curves_data, "/static/{name}": static,
    }  # fmt: skip
    return [Route(path, answered(page), methods=["GET"]) for path, page in routes.items()]


class ViewServer(SiteServer):
    """The pages of the runs in a folder."""

    def __init__(self, root: Path, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        super().__init__("view", routes_of(root), policy=POLICY, host=host, port=port, token=token)
