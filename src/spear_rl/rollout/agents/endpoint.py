"""An OpenAI-compatible endpoint for the agents of this machine: chat completions, answered by the training thread.

It serves loopback addresses only. A request is parsed and answered in a thread of its connection; between the two it
waits, as a `Call` in a queue, for the thread that drives the engine. The standard library's server is enough: a
waiting thread costs nothing, and there are at most a few hundred agents.
"""

import io
import json
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spear_rl.io.escaping import in_words
from spear_rl.io.http import DeadlineReader
from spear_rl.rollout.agents.messages import MalformedError
from spear_rl.rollout.agents.request import Request, parsed

MAX_BODY = 64 << 20
MAX_UNKNOWN_BODY = 1 << 20
"""Of a request without a valid key."""
MAX_CONNECTIONS = 512
"""Open at once; more wait. A process may often have 1,024 open files, and a trainer needs some itself."""
READ_SECONDS = 30.0
"""For a whole request to arrive once it has begun, and for an answer to be taken."""
LINGER_SECONDS = 1.0
"""For the rest of a request that was refused before it had arrived whole."""
IDLE_SECONDS = 3600.0
"""For the next request of a connection to begin, if it belongs to a running episode; READ_SECONDS otherwise."""


class RefusedError(Exception):
    """A call is refused; its arguments are the status, the sentence and a code."""

    def __init__(self, status: int, sentence: str, code: str = "") -> None:
        super().__init__(status, sentence, code)
        self.status, self.sentence, self.code = status, sentence, code


