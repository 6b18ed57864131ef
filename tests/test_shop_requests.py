"""Raw bytes against the shop's server: broken requests get one line, slow ones no thread for long, and none a log."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from contextlib import suppress
from html import unescape
from urllib.parse import urlencode, urlsplit

import pytest

from spear_rl.envs.webshop import source_of
from spear_rl.envs.webshop.browser import ShopServer, visits_of
from spear_rl.envs.webshop.browser.visits import MAX_VISITS
from spear_rl.io.http import site
from spear_rl.io.http.site import MAX_BODY, MAX_CONNECTIONS
from viewed_runs import running

HOSTILE = "\x1b[31m\x1b]8;;http://evil\x07\x9b\u202eevil\u2066\u200b\u2028\x85\x7f\ufeff"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    with running(ShopServer(visits_of("validation", source_of(num_products=310), cache=cache))) as server:
        yield server


def port_of(server) -> int:
    return int(urlsplit(server.address).port)


def said(server, request: bytes, *, patience: float = 30.0) -> bytes:
    """All that the server answers to some bytes."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=patience) as connection:
        with suppress(OSError):  # it has heard enough
            connection.sendall(request)
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        return answer


def request(
    server, *headers: str, method: str = "POST", path: str = "/search", body: bytes = b"", host: str | None = "own"
) -> bytes:
    own = f"127.0.0.1:{port_of(server)}" if host == "own" else host
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {own}"] if own is not None else []), "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


BAD_HOSTS = [
    None, "", "[::1", "]", "a b", "local host", "localhost:", "localhost:x", "localhost:99999", "localhost:-1",
    "user@localhost", "localhost/x", "[::1]x", "::1", "a,b", "localhost\x00", "http://localhost", "\xff", "[" * 5000,
    "localhost:" + "9" * 5000,
]  # fmt: skip
BAD_ORIGINS = [
    "http://[", "http://]", "//localhost", "localhost", "http://", "http://a b", "http://a:99999", "http://a/b", "http://a@b",
    "null null", "NULL", "http:/a", "\xff://a", "http://[::1", "http://a http://b", "http://" + "[" * 5000,
]  # fmt: skip
BAD_LENGTHS = ["x", "-1", "+5", "1e3", "0x10", "5, 6", "5 5", "1_0", "", "5.0", "\xb2", "five", "-" + "1" * 9999]


