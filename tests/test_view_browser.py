"""`spear view` and `spear report` in a real browser: Chromium through Playwright."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("starlette")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

from spear_rl.app.show.view.report import write_report  # noqa: E402
from viewed_runs import HOSTILE, LiveRun, serving  # noqa: E402

WAIT = 60_000


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page whose script errors and foreign requests fail the test."""
    page, problems = browser.new_page(), []
    page.set_default_timeout(WAIT)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: problems.append(request.url) if not _is_local(request.url) else None)
    yield page
    page.close()
    assert not problems


def _is_local(url: str) -> bool:
    return re.match(r"(http://127\.0\.0\.1:|file:|data:)", url) is not None


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    LiveRun(root / "one").write(5)
    LiveRun(root / "two", seed=2).write(4)
    LiveRun(root / "hostile", text=HOSTILE).write(2)
    LiveRun(root / "long", text="y" * 1_000_000).write(1)
    return root


@pytest.fixture(scope="module")
def address(root):
    with serving(root) as address:
        yield address


def charts(page) -> list[str]:
    page.wait_for_selector("#charts figure canvas")
    return page.eval_on_selector_all("#charts figure", "all => all.map(one => one.getAttribute('aria-label'))")


def test_a_failed_episode_is_found_opened_and_coloured(page, address):
    page.goto(address)
    page.click("text=one")
    assert any(label.startswith("Success") for label in charts(page))
    page.click("nav >> text=Episodes")
    page.select_option("select[name=success]", "no")
    page.click("button:has-text('Filter')")
    page.wait_for_url("**success=no**")
    rows = page.locator("tbody tr")
    assert rows.count() == int(page.text_content(".total")) > 0
    assert page.locator("tr.solved").count() == 0
    page.click("tbody tr a >> nth=0")
    page.wait_for_selector(".turn .token")
    assert page.locator(".token[class*=up], .token[class*=down]").count() > 0
    page.click(".colours >> text=log-probability")
    page.wait_for_url("**colour=logprob**")
    assert page.locator(".token[class*=heat]").count() > 0
    assert page.locator(".token[class*=up]").count() == 0
    page.click(".colours >> text=entropy")
    page.wait_for_url("**colour=entropy**")
    answers = page.eval_on_selector_all(".answer", "all => all.map(one => [...one.children].map(t => t.className))")
    assert [answer[:4] for answer in answers] == [[f"token heat{n}" for n in (0, 4, 6, 7)]] * len(answers) != []
    paler, stronger = (page.locator(f".token.heat{n}").first for n in (4, 7))
    assert "entropy 0.8" in paler.get_attribute("title")
    colour = "one => getComputedStyle(one).backgroundColor"
    assert paler.evaluate(colour) != stronger.evaluate(colour)
    shown = page.inner_text("main")
    page.goto(page.url)
    assert page.inner_text("main") == shown, "the address holds the state"


def test_a_replayed_episode_leads_to_where_it_was_played(page, address):
    page.goto(f"{address}/replays?run=one")
    first = page.locator("a.origin").first
    step, number = first.inner_text().split("/")
    first.click()
    page.wait_for_selector("h1:has-text('Episode')")
    assert page.inner_text("h1") == f"Episode {step}/{number}"
    assert "It entered the buffer at step" in page.inner_text("main")
    page.click("table.draws a")
    assert "at step" in page.inner_text("h1")


def test_two_runs_are_compared_side_by_side(page, address):
    page.goto(address)
    page.check("input[value=one]")
    page.check("input[value=two]")
    page.click("button:has-text('Compare')")
    assert "run=one&run=two" in page.url
    [success, *_] = charts(page)
    assert "one: rollout/success" in success
    assert "two: rollout/success" in success
    page.click("nav >> text=Episodes")
    page.select_option("select[name=success]", "yes")
    page.click("button:has-text('Filter')")
    page.wait_for_url("**success=yes**")
    assert page.locator("section > h2").all_inner_texts() == ["one", "two"]
    assert page.locator("tr.solved").count() > 1
    assert page.locator("tr.failed").count() == 0


