"""The server of `spear view`: addresses, and who may ask. It only reads, and answers GET alone.

Bound to this machine, it answers to the machine's own names: a foreign Host is DNS rebinding, a foreign Origin another
site's script. Bound elsewhere, it wants a token besides.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spear_rl.app.show.view import pages
from spear_rl.app.show.view.runs import Run, Runs
from spear_rl.errors import UserError
from spear_rl.io.http.guard import HEADERS, address_in, is_loopback, is_own_name, name_in

COOKIE = "spear_view"
_HEADERS = HEADERS | {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
}
ASSETS = {
    "view.css": "text/css",
    "uPlot.min.css": "text/css",
    "view.js": "text/javascript",
    "uPlot.min.js": "text/javascript",
}
MAX_COMPARED = 12


@dataclass
class Guard:
    """Refuses requests made for another site, and without the token where one is needed."""

    app: ASGIApp
    host: str
    token: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = self._refusal(Request(scope))
            if refused is not None:
                await refused(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
        name = name_in(hosts[0]) if len(hosts) == 1 else None
        # Bound to all addresses, the token keeps others out: a name that resolves here has no cookie of ours.
        if name is None or not is_own_name(name, self.host):
            return _said(403, "This request was made for another site.")
        if origins and [address_in(origin) for origin in origins] != [hosts[0].lower()]:
            return _said(403, "This request was made by another site.")
        if request.headers.get("sec-fetch-site", "none") == "cross-site" and request.url.path.startswith("/data/"):
            return _said(403, "This request was made by another site.")
        if not self.token:
            return None
        given = request.query_params.get("token", "")
        if hmac.compare_digest(given.encode(), self.token.encode()):
            rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            answer = RedirectResponse(f"/{request.url.path.lstrip('/')}?{urlencode(rest)}", 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return _with_headers(answer)
        if not hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self.token.encode()):
            return _said(403, "The address needs its token: open the one that `spear view` printed.")
        return None


def _with_headers(answer: Response) -> Response:
    answer.headers.update(_HEADERS)
    return answer


def _said(status: int, sentence: str) -> Response:
    return _with_headers(PlainTextResponse(f"{sentence}\n", status))


def application(root: Path, *, host: str = "127.0.0.1", token: str = "") -> ASGIApp:
    """The pages of the runs in a folder, as an ASGI application."""
    runs, lock = Runs(root), Lock()
    for name in pages.templates().list_templates():
        pages.templates().get_template(name)  # compiled before the first request

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

    def episodes(request: Request) -> Response:
        chosen = asked(request, episodes=True)
        if not chosen:
            return RedirectResponse("/", 303)
        return HTMLResponse(pages.episodes_page(chosen, pages.Query.of(request.query_params)))

    def episode(request: Request) -> Response:
        chosen, given = asked(request, episodes=True), request.query_params
        step, number = given.get("step", ""), given.get("episode", "")
        if not chosen or not re.fullmatch(r"[0-9]{1,9}", step) or not re.fullmatch(r"[0-9]{1,9}", number):
            return _said(404, "There is no such episode.")
        colour, full = given.get("colour", "advantage"), given.get("full") == "1"
        found = pages.episode_page(chosen[0], int(step), int(number), colour=colour, full=full)
        if found is None:
            why = "; ".join(chosen[0].faults) or "the run has none at this step and place"
            return _said(404, f"There is no such episode: {why}.")
        return HTMLResponse(found)

    def groups(request: Request) -> Response:
        chosen = asked(request, episodes=True)
        if not chosen:
            return RedirectResponse("/", 303)
        return HTMLResponse(pages.groups_page(chosen, pages.Query.of(request.query_params)))

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
            return _said(404, "There is no such file.")
        return Response(pages.asset(name), media_type=ASSETS[name])

    def answered(page: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        def made(request: Request) -> Response:
            with lock:  # an index that is read anew while a page is made would number its rows otherwise
                return page(request)

        async def answer(request: Request) -> Response:
            try:
                return _with_headers(await run_in_threadpool(made, request))
            except KeyError:
                return _said(404, "There is no such run in this folder.")
            except OSError as error:
                return _said(500, f"A file cannot be read: {error.strerror}.")

        return answer

    routes = {
        "/": index, "/curves": curves, "/episodes": episodes, "/episode": episode, "/groups": groups,
        "/replays": replays, "/data/state": state,
        "/data/curves": curves_data, "/static/{name}": static,
    }  # fmt: skip
    app = Starlette(
        routes=[Route(path, answered(page), methods=["GET"]) for path, page in routes.items()],
        exception_handlers={404: _missing, 405: _missing, 500: _failed},
    )
    return Guard(app, host, token)


def _missing(request: Request, error: Exception) -> Response:
    return _said(404, "There is no such page.")


def _failed(request: Request, error: Exception) -> Response:
    return _said(500, "The page cannot be made.")


class ViewServer:
    """A server that is bound to its address; call `serve`."""

    def __init__(self, root: Path, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.token = token if token is not None else "" if is_loopback(host) else secrets.token_urlsafe(18)
        app = application(root, host=host, token=self.token)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            raise UserError(f"spear view cannot open at {host}, port {port}: {error}; choose another --port") from error
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", server_header=False)
        self.server = uvicorn.Server(config)
        shown = f"[{host}]" if ":" in host else host
        query = f"?token={self.token}" if self.token else ""
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}/{query}"

    def serve(self) -> None:
        """Answer until a signal."""
        with contextlib.suppress(KeyboardInterrupt):
            self.server.run(sockets=[self._socket])