def assert_one_line(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert body.count(b"\n") == 0
    assert 0 < len(body) < 200
    assert body.decode("ascii").isprintable()
    assert b"connection: close" in head.lower()


@pytest.mark.parametrize("host", BAD_HOSTS, ids=lambda host: repr(host)[:20])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_malformed_host_is_400_in_one_line(server, method, host):
    assert_one_line(said(server, request(server, "Content-Length: 0", method=method, path="/", host=host)), 400)


@pytest.mark.parametrize("origin", BAD_ORIGINS, ids=lambda origin: repr(origin)[:20])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_malformed_origin_is_400_in_one_line(server, method, origin):
    answer = said(server, request(server, f"Origin: {origin}", "Content-Length: 0", method=method, path="/"))
    assert_one_line(answer, 400)


@pytest.mark.parametrize("length", BAD_LENGTHS, ids=lambda length: repr(length)[:20])
def test_a_malformed_content_length_is_400_in_one_line(server, length):
    assert_one_line(said(server, request(server, f"Content-Length: {length}", body=b"acts=1")), 400)
    assert_one_line(said(server, request(server, f"Content-Length: {length}", method="GET", path="/")), 400)


BROKEN = {
    "no length": (["X: y"], b"", 400),
    "two lengths": (["Content-Length: 3", "Content-Length: 4"], b"abcd", 400),
    "two origins": (["Origin: http://a", "Origin: http://a", "Content-Length: 0"], b"", 400),
    "two hosts": (["Host: localhost", "Content-Length: 0"], b"", 400),
    "a hidden host": (["X: y\rHost: localhost", "Content-Length: 0"], b"", 400),
    "chunks": (["Transfer-Encoding: chunked"], b"5\r\nacts=\r\n0\r\n\r\n", 400),
    "chunks and a length": (["Transfer-Encoding: chunked", "Content-Length: 5"], b"acts=", 400),
    "strange encoding": (["Transfer-Encoding: \x0bchunked", "Content-Length: 0"], b"", 400),
    "no colon": (["what is this", "Content-Length: 0"], b"", 400),
    "a blank before the colon": (["Content-Length : 0"], b"", 400),
    "form too long": ([f"Content-Length: {MAX_BODY + 1}"], b"x" * (MAX_BODY + 1), 413),
    "form far too long": (["Content-Length: 99999999999999999999"], b"x" * 3_000_000, 413),
    "long header": (["X: " + "y" * 100_000], b"", 400),
    "many headers": (["X: " + "y" * 40] * 500, b"", 400),
    "from null": (["Origin: null", "Content-Length: 0"], b"", 403),
    "from a stranger": (["Origin: http://evil.example", "Content-Length: 0"], b"", 403),
    "from an extension": (["Origin: chrome-extension://abcdef", "Content-Length: 0"], b"", 403),
    "from another port": (["Origin: http://127.0.0.1:1", "Content-Length: 0"], b"", 403),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_request_is_refused_in_one_line(server, capfd, name):
    headers, body, status = BROKEN[name]
    assert_one_line(said(server, request(server, *headers, body=body)), status)
    assert capfd.readouterr() == ("", "")


def test_origin_null_is_refused_for_pages_too(server):
    assert_one_line(said(server, request(server, "Origin: null", method="GET", path="/")), 403)
    policy = re.search(rb"(?i)Referrer-Policy: (\S+)", said(server, request(server, method="GET", path="/")))[1]
    assert policy == b"same-origin", "with no-referrer, browsers send `Origin: null` with our own forms"


@pytest.mark.parametrize(
    "line",
    [b"", b"GET", b"GET /", b"\x16\x03\x01\x02", b"GET / HTTP/9.9", b"GET / HTTP/x", b"A B C D", b"\xff" * 50,
     b"G" * 70_000, b"BREW / HTTP/1.1", b"\x1b[31m / HTTP/1.1", b"GET http://[ HTTP/1.1"],
    ids=lambda line: repr(line)[:20],
)  # fmt: skip
def test_a_line_that_is_no_request_is_answered_in_one_line_or_not_at_all(server, capfd, line):
    answer = said(server, line + f"\r\nHost: 127.0.0.1:{port_of(server)}\r\n\r\n".encode())
    if line:
        assert_one_line(answer, int(answer.split()[1]))
        assert answer.split()[1] in (b"400", b"405", b"505")
    assert capfd.readouterr() == ("", "")


def test_a_body_that_nobody_asked_for_is_not_the_next_request(server):
    hidden = b"POST /task HTTP/1.1\r\n\r\n"
    first = request(server, f"Content-Length: {len(hidden)}", method="GET", path="/").replace(b"close", b"keep-alive")
    answer = said(server, first + hidden + request(server, method="GET", path="/nowhere"))
    assert [line.split()[1] for line in re.findall(rb"HTTP/1\.1 \d+ ", answer)] == [b"200", b"404"]


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(site, "SECONDS", 1.0)


@pytest.mark.parametrize("where", ["line", "header", "body"])
def test_a_request_in_drips_is_ended_and_others_are_served_meanwhile(server, hasty, where):
    start = {
        "line": b"GET /",
        "header": b"GET / HTTP/1.1\r\nX: ",
        "body": request(server, "Content-Length: 9999"),
    }[where]
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=30) as slow:
        slow.sendall(start)
        started, is_open = time.monotonic(), True
        while is_open and time.monotonic() - started < 20:
            time.sleep(0.1)
            try:
                slow.sendall(b"a")
                slow.setblocking(False)
                is_open = bool(slow.recv(1) or True) and not _has_ended(slow)
            except BlockingIOError:
                pass
            except OSError:
                is_open = False
            finally:
                slow.setblocking(True)
            assert said(server, request(server, method="GET", path="/static/shop.css")).startswith(b"HTTP/1.1 200")
        assert not is_open
        assert time.monotonic() - started < 15


def _has_ended(connection: socket.socket) -> bool:
    connection.settimeout(5)
    while True:
        if not connection.recv(65536):
            return True


def test_a_client_that_hangs_up_leaves_no_traceback(server, capfd):
    for content in (b"POST /search HTTP/1.1\r\nContent-", request(server, "Content-Length: 500", body=b"a")):
        connection = socket.create_connection(("127.0.0.1", port_of(server)))
        connection.sendall(content)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # closes with a reset
        connection.close()
    time.sleep(0.3)
    assert said(server, request(server, method="GET", path="/")).startswith(b"HTTP/1.1 200")
    assert capfd.readouterr() == ("", "")


def test_more_connections_than_there_is_room_for_are_closed_and_room_comes_back(server, hasty):
    held = [socket.create_connection(("127.0.0.1", port_of(server)), timeout=30) for _ in range(MAX_CONNECTIONS + 20)]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if said(server, request(server, method="GET", path="/")).startswith(b"HTTP/1.1 200"):
            break
        time.sleep(0.2)
    else:
        pytest.fail("the server stayed full")
    for connection in held:
        connection.close()


def test_no_number_of_anonymous_requests_costs_anybody_a_visit(server):
    def ask(method: str, path: str = "/", body: str = "", cookie: str = "") -> tuple[str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)
        connection.request(method, path, body, {"Cookie": cookie} if cookie else {})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return text, answer.getheader("Set-Cookie").split(";")[0]

    page, mine = ask("GET")
    acts = re.search(r'name="acts" value="(\d+)"', page)[1]
    ask("POST", "/search", urlencode({"acts": acts, "words": "rug"}), mine)
    _, watcher = ask("GET")
    for number in range(MAX_VISITS + 50):
        if number % 2:
            ask("POST", "/search", "acts=1&words=lamp")
        else:
            ask("GET")
    page, name = ask("GET", cookie=mine)
    assert name == mine
    assert "Results for “rug”" in page
    assert ask("GET", cookie=watcher)[1] == watcher


def test_a_hostile_catalogue_steers_no_page_and_its_options_can_still_be_chosen(tmp_path):
    items = [
        {
            "asin": f"B{number:09d}", "name": f"rug {HOSTILE}", "full_description": HOSTILE,
            "small_description": [HOSTILE], "pricing": "$5", "query": "rug",
            "customization_options": {f"color {HOSTILE}": [{"value": f"Red {HOSTILE}"}]},
            "reviews": [{"title": HOSTILE, "stars": HOSTILE, "review": HOSTILE}], "average_rating": HOSTILE,
        }
        for number in range(12)
    ]  # fmt: skip
    wish = {"instruction_attributes": [HOSTILE], "instruction_options": [f"red {HOSTILE}"]}
    for name, content in {
        "items_shuffle": items,
        "items_ins_v2": {item["asin"]: {"attributes": [HOSTILE]} for item in items},
        "items_human_ins": {item["asin"]: [wish | {"instruction": f"{n} {HOSTILE}"}] for n, item in enumerate(items)},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    cookie, pages = "", []

    def ask(method: str, path: str = "/", **fields: str) -> None:
        nonlocal cookie
        connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)
        acts = re.search(r'name="acts" value="(\d+)"', pages[-1])[1] if pages else ""
        connection.request(method, path, urlencode({"acts": acts, **fields}), {"Cookie": cookie} if cookie else {})
        answer = connection.getresponse()
        cookie = answer.getheader("Set-Cookie").split(";")[0]
        text = answer.read().decode()
        connection.close()
        if method == "POST":
            ask("GET")
        else:
            pages.append(text)

    with running(
        ShopServer(visits_of("train", source_of(data=str(tmp_path)), cache=str(tmp_path / "cache")))
    ) as server:
        ask("GET")
        ask("POST", "/search", words=f"rug {HOSTILE}")
        ask("POST", "/click", words=re.search(r'value="(b\d{9})"', pages[-1])[1])
        ask("POST", "/click", words=unescape(re.search(r'value="(red [^"]*)"', pages[-1])[1]))
        assert 'aria-pressed="true"' in pages[-1], "the option was chosen by what the page calls it"
        for name in ("description", "features", "reviews"):
            ask("POST", "/click", words=name)
            ask("POST", "/click", words="< prev")
        ask("POST", "/click", words=HOSTILE)
        ask("POST", "/click", words="buy now")
    assert '<p class="score"' in pages[-1]
    for page in pages:
        assert page.replace("\n", "").isprintable()
        assert "\\x1b[31m" in page
        assert "\\u202e" in page
