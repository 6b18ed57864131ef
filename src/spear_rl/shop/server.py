"""The web server: forms in, pages out. Standard library only; meant for one's own machine.

Nothing on a page runs or loads anything: no script, no picture, nothing from elsewhere, and the browser is told so.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from spear_rl.errors import UserError
from spear_rl.shop.html import document
from spear_rl.shop.visits import Visit, Visits

COOKIE = "spear_shop"
MAX_FORM = 16_384
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class ShopServer(ThreadingHTTPServer):
    """Serves one shop to any number of browsers."""

    daemon_threads = True

    def __init__(self, visits: Visits, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.visits = visits
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        host, port = self.server_address[0], self.server_address[1]
        return f"http://{host!s}:{port}/"

    def is_own_name(self, host: str) -> bool:
        """Whether a Host header names this server: another site's name that leads here must not act for its visitor."""
        name = urlsplit(f"//{host}").hostname
        bound = str(self.server_address[0])
        return bound in ("0.0.0.0", "::") or name in (bound, "localhost", "127.0.0.1", "::1")


class _Handler(BaseHTTPRequestHandler):
    server: ShopServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._is_meant_for_us():
            return
        if path == "/style.css":
            style = (resources.files("spear_rl.shop") / "style.css").read_bytes()
            self._answer(200, style, "text/css; charset=utf-8")
        elif path == "/":
            name, visit = self._visit()
            with visit.lock:
                page = document(visit)
            self._answer(200, page.encode(), cookie=name)
        else:
            self._answer(404, b"There is no such page.", "text/plain; charset=utf-8")

    def do_POST(self) -> None:
        form = self._form()
        if form is None or not self._is_meant_for_us():
            return
        name, visit = self._visit()
        with visit.lock:
            self._act(visit, urlsplit(self.path).path, form)
        self._answer(303, b"", cookie=name, location="/")

    def _act(self, visit: Visit, path: str, form: dict[str, str]) -> None:
        if form.get("acts") != str(visit.num_acts):
            visit.notice = "that page was an earlier one, this is where you are now"
        elif path == "/search":
            visit.act("search", form.get("words", ""))
        elif path == "/click":
            visit.act("click", form.get("words", ""))
        elif path == "/task" and form.get("number", "").isdecimal() and len(form["number"]) < 9:
            visit.open(max(int(form["number"]) - 1, 0))

    def _form(self) -> dict[str, str] | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_FORM:
            self.close_connection = True
            self._answer(413, b"The form is too long.", "text/plain; charset=utf-8")
            return None
        try:
            fields = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"), max_num_fields=20)
        except ValueError:
            fields = {}
        return {name: values[-1] for name, values in fields.items()}

    def _is_meant_for_us(self) -> bool:
        origin, host = self.headers.get("Origin"), self.headers.get("Host", "")
        is_foreign = origin not in (None, "null") and urlsplit(str(origin)).netloc != host
        if self.server.is_own_name(host) and not is_foreign:
            return True
        self._answer(403, b"This request was made for another site.", "text/plain; charset=utf-8")
        return False

    def _visit(self) -> tuple[str, Visit]:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        known = self.server.visits.known(cookie.value) if cookie else None
        return (cookie.value, known) if cookie and known else self.server.visits.begun()

    def _answer(
        self, status: int, body: bytes, kind: str = "text/html; charset=utf-8", *, cookie: str = "", location: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if cookie:
            self.send_header("Set-Cookie", f"{COOKIE}={cookie}; Path=/; HttpOnly; SameSite=Strict")
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is for people."""


def served(visits: Visits, *, host: str, port: int) -> ShopServer:
    """A server that is bound to its address and waits for `serve_forever`."""
    try:
        return ShopServer(visits, host=host, port=port)
    except (OSError, OverflowError) as error:
        raise UserError(f"the shop cannot open at {host}, port {port}: {error}; choose another --port") from error
