"""Endpoints that mean harm: whatever bytes come back, `spear eval` ends with a result or one sentence, and in time."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest

from spear_rl.io import http as bounded_http
from spear_rl.rollout.policies import chat_client as chat_server
from spear_rl.rollout.policies.chat_client import ChatServer, EndpointError, UnansweredError

GOOD = json.dumps({"choices": [{"message": {"content": "look"}, "finish_reason": "stop"}]}).encode()
Script = Callable[[socket.socket], None]


class RawServer:
    """Reads a request and then does with the connection what `script` says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.script: Script = lambda connection: None
        self.requests: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._talk, args=(self._listener.accept()[0],), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            head, _, body = head.partition(b"\r\n\r\n")
            length = next(
                (int(li.split(b":")[1]) for li in head.split(b"\r\n") if li.lower().startswith(b"content-len")), 0
            )
            while len(body) < length:
                body += connection.recv(65536)
            self.requests.append(head)
            self.script(connection)


@pytest.fixture
def server(monkeypatch) -> Iterator[RawServer]:
    for name in ("OPENAI_API_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = RawServer()
    yield running
    running.close()


def answer(body: bytes, status: str = "200 OK", *headers: str) -> Script:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return lambda connection: connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


def endless(head: bytes, part: bytes, pause: float = 0.0) -> Script:
    def script(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(part)
            time.sleep(pause)

    return script


OK = b"HTTP/1.1 200 OK\r\n"
NONSENSE = {
    "deep list": answer(b"[" * 200_000),
    "deep records": answer(b'{"a":' * 100_000),
    "deep content": answer(b'{"choices":[{"message":{"content":' + b"[" * 100_000),
    "huge number": answer(b'{"choices":' + b"9" * 100_000 + b"}"),
    "not UTF-8": answer(b'{"choices": "\xff\xfe\xfa"}'),
    "UTF-16 half": answer(b"\xff\xfe\x00"),
    "gzip": answer(gzip.compress(b"\0" * 10_000_000), "200 OK", "Content-Encoding: gzip"),
    "a page": answer(b"<html>\x1b]0;owned\x07</html>", "200 OK", "Content-Type: text/html"),
    "nothing": answer(b""),
    "no status": lambda connection: connection.sendall(b"\x00\x01\x02 hello\r\n\r\n"),
    "strange status": lambda connection: connection.sendall(b"HTTP/1.1 99999 \x1b[31m\r\n\r\n"),
    "204": answer(b"", "204 No Content"),
    "long line": lambda connection: connection.sendall(OK + b"X: " + b"a" * 100_000 + b"\r\n\r\n"),
    "many headers": lambda connection: connection.sendall(OK + b"X: y\r\n" * 1000 + b"\r\n"),
    "wrong chunk": lambda connection: connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc"),
    "wrong length": lambda connection: connection.sendall(OK + b"Content-Length: 1e9\r\n\r\n{}"),
    "negative length": lambda connection: connection.sendall(OK + b"Content-Length: -5\r\n\r\n{}"),
    "a choice of text": answer(b'{"choices": ["look"]}'),
    "content of numbers": answer(b'{"choices": [{"message": {"content": 5}}]}'),
    "a message of text": answer(b'{"choices": [{"message": "look"}]}'),
    "redirect to nowhere": answer(b"", "302 Found", "Location: http://[broken"),
    "redirect to a file": answer(b"", "307 Moved", "Location: file:///etc/passwd"),
    "redirect without a place": answer(b"", "301 Moved"),
    "deep complaint": answer(b"[" * 60_000, "400 Bad Request"),
    "hostile complaint": answer(b'{"error": {"message": "\x1b[2J\\u202e\\u001b]8;;http://evil\\u0007"}}', "400 Bad"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_one_printable_line_and_exit_code_2(server, spear, monkeypatch, name):
    monkeypatch.setattr(chat_server, "time", SimpleNamespace(sleep=lambda seconds: None))
    server.script = NONSENSE[name]
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m", "--tasks", 2, "--timeout", 20)
    assert code == 2, text
    assert text.startswith("error: ")
    assert text.rstrip("\n").isprintable(), text
    assert len(text) < 2000


ENDLESS = {
    "body": endless(OK + b"\r\n", b" " * 65536),
    "body of a promised length": endless(OK + b"Content-Length: 99999999999\r\n\r\n", b" " * 65536),
    "chunks": endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "complaint": endless(b"HTTP/1.1 400 Bad\r\n\r\n", b"x" * 65536),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_end_is_given_up(server, spear, monkeypatch, name):
    monkeypatch.setattr(bounded_http, "MAX_BODY", 1 << 20)
    monkeypatch.setattr(chat_server, "MAX_BODY", 1 << 20)
    server.script = ENDLESS[name]
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m", "--tasks", 1, "--timeout", 60)
    assert (code, "answers with more than 1 MiB" in text or "refuses the request (400: xxx" in text) == (2, True), text


DRIPS = {
    "body": endless(OK + b"Content-Length: 1000000\r\n\r\n", b" ", 0.05),
    "chunks": endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 0.05),
    "a header": endless(OK + b"X: ", b"a", 0.05),
    "headers": endless(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
    "status": endless(b"HTTP/1.1 2", b"0", 0.05),
}


@pytest.mark.parametrize("name", DRIPS)
def test_an_answer_in_drips_counts_as_none(server, name):
    server.script = DRIPS[name]
    started = time.monotonic()
    with pytest.raises(UnansweredError, match=r"did not answer within 0\.5 seconds"):
        ChatServer(server.url, timeout=0.5, num_tries=1).choice({})
    assert time.monotonic() - started < 15


AT_ONCE = ["0", "-5", "-inf", "Thu, 01 Jan 1970 00:00:00 GMT"]
AT_MOST = ["inf", "1e400", "999999999999", "9" * 5000, "Fri, 01 Jan 2100 00:00:00 GMT"]
NO_WORD = ["nan", "-nan", "", "soon", "Thu, 99 Foo 2020", "1 2", "\xff", "0x10", "Thu, 01 Jan 99999 00:00:00 GMT"]


@pytest.mark.parametrize("asked", [*AT_ONCE, *AT_MOST, *NO_WORD])
def test_whatever_retry_after_says_the_pause_is_a_sensible_one(server, monkeypatch, asked):
    pauses: list[float] = []
    monkeypatch.setattr(chat_server, "time", SimpleNamespace(sleep=pauses.append))
    server.script = answer(b"busy", "429 Too Many", f"Retry-After: {asked}")
    with pytest.raises(UnansweredError, match="429: busy"):
        ChatServer(server.url, timeout=20, num_tries=3).choice({})
    assert len(pauses) == 2
    if asked in AT_ONCE:
        assert pauses == [0.0, 0.0]
    elif asked in AT_MOST:
        assert pauses == [60.0, 60.0]
    else:
        assert 0.5 <= pauses[0] <= 1
        assert 1 <= pauses[1] <= 2


def test_a_date_in_retry_after_is_waited_for(server, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(chat_server, "time", SimpleNamespace(sleep=pauses.append))
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    server.script = answer(b"busy", "503 Later", f"Retry-After: {soon}")
    with pytest.raises(UnansweredError):
        ChatServer(server.url, timeout=20, num_tries=2).choice({})
    assert 5 < pauses[0] <= 30


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
def test_a_redirect_takes_the_key_nowhere(server, status):
    elsewhere = RawServer()
    elsewhere.script = answer(GOOD)
    server.script = answer(b"", f"{status} Moved", f"Location: {elsewhere.url}/chat/completions")
    with pytest.raises(EndpointError, match=r"redirects to http://127\.0\.0\.1"):
        ChatServer(server.url, api_key="sk-secret", num_tries=1).choice({})
    elsewhere.close()
    assert b"sk-secret" in server.requests[0]
    assert elsewhere.requests == []


def test_a_connection_cut_in_the_middle_is_tried_again(server, monkeypatch):
    monkeypatch.setattr(chat_server, "time", SimpleNamespace(sleep=lambda seconds: None))

    def cut_once(connection: socket.socket) -> None:
        body = GOOD if len(server.requests) > 1 else GOOD[:20]
        connection.sendall(OK + f"Content-Length: {len(GOOD)}\r\n\r\n".encode() + body)

    server.script = cut_once
    assert ChatServer(server.url, timeout=20).choice({})["message"]["content"] == "look"
    assert len(server.requests) == 2


def test_half_characters_and_controls_in_an_answer_are_played_and_shown_as_escapes(server, spear, tmp_path):
    said = "\\ud800\\u001b]0;x\\u0007\\u202e"
    server.script = answer(f'{{"choices": [{{"message": {{"content": "{said}"}}, "finish_reason": "stop"}}]}}'.encode())
    out = tmp_path / "eval.json"
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m\x1b[31m", "--tasks", 2, "--out", out)
    assert code == 0, text
    assert json.loads(out.read_text())["model"] == "m\x1b[31m", "files keep the exact text"
    assert "m\\x1b[31m on lookup" in text
    assert text.replace("\n", "").isprintable()


def test_a_hostile_list_of_models_is_one_line(server, spear):
    names = [f"\x1b[31m{number}" * 5000 for number in range(50)]
    server.script = answer(json.dumps({"data": [{"id": name} for name in names]}).encode())
    code, text = spear("eval", server.url, "--env", "lookup")
    assert (code, "--model is missing" in text) == (2, True)
    assert text.rstrip("\n").isprintable()
    assert len(text) < 5000