def test_a_step_arrives_while_the_page_is_open(page, tmp_path):
    run = LiveRun(tmp_path / "runs" / "live").write(2)
    with serving(tmp_path / "runs") as address:
        page.goto(f"{address}/curves?run=live")
        page.wait_for_selector("[data-step]:has-text('1')")
        page.wait_for_timeout(500)
        run.write()
        page.wait_for_selector("[data-step]:has-text('2')")
        page.wait_for_selector("#news:has-text('live is at step 2')")
        page.goto(f"{address}/episodes?run=live")
        before = int(page.text_content(".total"))
        page.wait_for_timeout(500)
        run.write()
        page.wait_for_selector(f".total:has-text('{before + 8}')")


def test_an_environment_shows_its_own_view_of_an_episode(page, tmp_path):
    folder = LiveRun(tmp_path / "runs" / "room").write(1).folder
    (folder / "config.toml").write_text('[task]\nenv = "household"\n')
    seen = [
        "Looking quickly around you, you see a bed 1, and a desk 2.",
        "You arrive at desk 2. On the desk 2, you see a pen 1.",
    ]
    turns = [{"observation": text, "text": "go", "reward": 0.0} for text in seen]
    episode = {"task": "t", "success": True, "reward": 1.0, "stop": "done", "turns": turns}
    episode["last_observation"] = "You pick up the pen 1 from the desk 2."
    (folder / "trajectories" / "step_000003.jsonl").write_text(json.dumps(episode) + "\n")
    with serving(tmp_path / "runs") as address:
        page.goto(f"{address}/episode?run=room&step=3&episode=0")
        places = page.locator(".plan").all_inner_texts()
        assert len(places) == 3
        assert page.locator(".place.here").all_inner_texts() == ["desk 2 here\npen 1", "desk 2 here"]
        assert page.locator(".place.carried .thing").all_inner_texts() == ["pen 1"]


def test_hostile_text_runs_nothing(page, address, root, tmp_path):
    report = write_report([root / "hostile", root / "one"], tmp_path / "report.html")
    paths = [f"{name}?run=hostile" for name in ("episodes", "groups", "curves", "replays")]
    paths += [f"episode?run=hostile&step=0&episode={number}" for number in range(3)]
    for place in [*(f"{address}/{path}" for path in paths), report.as_uri()]:
        page.goto(place)
        page.wait_for_timeout(100)
        assert page.evaluate("window.owned") is None
        assert "owned" not in page.title()
        assert page.locator("main img").count() == 0
    assert "</pre></script><script>document.title='owned'" in page.inner_text("main")


def test_a_report_opens_from_a_file_with_its_curves(page, root, tmp_path):
    page.goto(write_report([root / "one", root / "two"], tmp_path / "report.html").as_uri())
    assert len(charts(page)) >= 4
    page.click("table a[href^='#e'] >> nth=0")
    assert page.locator("article .turn").count() > 0


PATHS = (
    "/", "/curves?run=one&run=two", "/episodes?run=one&run=two", "/episodes?run=one", "/groups?run=one",
    "/replays?run=one", "/episode?run=one&step=1&episode=3", "/episode?run=long&step=0&episode=0",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_in_light_and_dark(browser, address, path, scheme):
    page = browser.new_page(viewport={"width": 360, "height": 700}, color_scheme=scheme)
    page.goto(f"{address}{path}", timeout=WAIT)
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 384) == (scheme == "dark")
    page.close()


def test_everything_is_reached_by_keyboard_and_has_a_name(page, address):
    page.goto(f"{address}/episodes?run=one")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name || document.activeElement.textContent.trim()"))
    assert {"Skip to content", "spear view", "step", "task", "success", "Filter"} <= reached
    nameless = page.eval_on_selector_all(
        "input:not([type=hidden]), select, button, a",
        "all => all.filter(one => !(one.textContent.trim() || one.ariaLabel || one.labels?.length)).length",
    )
    assert nameless == 0
    assert page.get_attribute("html", "lang") == "en"
    assert page.locator("h1").count() == 1
