"""A local web server: Starlette routes behind a guard, served by uvicorn with limits on size and time.

Needs the extra `view`. A request that is refused is answered in one line; one that is slow is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from spear_rl.errors import UserError
from spear_rl.io.http.guard import HEADERS, address_in, is_loopback, is_own_name, name_in

MAX_BODY = 16_384
MAX_CONNECTIONS = 128
SECONDS = 10.0
"""To receive a whole request, and between two looks at whether a client still reads its answer."""
LINGER = 1.0
"""Seconds in which a client that is still sending can read why it was refused."""
_LENGTH = re.compile(r"[0-9]{1,9}")
_NO_SITE = ("null", "file://")
"""Origins of a sandboxed frame and of a file on disk: well-formed, and never ours."""


def said(status: int, sentence: str) -> Response:
    """One line; the connection ends with it."""
    return PlainTextResponse(sentence, status, {"Connection": "close"})


def site(name: str, routes: Sequence[BaseRoute], *, policy: str, host: str, token: str = "") -> ASGIApp:
    """The pages of `spear NAME` as an ASGI application that refuses requests of other sites.

    Args:
        policy: the Content-Security-Policy of its pages.
        host: the address that it will be bound to.
        token: without it nothing is answered, if there is one.
    """
    sentences = {
        404: "There is no such page.",
        405: "This page does not answer such a request.",
        500: "The page cannot be made.",
    }

    def failed(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 500)
        return said(status, sentences[status])

    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(sentences, failed))
    return Guard(app, name, host, token, HEADERS | {"Content-Security-Policy": policy})


@dataclass
class Guard:
    """Refuses what is malformed, what was made for another site, and who has no token where one is needed."""

    app: ASGIApp
    name: str
    host: str
    token: str
    headers: Mapping[str, str]
    """Of every answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        refused = self._malformed(Request(scope)) or self._foreign(Request(scope))
        if refused is not None:
            await _discard_body(receive)
        with contextlib.suppress(ClientDisconnect):
            await (refused or self.app)(scope, receive, answer)

    def _malformed(self, request: Request) -> Response | None:
        if request.scope["http_version"] not in ("1.0", "1.1"):
            return said(505, "This version of HTTP is not understood here.")
        if not request.scope["path"].startswith("/"):
            return said(400, "The address is malformed.")
        if "transfer-encoding" in request.headers:
            return said(400, "Transfer-Encoding is not understood here: send a Content-Length.")
        length = request.headers.get("content-length", "" if request.method == "POST" else "0")
        if not length:
            return said(400, "The Content-Length header is missing.")
        if not _LENGTH.fullmatch(length) or int(length) > MAX_BODY:
            return said(413, "The request is too long.")
        hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
        if len(hosts) != 1 or name_in(hosts[0]) is None:
            return said(400, "The Host header is missing or malformed.")
        if len(origins) > 1 or any(origin not in _NO_SITE and address_in(origin) is None for origin in origins):
            return said(400, "The Origin header is malformed.")
        return None

    def _foreign(self, request: Request) -> Response | None:
        host, origin = request.headers["host"], request.headers.get("origin")
        # Bound to all addresses, the token keeps others out: a name that resolves here has no cookie of ours.
        if not is_own_name(name_in(host) or "", self.host):
            return said(403, "This request was made for another site.")
        if origin is not None and address_in(origin) != host.lower():
            return said(403, "This request was made by another site.")
        path = request.scope["path"]
        if request.headers.get("sec-fetch-site", "none") == "cross-site" and path.startswith("/data/"):
            return said(403, "This request was made by another site.")
        if not self.token:
            return None
        cookie, given = f"spear_{self.name}_token", request.query_params.get("token", "")
        if hmac.compare_digest(given.encode(), self.token.encode()):
            rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            answer = RedirectResponse(f"/{path.lstrip('/')}?{urlencode(rest)}", 303)
            answer.set_cookie(cookie, self.token, httponly=True, samesite="strict")
            return answer
        if not hmac.compare_digest(request.cookies.get(cookie, "").encode(), self.token.encode()):
            return said(403, f"The address needs its token: open the one that `spear {self.name}` printed.")
        return None


async def _discard_body(receive: Receive) -> None:
    """Closing with unread bytes would reset the connection before the answer is read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            for _ in range(256):
                if not (await receive()).get("more_body"):
                    return


class _BoundedProtocol(H11Protocol):  # type: ignore[misc]
    """uvicorn's, with time-outs for slow requests and unread answers, and a one-line 400 for what cannot be parsed."""

    _timer: asyncio.TimerHandle | None = None
    _unsent = 0
    _is_refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look_later()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(SECONDS, self._look)

    def _look(self) -> None:
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        is_unasked = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)  # no request, or one that is not whole
        if before == self._unsent if self._unsent else is_unasked:
            self.transport.abort()
        else:
            self._look_later()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """The end of a request that cannot be read; what follows it is not read."""
        self._is_refused = True
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        line = b"The request cannot be read."
        headers = HEADERS | {"Content-Type": "text/plain", "Content-Length": str(len(line)), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n".encode() + line)
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.close)


class SiteServer:
    """A site that is bound to its address; call `serve`. Bound elsewhere than to this machine, it makes a token."""

    def __init__(
        self, name: str, routes: Sequence[BaseRoute], *, policy: str, host: str, port: int, token: str | None = None
    ) -> None:
        self.token = token if token is not None else "" if is_loopback(host) else secrets.token_urlsafe(18)
        app = site(name, routes, policy=policy, host=host, token=self.token)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except (OSError, OverflowError) as error:
            message = f"spear {name} cannot open at {host}, port {port}: {error}; choose another --port"
            raise UserError(message) from error
        config = uvicorn.Config(
            app, http=_BoundedProtocol, ws="none", lifespan="off", limit_concurrency=MAX_CONNECTIONS,
            log_level="error", access_log=False, server_header=False,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        shown = f"[{host}]" if ":" in host else host
        query = f"?token={self.token}" if self.token else ""
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}/{query}"

    def serve(self) -> None:
        """Answer until a signal."""
        with contextlib.suppress(KeyboardInterrupt):
            self.server.run(sockets=[self._socket])
