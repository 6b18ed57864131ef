"""HTTP client for untrusted servers: bounded time and size, no redirects. Standard library only."""

import io
import socket
import time
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

MAX_BODY = 16 << 20
"""Most bytes of an answer."""


class DeadlineReader(io.RawIOBase):
    """A connection's bytes; TimeoutError once `until` has passed. A socket's own time-out starts anew with every byte.

    Args:
        raw: what `connection.makefile` reads from; it keeps the connection open until it is closed.
        until: on the clock of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, raw: io.RawIOBase, *, until: float) -> None:
        self._connection, self._raw, self.until = connection, raw, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._connection.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._raw.close()


def bounded_opener() -> OpenerDirector:
    """An opener whose answers, head and body, must arrive within the time-out of the request."""
    return build_opener(_NoRedirects, _Http, _Https)


def bounded_body(response: Any) -> bytes:
    """The body of an answer; one byte more than `MAX_BODY` means that it is too long."""
    body: bytes = response.read(MAX_BODY + 1)
    if len(body) <= MAX_BODY and response.length:
        raise IncompleteRead(body, response.length)
    return body


class _Response(HTTPResponse):
    def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        until = time.monotonic() + (sock.gettimeout() or float("inf"))
        self.fp = io.BufferedReader(DeadlineReader(sock, self.fp.detach(), until=until))


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Http(HTTPHandler):
    def http_open(self, req: Request) -> Any:
        return self.do_open(_Connection, req)


class _Https(HTTPSHandler):
    def https_open(self, req: Request) -> Any:
        return self.do_open(_SecureConnection, req)


class _NoRedirects(HTTPRedirectHandler):
    """Redirects are errors: one could send the API key to another server."""

    def http_error_302(self, req: Request, fp: Any, code: int, msg: str, headers: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302
