"""HTTP client of an OpenAI-compatible chat server: retries, bounded time and size, one-sentence errors."""

import json
import math
import random
import socket
import ssl
import time
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from spear_rl.errors import UserError
from spear_rl.io.http import MAX_BODY, bounded_body, bounded_opener

_CHAT = "/chat/completions"
_MAX_WAIT_SECONDS = 60.0
_PERMANENT = (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)
"""Not retried for a server that has never answered."""


class EndpointError(UserError):
    """The server cannot be used: unreachable, wrong key, unknown model."""


class OverlongError(Exception):
    """The conversation does not fit into the model's context."""


class UnansweredError(Exception):
    """A request failed in every attempt."""


class _TemporaryError(Exception):
    """May go away: the request is retried, unless `is_permanent` for a server that has never answered."""

    def __init__(self, reason: str, *, wait: float | None = None, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.is_permanent = wait, is_permanent


class ChatServer:
    """Sends requests and retries temporary failures; thread-safe.

    Args:
        url: up to and including /v1; a query is sent but never shown.
        api_key: sent as a bearer token and never shown; empty sends none.
        timeout: seconds until the whole answer must have arrived.
        num_tries: attempts per request, with exponential backoff.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout: float = 120.0, num_tries: int = 6) -> None:
        try:
            parts = urlsplit(url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or not url.isprintable() or " " in url:
            raise EndpointError(f"{url!r} is no address of an endpoint: write http://host:port/v1")
        if "@" in parts.netloc:
            raise EndpointError("an endpoint's address must not hold a password: put the key into OPENAI_API_KEY")
        path = parts.path.rstrip("/").removesuffix(_CHAT)
        self.name = f"{parts.scheme}://{parts.netloc}{path}"
        """The address without the query, for messages."""
        self._query = f"?{parts.query}" if parts.query else ""
        self._key = api_key.strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise EndpointError("the API key holds characters that no key has: check the variable it comes from")
        self._timeout, self._num_tries = timeout, num_tries
        self._opener = bounded_opener()
        self._has_answered = False

    def models(self) -> list[str]:
        listed = self._answer("/models", None)
        try:
            return [str(entry["id"]) for entry in listed["data"]]
        except (KeyError, TypeError) as error:
            raise EndpointError(f"{self.name} does not list its models as OpenAI's API does") from error

    def choice(self, request: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = self._answer(_CHAT, request)["choices"][0]
        return choice

    def _answer(self, path: str, request: dict[str, Any] | None) -> Any:
        for attempt in range(self._num_tries):
            try:
                answer = self._attempt(path, request)
                self._has_answered = True
                return answer
            except _TemporaryError as error:
                last = error
                if error.is_permanent and not self._has_answered:
                    raise EndpointError(str(error)) from error
            if attempt + 1 < self._num_tries:
                pause = 2.0**attempt * random.uniform(0.5, 1.0) if last.wait is None else last.wait
                time.sleep(min(pause, _MAX_WAIT_SECONDS))
        raise UnansweredError(f"{last} (tried {self._num_tries} times)") from last

    def _attempt(self, path: str, request: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "User-Agent": "spear-rl"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        content = None if request is None else json.dumps(request).encode()
        http_request = Request(f"{self.name}{path}{self._query}", data=content, headers=headers)
        try:
            with self._opener.open(http_request, timeout=self._timeout) as response:
                body = bounded_body(response)
        except HTTPError as error:
            with error:
                raise self._refusal(error) from None  # the request in its traceback carries the key
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise _TemporaryError(f"{self.name} did not answer within {self._timeout:g} seconds") from None
            raise _TemporaryError(
                f"{self.name} is not reachable ({self._shown(str(reason)) or type(reason).__name__}): "
                "is the server running there?",
                is_permanent=isinstance(reason, _PERMANENT),
            ) from None
        if len(body) > MAX_BODY:
            raise _TemporaryError(f"{self.name} answers with more than {MAX_BODY >> 20} MiB", is_permanent=True)
        return self._parsed(body, is_chat=path == _CHAT)

    def _parsed(self, body: bytes, *, is_chat: bool) -> Any:
        try:
            answer = json.loads(body)
            if is_chat:
                content = answer["choices"][0]["message"].get("content")
                if content is not None and not isinstance(content, str):
                    raise TypeError("the content is no text")
            return answer
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            shown = self._shown(body[:4096].decode("utf-8", "replace"))
            raise _TemporaryError(
                f"{self.name} does not answer as OpenAI's chat API does: it said {shown!r}", is_permanent=True
            ) from None

    def _refusal(self, error: HTTPError) -> Exception:
        """The exception for a status other than 200."""
        status, said = error.code, self._reason(error)
        if status in (401, 403):
            lack = "refuses the API key" if self._key else "wants an API key: set OPENAI_API_KEY or --api-key-env"
            return EndpointError(f"{self.name} {lack} ({status}: {said})")
        if status == 404:
            return EndpointError(f"{self.name} knows no such model or address; does it end in /v1? ({status}: {said})")
        if 300 <= status < 400:
            to = self._shown(error.headers.get("Location", "nowhere").partition("?")[0])
            return EndpointError(f"{self.name} redirects to {to}: give the address that answers itself")
        if status in (400, 413) and "context" in said.lower() and any(w in said.lower() for w in ("length", "size")):
            return OverlongError(said)
        if (status in (408, 425, 429) or status >= 500) and "insufficient_quota" not in said:
            return _TemporaryError(f"{self.name} is not able to answer ({status}: {said})", wait=_retry_after(error))
        return EndpointError(f"{self.name} refuses the request ({status}: {said})")

    def _reason(self, error: HTTPError) -> str:
        try:
            text = error.read(65536).decode("utf-8", "replace")
        except (OSError, HTTPException):
            text = ""
        with suppress(ValueError, AttributeError, RecursionError):
            said = json.loads(text)
            said = said.get("error", said)
            if isinstance(said, dict):
                words = [said.get(name) for name in ("message", "detail", "code", "type")]
                said = "; ".join(str(word) for word in words if word not in (None, "", error.code))
            text = str(said)
        return self._shown(text) or str(error.reason)

    def _shown(self, text: str) -> str:
        """A server's text on one line without the key, which some servers repeat."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:300]


def _retry_after(error: HTTPError) -> float | None:
    """The seconds of the Retry-After header, which may be a date; None without a usable one."""
    value = error.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value).astimezone(UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(seconds, 0.0)
