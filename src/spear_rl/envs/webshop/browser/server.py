"""The web server of the shop, for one's own machine. Pages run no script and load nothing but their style sheet.

A malformed request is answered by one line, and no request holds a thread for longer than its time-out.
"""

import contextlib
import io
import logging
import re
import socket
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spear_rl.envs.webshop.browser.pages import document
from spear_rl.envs.webshop.browser.visits import FullError, Visit, Visits
from spear_rl.errors import UserError
from spear_rl.io.http import DeadlineReader
from spear_rl.io.http.guard import HEADERS, address_in, is_own_name, name_in, shared_style

COOKIE = "spear_shop"
MAX_FORM = 16_384
MAX_CONNECTIONS = 128
_HEADERS = HEADERS | {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
}
_TEXT = "text/plain; charset=utf-8"
_LENGTH = re.compile(r"[0-9]+")


class ShopServer(ThreadingHTTPServer):
    """Serves one shop to many browsers."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, visits: Visits, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.visits = visits
        self._connections = BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the thread cannot be started
            self._connections.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients that hang up are not logged
            logging.getLogger(__name__).exception("a request could not be answered")


class _RefusedError(Exception):
    """Its arguments are the status and the one line of the answer."""


class _Handler(BaseHTTPRequestHandler):
    server: ShopServer
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds to receive a whole request, and to send an answer

    def setup(self) -> None:
        super().setup()
        self._reader = DeadlineReader(self.connection, self.rfile.detach(), until=0.0)
        self.rfile = io.BufferedReader(self._reader)
        self._is_refused = False

    def handle_one_request(self) -> None:
        self._reader.until = time.monotonic() + self.timeout
        super().handle_one_request()

    def _handle(self) -> None:
        try:
            body = self._body()
            try:
                path = urlsplit(self.path).path
            except ValueError:
                raise _RefusedError(400, "The address is malformed.") from None
            if self.command == "GET":
                self._show(path)
            else:
                self._submit(path, body)
        except _RefusedError as refused:
            self._refuse(*refused.args)
        except FullError:
            self._refuse(503, "The shop is full: come back later.")

    do_GET = do_POST = _handle  # noqa: N815 - the names of the base class

    def _show(self, path: str) -> None:
        if path == "/style.css":
            style = shared_style() + (resources.files(__package__) / "style.css").read_text("utf-8")
            self._answer(200, style.encode(), "text/css; charset=utf-8")
        elif path == "/":
            name, visit = self._visit_of_cookie() or self.server.visits.start()
            with visit.lock:
                page = document(visit)
            self._answer(200, page.encode(), cookie=name)
        else:
            self._answer(404, b"There is no such page.", _TEXT)

    def _submit(self, path: str, body: bytes) -> None:
        try:
            fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=20)
        except ValueError:
            fields = {}
        known = self._visit_of_cookie()
        name, visit = known or self.server.visits.start()
        if known:  # a form without our cookie is not from one of our pages
            with visit.lock:
                self._act(visit, path, {field: values[-1] for field, values in fields.items()})
        self._answer(303, b"", cookie=name, location="/")

    def _act(self, visit: Visit, path: str, form: dict[str, str]) -> None:
        number = form.get("number", "")
        if form.get("acts") != str(visit.num_acts):
            visit.notice = "that page was an earlier one, this is where you are now"
        elif path in ("/search", "/click"):
            visit.act(path[1:], form.get("words", ""))
        elif path == "/task" and number.isdecimal() and len(number) < 9:
            visit.open(max(int(number) - 1, 0))

    def _body(self) -> bytes:
        """The body of a well-formed request for this server."""
        host, origin, length = (self._header(name) for name in ("Host", "Origin", "Content-Length"))
        if self.headers.defects or self.request_version == "HTTP/0.9":
            raise _RefusedError(400, "The request cannot be read.")
        if "Transfer-Encoding" in self.headers:
            raise _RefusedError(400, "Transfer-Encoding is not understood here: send a Content-Length.")
        name = name_in(host or "")
        if name is None:
            raise _RefusedError(400, "The Host header is missing or malformed.")
        if not _LENGTH.fullmatch("0" if length is None and self.command == "GET" else length or ""):
            raise _RefusedError(400, "The Content-Length header is missing or malformed.")
        if length and (len(length) > 9 or int(length) > MAX_FORM):
            raise _RefusedError(413, "The form is too long.")
        came_from = address_in(origin or "")
        if origin not in (None, "null") and came_from is None:
            raise _RefusedError(400, "The Origin header is malformed.")
        try:
            body = self.rfile.read(int(length or 0))
        except TimeoutError:
            raise _RefusedError(408, "The request took too long.") from None
        if len(body) < int(length or 0):
            raise _RefusedError(400, "The form is shorter than its Content-Length.")
        is_foreign = origin is not None and came_from != str(host).lower()
        if is_foreign or not is_own_name(name, str(self.server.server_address[0])):
            raise _RefusedError(403, "This request was made for another site.")
        return body

    def _header(self, name: str) -> str | None:
        values = self.headers.get_all(name, [])
        if len(values) > 1:
            raise _RefusedError(400, f"There is more than one {name} header.")
        return str(values[0]).strip(" \t") if values else None

    def _visit_of_cookie(self) -> tuple[str, Visit] | None:
        for part in ";".join(self.headers.get_all("Cookie", [])).split(";"):
            name, _, value = part.strip().partition("=")
            if name == COOKIE and (visit := self.server.visits.find(value)):
                return value, visit
        return None

    def finish(self) -> None:
        if self._is_refused:  # closing with unread bytes would reset the connection before the answer is read
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                self._reader.until = time.monotonic() + 1
                for _ in range(64):
                    if not self.rfile.read1(65536):
                        break
        super().finish()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The base class's own errors, also as one line."""
        self._refuse(code, f"{HTTPStatus(code).phrase}.")

    def _refuse(self, status: int, line: str) -> None:
        # Closes, so that the rest of the request is not taken for the next one.
        self.close_connection, self.request_version, self._is_refused = True, self.protocol_version, True
        self._answer(status, line.encode(), _TEXT)

    def _answer(
        self, status: int, body: bytes, kind: str = "text/html; charset=utf-8", *, cookie: str = "", location: str = ""
    ) -> None:
        self.connection.settimeout(self.timeout)
        headers = dict(_HEADERS)
        if cookie:
            headers["Set-Cookie"] = f"{COOKIE}={cookie}; Path=/; HttpOnly; SameSite=Strict"
        if location:
            headers["Location"] = location
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in (headers | {"Content-Type": kind, "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def served(visits: Visits, *, host: str, port: int) -> ShopServer:
    """A server that is bound to its address; call its `serve_forever`."""
    try:
        return ShopServer(visits, host=host, port=port)
    except (OSError, OverflowError) as error:
        raise UserError(f"the shop cannot open at {host}, port {port}: {error}; choose another --port") from error