class Call:
    """A request on its way to the training thread and back."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.answer: dict[str, Any] | None = None
        self.refusal: RefusedError | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Called if the agent has hung up before it is answered."""
        self.done = threading.Event()

    def reply(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.done.set()

    def refuse(self, error: RefusedError) -> None:
        self.refusal = error
        self.done.set()


class Endpoint(ThreadingHTTPServer):
    """Serves sessions, each with a key of its own, and hands their calls to `notice`, from other threads."""

    daemon_threads = True
    request_queue_size = 1024
    block_on_close = False

    def __init__(self, notice: Callable[[Call], None]) -> None:
        self.notice = notice
        self._sessions: dict[str, int] = {}
        self._places, self._is_closed = threading.Semaphore(MAX_CONNECTIONS), False
        self._open: set[Any] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True, name="agent endpoint").start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def open(self, number: int) -> str:
        """The key of a new session."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = number
        return key

    def end(self, key: str) -> None:
        """End a session: its key is not valid any more."""
        self._sessions.pop(key, None)

    def session(self, key: str) -> int | None:
        return self._sessions.get(key)

    @property
    def is_crowded(self) -> bool:
        """Whether connections should end with their answer, so that idle ones leave room."""
        return len(self._open) > MAX_CONNECTIONS // 2

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._places.acquire(timeout=0.2):
            if self._is_closed:
                self.shutdown_request(request)
                return
        self._open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: Any) -> None:
        self._open.discard(request)
        self._places.release()

    def close(self) -> None:
        self._sessions.clear()
        self._is_closed = True
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients that hang up are not logged
            logging.getLogger(__name__).exception("a call of an agent could not be answered")


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"
    timeout = READ_SECONDS
    wbufsize = -1  # head and body in one packet
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._key = ""
        self._reader = DeadlineReader(self.connection, self.rfile.detach(), until=0.0)
        self.rfile = self._buffered = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        is_known = self.server.session(self._key) is not None
        self._reader.until = time.monotonic() + (IDLE_SECONDS if is_known else READ_SECONDS)
        try:
            self._buffered.peek(1)
        except TimeoutError:
            self.close_connection = True
            return
        self._reader.until = time.monotonic() + READ_SECONDS
        super().handle_one_request()

    def do_GET(self) -> None:
        self._guarded(self._models)

    def do_POST(self) -> None:
        self._guarded(self._complete)

    def _guarded(self, act: Callable[[int, bytes], None]) -> None:
        try:
            self._key = self._header("Authorization").removeprefix("Bearer ").strip()
            number = self.server.session(self._key)
            body = self._body(MAX_BODY if number is not None else MAX_UNKNOWN_BODY)
            if number is None:
                raise RefusedError(401, "this API key belongs to no running episode", "invalid_api_key")
            act(number, body)
        except RefusedError as refused:
            self._refuse(refused)

    def _models(self, number: int, body: bytes) -> None:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "spear-rl"}
        answers = {"/v1/models": {"object": "list", "data": [model]}, "/v1/models/policy": model}
        self._send(answers[self._path(answers)])

    def _path(self, known: Iterable[str]) -> str:
        path = self.path.partition("?")[0].rstrip("/")
        if path not in known:
            raise RefusedError(404, "there is POST /v1/chat/completions and GET /v1/models only")
        return path

    def _complete(self, number: int, body: bytes) -> None:
        self._path(["/v1/chat/completions"])
        try:
            request = parsed(json.loads(body))
        except MalformedError as error:
            raise RefusedError(400, str(error)) from error
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body is no JSON: {in_words(error)}") from error
        call = Call(number, request)
        self.server.notice(call)
        while not call.done.wait(1.0):
            if self.server.session(self._key) is None:  # its call is not answered any more
                raise RefusedError(401, "the episode of this API key is over", "invalid_api_key")
        if call.refusal:
            raise call.refusal
        if self._has_hung_up():
            call.on_lost()
            self.close_connection = True
        elif call.answer and request.is_streamed:
            self._stream(call.answer, wants_usage=request.wants_usage)
        else:
            self._send(call.answer)

    def _body(self, most: int) -> bytes:
        """The body of a well-formed request for this server: against DNS rebinding and web pages."""
        name, _, port = self._header("Host").rpartition(":")
        if name not in ("127.0.0.1", "localhost") or port != str(self.server.server_address[1]):
            raise RefusedError(403, "this request was made for another host")
        if "Origin" in self.headers:
            raise RefusedError(403, "web pages are not served")
        if "Transfer-Encoding" in self.headers:
            raise RefusedError(411, "send a Content-Length instead of Transfer-Encoding")
        length = self._header("Content-Length") or "0"
        if not (length.isascii() and length.isdigit() and len(length) < 12):
            raise RefusedError(400, "the Content-Length is malformed")
        if int(length) > most:
            raise RefusedError(413, f"the request is longer than {most} bytes")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise RefusedError(400, "the body is shorter than its Content-Length")
        return body

    def _header(self, name: str) -> str:
        values = self.headers.get_all(name, [])
        if len(values) > 1:
            raise RefusedError(400, f"there is more than one {name} header")
        return str(values[0]).strip() if values else ""

    def _has_hung_up(self) -> bool:
        """Whether the agent has closed the connection, as after a time-out of its own."""
        try:
            self.connection.setblocking(False)
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(READ_SECONDS)

    def _refuse(self, refused: RefusedError) -> None:
        self.close_connection = True  # the rest of the request must not be taken for the next one
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        error = {"message": refused.sentence, "type": kind, "param": None, "code": refused.code or None}
        self._send({"error": error}, refused.status)
        self._reader.until = time.monotonic() + LINGER_SECONDS
        with suppress(OSError):  # closed while the client is still sending, the connection would lose the answer
            self.connection.shutdown(socket.SHUT_WR)
            left = MAX_UNKNOWN_BODY
            while left > 0 and (part := self._buffered.read1(1 << 16)):
                left -= len(part)

    def _send(self, answer: Any, status: int = 200) -> None:
        self._head(status, "application/json", length=len(body := json.dumps(answer).encode()))
        self.wfile.write(body)
        self.wfile.flush()

    def _stream(self, answer: dict[str, Any], *, wants_usage: bool) -> None:
        self.close_connection = True  # the end of the stream is that of the connection
        self._head(200, "text/event-stream")
        for chunk in chunks(answer, wants_usage=wants_usage):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()

    def _head(self, status: int, kind: str, *, length: int | None = None) -> None:
        self.connection.settimeout(READ_SECONDS)
        self.close_connection |= self.server.is_crowded
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def version_string(self) -> str:
        return "spear-rl"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The base class's own errors, in the format of the others."""
        self.request_version = self.protocol_version
        self._refuse(RefusedError(int(code), message or "the request cannot be read"))

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def chunks(answer: dict[str, Any], *, wants_usage: bool) -> Iterator[dict[str, Any]]:
    """An answer as the chunks of a stream: per choice its message, then why it ended."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": number} | call for number, call in enumerate(calls)]
        part = {"index": choice["index"], "logprobs": choice.get("logprobs")}
        yield head | {"choices": [part | {"delta": message, "finish_reason": None}]}
        part["logprobs"] = None
        yield head | {"choices": [part | {"delta": {}, "finish_reason": choice["finish_reason"]}]}
    if wants_usage:
        yield head | {"choices": [], "usage": answer["usage"]}
