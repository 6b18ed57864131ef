"""The shop as a web page: what a browser is sent, and what nobody can do to it. A real Chromium shops at the end."""

from __future__ import annotations

import http.client
import json
import random
import re
import time
from functools import partial
from html import unescape
from importlib import resources
from urllib.parse import urlencode, urlsplit

import pytest

from chromium import PROGRAM, Browser
from spear_rl.envs.webshop import source_of
from spear_rl.envs.webshop.browser import ShopServer, visits_of
from spear_rl.envs.webshop.browser.visits import IDLE_SECONDS, MAX_VISITS, FullError, Visits
from spear_rl.envs.webshop.data.shop import open_shop
from spear_rl.envs.webshop.experts import EXPERTS
from viewed_runs import running

SMALL = {"num_products": 310}
needs_chromium = pytest.mark.skipif(not PROGRAM, reason="no Chromium is installed (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def shop(cache):
    return open_shop(source_of(**SMALL), cache)


@pytest.fixture(scope="module")
def server(cache):
    with running(ShopServer(visits_of("validation", source_of(**SMALL), cache=cache))) as server:
        yield server


class Visitor:
    """A browser of few words: keeps its cookie and fills in forms."""

    def __init__(self, server) -> None:
        self._place, self.cookie, self.page = urlsplit(server.address).netloc, "", ""
        self.get()

    def ask(self, method: str, path: str, body: str = "", **headers: str):
        connection = http.client.HTTPConnection(self._place, timeout=10)
        own = {"Cookie": self.cookie} if self.cookie else {}
        if method == "POST":
            own["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, body, own | {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.getheader("Set-Cookie"):
            self.cookie = answer.getheader("Set-Cookie").split(";")[0]
        connection.close()
        return answer, text

    def get(self) -> str:
        answer, self.page = self.ask("GET", "/")
        assert answer.status == 200
        return self.page

    def post(self, path: str, **fields: object) -> str:
        acts = re.search(r'name="acts" value="(\d+)"', self.page)[1]
        answer, _ = self.ask("POST", path, urlencode({"acts": acts, **fields}))
        assert (answer.status, answer.getheader("Location")) == (303, "/")
        return self.get()

    def act(self, action: str) -> str:
        verb, _, words = action.removesuffix("]").partition("[")
        return self.post(f"/{verb}", words=words)

    def text(self, name: str) -> str:
        return unescape(re.search(rf'id="{name}">([^<]*)<', self.page)[1])


def test_the_page_gives_the_score_that_an_agent_gets(server, shop):
    numbers = [int(number) for number in shop.split("validation")]
    for place, name, total in ((0, "oracle", "1.00"), (1, "oracle", "1.00"), (2, "hasty", None)):
        visitor, goal = Visitor(server), shop.goal(numbers[place])
        visitor.post("/task", number=place + 1)
        assert visitor.text("instruction") == goal.instruction
        said = EXPERTS[name](shop, goal, 10, place)
        for action in said:
            visitor.act(action)
        assert total is None or visitor.text("score") == total
        assert visitor.text("turns") == f"{15 - len(said)} turns left"
        for attribute in goal.attributes:
            assert f"has “{attribute}”" in visitor.page
        assert "Next task" in visitor.page


def test_what_cannot_be_done_is_said_and_turns_run_out(server):
    visitor = Visitor(server)
    assert "Nothing happened: there is nothing to click on the search page" in visitor.act("click[buy now x]")
    assert 'role="alert"' in visitor.page
    for _ in range(14):
        visitor.act("click[nothing]")
    assert "The shop closed before anything was bought." in visitor.page
    assert visitor.text("score") == "0.00"
    assert "mean score 0.00 of 1" in visitor.page
    visitor.act("search[rug]")
    assert "the shop is closed" in visitor.page
    assert "mean score 0.00 of 1" in visitor.page, "a closed shop is not counted again"


def test_every_browser_has_its_own_visit_and_a_stale_form_does_nothing(server):
    one, other = Visitor(server), Visitor(server)
    assert one.cookie != other.cookie
    stale = one.page
    one.act("search[rug]")
    assert "Results for" in one.page
    assert "Search the shop" in other.get()
    one.page = stale
    one.act("search[lamp]")
    assert "that page was an earlier one" in one.page
    assert "Results for “rug”" in one.page


def test_headers_forbid_scripts_strangers_and_caching(server):
    answer, _ = Visitor(server).ask("GET", "/")
    assert "default-src 'none'" in answer.getheader("Content-Security-Policy")
    assert "script" not in answer.getheader("Content-Security-Policy")
    fresh, _ = Visitor(server).ask("GET", "/", Cookie="")
    assert {"HttpOnly", "SameSite=strict"} <= set(fresh.getheader("Set-Cookie").split("; "))
    assert (answer.getheader("Cache-Control"), answer.getheader("X-Content-Type-Options")) == ("no-store", "nosniff")


def test_requests_for_or_from_another_site_are_refused(server):
    visitor = Visitor(server)
    assert visitor.ask("GET", "/", Host="evil.example")[0].status == 403
    assert visitor.ask("POST", "/search", "acts=1&words=rug", Origin="http://evil.example")[0].status == 403
    own = server.address.rstrip("/")
    assert visitor.ask("POST", "/search", "acts=1&words=rug", Origin=own)[0].status == 303


STRANGE = [
    ("POST", "/click", "acts=1&words=" + "x" * 5000, 303),
    ("POST", "/click", "&&&===%%%", 303),
    ("POST", "/search", "acts=1&words=%00%ff%fe", 303),
    ("POST", "/task", "acts=1&number=99999999999999999999", 303),
    ("POST", "/task", "acts=1&number=-3", 303),
    ("POST", "/task", "acts=1&number=٣", 303),
    ("POST", "/nowhere", "acts=1", 404),
    ("POST", "/click", "x" * 20_000, 413),
    ("POST", "/click", "a=1&" * 200, 303),
    ("GET", "/../../etc/passwd", "", 404),
    ("GET", "/static/shop.css?x=1", "", 200),
    ("GET", "/?words=<script>", "", 200),
    ("PUT", "/", "", 405),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), STRANGE)
def test_strange_requests_are_answered_and_the_visit_lives_on(server, method, path, body, status):
    visitor = Visitor(server)
    assert visitor.ask(method, path, body.encode())[0].status == status
    assert visitor.ask("GET", "/", Cookie='spear_shop="; x=y; ;;=')[0].status == 200
    assert "Please buy" in visitor.get()


def test_fuzzed_forms_never_break_it(server):
    rng, visitor = random.Random(0), Visitor(server)
    for _ in range(300):
        words = rng.choice(re.findall(r'name="words" value="([^"]*)"', visitor.page) or ["rug"])
        noise = "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x80, 0x3000)])) for _ in range(9))
        path = rng.choice(["/click", "/click", "/search", "/task"])
        visitor.post(path, words=rng.choice([unescape(words), noise]), number=rng.choice(["1", "7", noise]))


def test_nothing_of_a_scraped_catalogue_is_taken_for_html(tmp_path):
    nasty = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    items = [
        {
            "asin": f"B{number:09d}",
            "name": f"rug {nasty}",
            "full_description": nasty,
            "small_description": [nasty],
            "pricing": "$5",
            "query": "rug",
            "customization_options": {f"color{nasty}": [{"value": f"red{nasty}"}]},
            "reviews": [{"title": nasty, "stars": nasty, "review": nasty}],
            "average_rating": nasty,
        }
        for number in range(12)
    ]
    wish = {"instruction": f"a rug {nasty}", "instruction_attributes": [nasty], "instruction_options": [f"red{nasty}"]}
    for name, content in {
        "items_shuffle": items,
        "items_ins_v2": {item["asin"]: {"attributes": [nasty]} for item in items},
        "items_human_ins": {item["asin"]: [wish | {"instruction": f"{n} {nasty}"}] for n, item in enumerate(items)},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with running(
        ShopServer(visits_of("train", source_of(data=str(tmp_path)), cache=str(tmp_path / "cache")))
    ) as server:
        visitor = Visitor(server)
        pages = [visitor.page, visitor.act("search[rug <b>x]")]
        asin = re.search(r'value="(b\d{9})"', visitor.page)[1]
        pages.append(visitor.act(f"click[{asin}]"))
        option = unescape(re.search(r'value="(red[^"]*)"', visitor.page)[1])
        pages.append(visitor.post("/click", words=option))
        assert 'aria-pressed="true"' in visitor.page
        for name in ("description", "features", "reviews"):
            pages += [visitor.act(f"click[{name}]"), visitor.act("click[< prev]")]
        pages += [visitor.act("click[nothing<i>]"), visitor.act("click[buy now]")]
    assert visitor.text("score") == "1.00"
    for page in pages:
        assert not re.search(r"<(script|img|b|i)\b", page)
        assert "&lt;script&gt;" in page


def test_the_template_never_switches_escaping_off():
    template = (resources.files("spear_rl.envs.webshop.browser") / "shop.html.jinja").read_text("utf-8")
    assert "{{ page.instruction }}" in template
    assert not re.search(r"\bsafe\b|autoescape|Markup|{%-?\s*raw", template)


def test_visits_without_a_name_cost_nobody_a_visit(shop):
    visits = Visits(shop, [0, 1])
    (first, visit), (idle, _) = visits.start(), visits.start()
    visit.act("search", "rug")
    for _ in range(2 * MAX_VISITS):
        visits.start()
    assert visits.find(first) is visit
    assert not visits.find(idle).has_acted, "it begins again under its own name, as it was"
    assert visits.find("made up") is None
    assert visits.find(first[:-1] + ("0" if first[-1] != "0" else "1")) is None
    assert visits.find("\u0661.\u0662") is None


def test_a_shop_full_of_busy_visits_refuses_new_ones_until_some_were_left_alone(shop, monkeypatch):
    visits = Visits(shop, [0, 1])
    busy = [visits.start() for _ in range(MAX_VISITS)]
    for _, visit in busy:
        visit.act("search", "rug")
    with pytest.raises(FullError):
        visits.start()
    assert all(visits.find(name) is visit for name, visit in busy)
    busy[7][1].used_at -= IDLE_SECONDS + 1
    visits.start()
    assert [visits._visits.get(name) is visit for name, visit in busy].index(False) == 7


def test_another_address_than_loopback_needs_the_token_for_forms_too(shop):
    with running(ShopServer(Visits(shop, [0, 1]), host="0.0.0.0")) as server:
        token = urlsplit(server.address).query.removeprefix("token=")
        place = f"127.0.0.1:{urlsplit(server.address).port}"

        def ask(method: str, path: str, cookie: str = "") -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(place, timeout=30)
            connection.request(method, path, "" if method == "POST" else None, {"Cookie": cookie})
            answer = connection.getresponse()
            answer.text = answer.read().decode()
            return answer

        for method, path in (("GET", "/"), ("POST", "/search"), ("GET", "/static/shop.css"), ("GET", "/?token=wrong")):
            refused = ask(method, path)
            assert (refused.status, "`spear shop` printed" in refused.text) == (403, True)
        allowed = ask("GET", f"/?token={token}")
        assert (allowed.status, allowed.getheader("Location")) == (303, "/?")
        assert "Please buy" in ask("GET", "/", allowed.getheader("Set-Cookie").split(";")[0]).text


@pytest.mark.parametrize("name", ["jinja2", "starlette", "uvicorn"])
def test_a_missing_package_is_one_sentence(spear, monkeypatch, name):
    monkeypatch.setattr("spear_rl.cli.shared.find_spec", lambda wanted: None if wanted == name else object())
    code, text = spear("shop")
    assert (code, text) == (2, f"error: {name} is not installed: pip install 'spear-rl[view,webshop]'\n")


def test_mistakes_on_the_command_line_are_one_sentence(spear, cache, server):
    port = urlsplit(server.address).port
    options = [f"cache={cache}", "num_products=310"]
    for arguments, sentence in {
        ("level=huge",): "unknown level 'huge'",
        ("color=red",): "color: the shop has no such option; it has: level, num_products",
        (*options, "--split", "dev"): "unknown split 'dev'",
        (*options, "--port", port): "choose another --port",
    }.items():
        code, text = spear("shop", *arguments)
        assert (code, sentence in text) == (2, True), text
        assert "Traceback" not in text


@needs_chromium
def test_a_person_buys_the_right_thing_in_chromium(server, shop, tmp_path):
    goal = shop.goal(int(shop.split("validation")[0]))
    said = EXPERTS["oracle"](shop, goal, 10, 0)
    with Browser(tmp_path / "profile") as browser:
        browser.open(server.address)
        assert browser.text("#instruction") == goal.instruction
        assert browser.value("document.activeElement.id") == "words", "one can type at once"
        browser.type(said[0].removeprefix("search[").removesuffix("]"))
        browser.press("Enter", leads_on=True)
        assert "Results for" in browser.text()
        for action in said[1:]:
            browser.click(action.removeprefix("click[").removesuffix("]"))
        assert browser.text("#score") == "1.00"
        assert browser.value("document.querySelectorAll('td.yes').length") == len(goal.attributes + goal.options) + 1
        assert browser.value("getComputedStyle(document.querySelector('.score')).fontWeight") == "700", (
            "styles are loaded"
        )
        browser.picture(tmp_path / "score.png")
        browser.press("Enter", leads_on=True)
        assert browser.text("#instruction") != goal.instruction, "Enter leads to the next task"
        assert browser.complaints() == []


@needs_chromium
def test_the_page_works_by_keyboard_and_fits_a_phone(server, tmp_path):
    with Browser(tmp_path / "profile") as browser:
        browser.as_phone()
        browser.open(server.address)
        browser.type("rug")
        browser.press("Enter", leads_on=True)
        assert browser.value("document.documentElement.scrollWidth <= 390"), "nothing sticks out sideways"
        for _ in range(30):
            browser.press("Tab")
            if browser.value("document.activeElement.className.startsWith('card')"):
                break
        asin = browser.value("document.activeElement.value")
        assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", (
            "the focus can be seen"
        )
        browser.press("Enter", leads_on=True)
        assert str(asin).upper() in browser.text()
        assert browser.value("document.documentElement.scrollWidth <= 390")
        assert browser.value("[...document.querySelectorAll('input:not([type=hidden])')].every(i => i.labels.length)")
        assert browser.complaints() == []


@needs_chromium
def test_the_command_serves_a_browser_until_it_is_stopped(cache, tmp_path):
    import signal
    import subprocess
    import sys

    command = [sys.executable, "-m", "spear_rl.cli", "shop", f"cache={cache}", "num_products=310", "--port", "0"]
    # A shell's background job starts with SIGINT ignored, and hands that on.
    can_be_stopped = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=can_be_stopped)
    try:
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
        with Browser(tmp_path / "profile") as browser:
            browser.open(address)
            assert "Search the shop" in browser.text()
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
