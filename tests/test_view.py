"""`spear view` and `spear report` without a browser: what pages say, and whom they refuse."""

from __future__ import annotations

import html
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from spear_rl.app.show.view import pages
from spear_rl.app.show.view.curves import MAX_POINTS, charts_of, curves_of
from spear_rl.app.show.view.report import write_report, write_runs_of
from spear_rl.app.show.view.runs import DrawRows, GrowingRows, Runs
from spear_rl.errors import UserError
from viewed_runs import HOSTILE, PNG, LiveRun, serving


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    LiveRun(root / "a").write(6)
    LiveRun(root / "deep" / "b", seed=1).write(3)
    LiveRun(root / "hostile", text=HOSTILE, images=(PNG, b"<svg onload=alert(1)>")).write(2)
    (root / "no run").mkdir()
    return root


@pytest.fixture(scope="module")
def address(root):
    with serving(root) as address:
        yield address


def ask(address: str, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=sent)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def url(path: str, **query) -> str:
    return f"{path}?{urlencode(query, doseq=True)}"


def links(text: str) -> list[str]:
    return [link.replace("&amp;", "&") for link in re.findall(r'href="(/[^"]*)"', text)]


def test_every_link_of_every_page_leads_to_a_page(address):
    seen, todo = set(), ["/"]
    while todo and len(seen) < 150:
        path = todo.pop(random.Random(len(seen)).randrange(len(todo)))
        if path in seen:
            continue
        seen.add(path)
        status, text, headers = ask(address, path)
        assert status == 200, (path, text[:200])
        assert "script-src 'self'" in headers["content-security-policy"]
        todo += [link for link in links(text) if link not in seen]
    assert {urlsplit(path).path for path in seen} >= {"/", "/curves", "/episodes", "/episode", "/groups", "/replays"}


def test_the_list_has_every_run_and_nothing_else(address):
    text = ask(address, "/")[1]
    assert [name for name in ("a", "deep/b", "hostile", "no run") if f'value="{name}"' in text] == [
        "a",
        "deep/b",
        "hostile",
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}, {"Origin": "http://evil.example"},
        {"Origin": "file://"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "http://localhost.evil.example"},
        {"Host": "evil.example:8485"}, {"Host": "localhost."}, {"Host": "2130706433"}, {"Origin": "http://127.0.0.1"},
    ],
    ids=str,
)  # fmt: skip
def test_requests_for_or_from_another_site_get_403(address, headers):
    for path in ("/", "/data/state", "/static/view.js", "/nothing"):
        assert ask(address, path, **headers)[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": ""}, {"Host": "a@127.0.0.1"}, {"Host": "localhost\\@evil.example"}, {"Host": "localhost:99999"},
        {"Origin": "http://["}, {"Origin": "http://localhost:8485/x"}, {"Origin": ""},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_host_or_origin_gets_400(address, headers):
    for path in ("/", "/data/state", "/static/view.js", "/nothing"):
        assert ask(address, path, **headers)[0] == 400


def test_the_machines_own_names_are_answered(address):
    port = urlsplit(address).port
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert ask(address, "/", Host=host)[0] == 200
        assert ask(address, "/data/state", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "name",
    ["..", "../..", "/etc", "a/../../x", "no run", ".", "", "a\0b", "out", "x" * 5000, "deep/../..", "//etc", "a/.."],
    ids=lambda name: name[:12].encode().hex(),
)
def test_a_path_outside_of_the_folder_is_refused(root, address, name, tmp_path_factory):
    outside = tmp_path_factory.getbasetemp() / "outside"
    if not outside.exists():
        LiveRun(outside).write(1)
        os.symlink(outside, root / "out")
    for path in ("/curves", "/episodes", "/episode", "/data/curves"):
        status, text, _ = ask(address, url(path, run=name, step=0, episode=0))
        assert status in (303, 404, 500) or (name == "" and status == 200), text
        assert "you see" not in text
        assert "outside" not in text
    with pytest.raises(KeyError):
        Runs(root).get(name)


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/uPlot.LICENSE", "/x"])
def test_only_the_pages_own_files_are_served(address, path):
    assert ask(address, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_but_reading_is_answered(address, method):
    assert ask(address, "/", method=method)[0] == 405


def test_another_address_than_loopback_needs_the_token(root):
    with serving(root, host="0.0.0.0", token="right") as address:
        address = address.replace("0.0.0.0", "127.0.0.1")
        assert ask(address, "/")[0] == ask(address, "/?token=wrong")[0] == 403
        assert ask(address, "/", Cookie="spear_view_token=wrong")[0] == 403
        status, _, headers = ask(address, "//evil.example/?token=right&run=a")
        assert status == 303
        assert headers["location"] == "/evil.example/?run=a"
        status, _, headers = ask(address, "/curves?run=a&token=right")
        assert (status, headers["location"]) == (303, "/curves?run=a")
        assert "HttpOnly" in headers["set-cookie"]
        assert ask(address, "/curves?run=a", Cookie="spear_view_token=right")[0] == 200


def test_a_server_elsewhere_makes_a_token_of_its_own(root):
    from spear_rl.app.show.view.server import ViewServer

    one, other = (ViewServer(root, host="0.0.0.0") for _ in range(2))
    assert len(one.token) > 20
    assert one.token != other.token
    assert not ViewServer(root).token


def test_hostile_text_is_text(root, address):
    run = Runs(root).get("hostile", episodes=True)
    found = [url("/episode", run="hostile", step=e["step"], episode=e["episode"]) for e in run.episodes.rows(range(4))]
    for path in [
        *found,
        url("/episodes", run="hostile"),
        url("/groups", run="hostile"),
        url("/curves", run=["hostile", "a"]),
    ]:
        status, text, _ = ask(address, path)
        assert status == 200
        assert "<script>document" not in text
        assert "<img src=x" not in text
        assert "<svg" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    text = ask(address, found[0])[1]
    assert r"\x1b[31mred" in text
    assert r"\u202eevil" in text
    assert "{{ 7*7 }}" in text
    assert r"\ud800" in text
    assert text.count('src="data:image/png;base64,') >= 1


def test_a_long_line_is_cut_with_a_link_to_all_of_it(tmp_path):
    LiveRun(tmp_path / "long", text="x" * 1_000_000).write(1)
    with serving(tmp_path) as address:
        text = ask(address, url("/episode", run="long", step=0, episode=0))[1]
        assert len(text) < 500_000
        [more, *_] = [link for link in links(text) if "full=1" in link]
        assert "x" * 1_000_000 in ask(address, more)[1]
        assert len(ask(address, url("/episodes", run="long"))[1]) < 100_000


@pytest.mark.parametrize(
    "query",
    [
        {"success": "no"}, {"success": "yes", "sort": "reward"}, {"family": "heat"}, {"step": "1-2"}, {"step": "4"},
        {"dropped": "any"}, {"dropped": "none", "sort": "-advantage"}, {"replayed": "yes"}, {"task": "TASK 3"},
        {"page": "2"}, {"page": "9" * 30}, {"page": "-1"}, {"sort": "'; drop"}, {"family": "<b>"}, {"group": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_the_table_is_what_was_asked_for(root, address, query):
    status, text, _ = ask(address, url("/episodes", run="a", **query))
    assert status == 200
    shown = re.findall(r'aria-label="episode (\d+) of step (\d+)"', text)
    run = Runs(root).get("a", episodes=True)
    expected = pages.found_episodes(run, pages.Query.of(query))
    assert [(int(step), int(number)) for number, step in shown] == [
        (e["step"], e["episode"]) for e in expected["episodes"]
    ]
    everything = run.episodes.rows(range(len(run.episodes.table)))
    if query in ({"success": "no"}, {"family": "heat"}, {"replayed": "yes"}):
        name, value = next(iter(query.items()))
        if name == "replayed":
            wanted = [e for e in everything if e["episode"] == 3 and e["step"] < 5]
        else:
            wanted = [e for e in everything if e[name] == {"no": False}.get(value, value)]
        assert expected["total"] == len(wanted) > 0
    ask(address, url("/groups", run="a", **query))


@pytest.mark.parametrize("step", ["x", "9" * 40, "1-", "-3", "1-2-3", "<b>"])
def test_steps_that_cannot_be_read_are_named_and_all_are_shown(address, step):
    status, text, _ = ask(address, url("/episodes", run="a", step=step))
    assert status == 200
    assert "steps are written 40 or 30-50" in text
    assert '<span class="total">48</span>' in text
    assert ask(address, url("/groups", run="a", step=step))[0] == 200


def test_an_episode_page_says_what_became_of_it(address):
    text = ask(address, url("/episode", run="a", step=1, episode=3))[1]
    assert "It entered the buffer at step 1 and left it at step 4" in text
    assert "It was drawn 1 time." in text
    assert re.search(r"<td>0.5</td><td>0.25</td>", text)
    assert len(re.findall('aria-label="episode . of step 1"', text)) == 4, "its siblings"
    assert re.findall(r'class="chip \w+"[^>]*>(\d)</a>', text) == ["0", "1", "2", "3"]
    assert "has not left it" in ask(address, url("/episode", run="a", step=5, episode=3))[1]


def test_episodes_of_evaluations_are_shown_apart(tmp_path):
    run = LiveRun(tmp_path / "runs" / "x").write(2)
    turn = {"observation": "held out", "text": "answer", "reward": 1.0}
    lines = [
        {"task": f"t{n}", "family": "f", "success": n > 0, "reward": 1.0, "stop": "done", "turns": [turn]}
        for n in (0, 1)
    ]
    path = run.folder / "evaluations" / "step_000002.jsonl"
    path.parent.mkdir()
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"left_out": 7}]))
    with serving(tmp_path / "runs") as address:
        text = ask(address, url("/episodes", run="x", kind="evaluated", success="no"))[1]
        assert "7 episodes were not kept" in text
        [shown] = [link for link in links(text) if link.startswith("/episode?")]
        assert "held out" in ask(address, shown)[1]
        for link in links(text):
            assert ask(address, link)[0] == 200
        assert "t0" not in ask(address, url("/episodes", run="x"))[1]


def test_runs_are_side_by_side_in_tables_too(address):
    for path, what in (("/episodes", "episode"), ("/groups", "episodes of group"), ("/replays", "")):
        text = ask(address, url(path, run=["a", "deep/b"], step="1"))[1]
        parts = re.split(r'<section aria-label="(a|deep/b)">', text)[1:]
        assert parts[::2] == ["a", "deep/b"]
        for name, part in zip(parts[::2], parts[1::2], strict=True):
            alone = ask(address, url(path, run=name, step="1"))[1]
            pattern = rf'aria-label="({what} \d+ of step \d+)"' if what else 'class="origin" href="([^"]*)"'
            assert re.findall(pattern, part) == re.findall(pattern, alone) != []
    both = ask(address, url("/episodes", run=["a", "deep/b"]))[1]
    [filters] = re.findall(r'<form class="filters".*?</form>', both, re.DOTALL)
    assert re.findall('name="run" value="([^"]*)"', filters) == ["a", "deep/b"]
    assert all(ask(address, link)[0] == 200 for link in set(links(both)))


def test_evaluations_on_further_splits_are_shown_by_their_names(tmp_path):
    run = LiveRun(tmp_path / "runs" / "x").write(2)
    (run.folder / "evaluations").mkdir()
    for prefix, task in (("", "main"), ("also_test_", "further"), ("also_un seen_", "no file of ours")):
        episode = {"task": task, "success": True, "reward": 1.0, "stop": "done", "turns": []}
        (run.folder / "evaluations" / f"{prefix}step_000002.jsonl").write_text(json.dumps(episode) + "\n")
    also = {"test": {"success": 0.25, "low": 0.1, "high": 0.5}, "<b>": 7}
    rows = [{"step": 0, "success": 0.5, "also": also}, {"step": 2, "success": 0.5, "also": 3}]
    (run.folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(tmp_path / "runs") as address:
        text = ask(address, url("/episodes", run="x", kind="evaluated"))[1]
        assert "main" in text
        assert "further" not in text
        [link] = {link for link in links(text) if "kind=also_test_" in link}
        text = ask(address, link)[1]
        assert "Episodes evaluated on test" in text
        assert "further" in text
        [episode] = [link for link in links(text) if link.startswith("/episode?")]
        assert "further" in ask(address, episode)[1]
        for kind in ("also_../x", "also_", "../trajectories", "also_un seen_"):
            assert "no file of ours" not in ask(address, url("/episodes", run="x", kind=kind))[1]
        curves = json.loads(ask(address, url("/data/curves", run="x"))[1])["runs"][0]["evaluations"]
        assert curves["series"]["eval/success on test"] == [0.25, None]
        assert curves["bands"]["eval/success on test"] == [[0.1, None], [0.5, None]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(4.4e-16, "0"), (-1e-17, "0"), (-0.0, "0"), (1e-8, "1e-08"), (0.12345, "0.1235"), (float("nan"), "nan"),
     (float("-inf"), "-inf"), (True, "yes"), (3, "3"), ([], ""), ("a\nb", "a\\nb")],
    ids=str,
)  # fmt: skip
def test_a_value_is_shown_as_a_reader_expects_it(value, shown):
    assert pages.number(value) == shown


def test_colours_follow_what_is_chosen(address):
    path = {name: ask(address, url("/episode", run="a", step=1, episode=2, colour=name))[1] for name in pages.COLOURS}
    assert re.search(r'class="token (up|down)\d"', path["advantage"])
    assert re.search(r'class="token heat\d"', path["logprob"])
    assert not re.search(r'class="token \w', path["none"])
    found = re.findall(r'class="token (heat\d)" title="token \d+: [^"]*entropy ([\d.]+)"', path["entropy"])
    assert set(found) == {("heat0", "0"), ("heat4", "0.8"), ("heat6", "1.6"), ("heat7", "2.4")}


def test_a_colour_is_offered_only_where_the_file_has_its_numbers(tmp_path):
    LiveRun(tmp_path / "runs" / "old", has_entropy=False).write(1)
    with serving(tmp_path / "runs") as address:
        text = ask(address, url("/episode", run="old", step=0, episode=0, colour="entropy"))[1]
        assert "colour=entropy" not in text
        assert "colour=logprob" in text
        assert re.search(r'class="token (up|down)\d"', text), "the default is shown instead"


@pytest.mark.parametrize("numbers", [[], [0.5], [0.5] * 9, [None, float("nan"), float("inf"), -7.0]], ids=str)
def test_numbers_that_do_not_fit_the_tokens_leave_tokens_without_colour(tmp_path, numbers):
    run = LiveRun(tmp_path / "runs" / "x").write(1)
    path = run.folder / "trajectories" / "steps_000000_000000.parquet"
    table = pq.read_table(path)
    for name in ("logprobs", "entropies"):
        place = table.schema.get_field_index(name)
        column = pa.array([numbers] * len(table), table.schema.field(name).type)
        table = table.set_column(place, name, column)
    pq.write_table(table, path)
    with serving(tmp_path / "runs") as address:
        for colour in pages.COLOURS:
            status, text, _ = ask(address, url("/episode", run="x", step=0, episode=0, colour=colour))
            assert status == 200
            assert text.count('class="token ') % 4 == 0
            assert text.count('class="token ') > 0


def test_damaged_and_half_written_files_are_named_and_the_rest_is_shown(tmp_path):
    run = LiveRun(tmp_path / "runs" / "x").write(4)
    part = run.folder / "trajectories" / "steps_000001_000001.parquet"
    part.write_bytes(part.read_bytes()[:500])
    (run.folder / "trajectories" / ".steps_000009_000009.parquet.part").write_bytes(b"half")
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"step": 4, "rollout/succ')
    (run.folder / "eval.jsonl").write_bytes(b"\xff\xfe\n[1]\n")
    (run.folder / "draws.jsonl").write_text(
        '{"step": 1, "draws": 7}\n{"step": 2, "draws": [7, {"episode": [], "played": 1}]}\n'
    )
    with serving(tmp_path / "runs") as address:
        curves = ask(address, url("/curves", run="x"))[1]
        assert "metrics.jsonl: 1 line is damaged" in curves
        assert "eval.jsonl: 2 lines are damaged" in curves
        text = ask(address, url("/episodes", run="x"))[1]
        assert "steps_000001_000001.parquet is damaged" in text
        assert {step for _, step in re.findall(r"episode (\d+) of step (\d+)", text)} == {"0", "2", "3"}
        assert ask(address, url("/replays", run="x"))[0] == 200
        assert "damaged" in ask(address, url("/episode", run="x", step=1, episode=0))[1]


def test_rows_are_read_as_they_grow_and_anew_after_a_resume(tmp_path):
    path, rng = tmp_path / "metrics.jsonl", random.Random(0)
    rows, text = GrowingRows(path), ""
    whole = "".join(json.dumps({"step": step, "x": rng.random()}) + "\n" for step in range(40))
    while len(text) < len(whole):
        text = whole[: len(text) + rng.randint(1, 99)]
        path.write_text(text)
        rows.refresh()
        assert len(rows.by_step) == text.count("\n")
        assert not rows.num_damaged
    path.write_text('{"step": 0, "x": 2}\n')
    rows.refresh()
    assert rows.by_step == {0: {"step": 0, "x": 2}}


def test_draws_are_found_whatever_the_lines_look_like(tmp_path):
    rng = random.Random(4)
    draws, plain = DrawRows(tmp_path / "draws.jsonl"), []
    for step in range(1, 30):
        found = [(rng.randrange(step), rng.randrange(5)) for _ in range(4)]
        tricky = '"episode": "1/1"'
        listed = [
            {"episode": f"{a}/{b}", "played": a, "task": tricky, "advantage": 0.5, "advantage_today": step / 2}
            for a, b in found
        ]
        plain += [(step, episode) for episode in found]
        spaced = {"separators": (",", ":")} if step % 3 == 0 else {}
        with draws.path.open("a") as file:
            file.write(json.dumps({"step": step, "draws": listed}, **spaced) + ("\n" if step % 7 else "\r\n"))
        draws.refresh()
    assert not draws.num_damaged
    assert [(draw.step, draw.episode) for draw in draws.newest_first()][::-1] == [
        pair for step in range(1, 30) for pair in [p for p in plain if p[0] == step][::-1]
    ]
    for episode in {episode for _, episode in plain} | {(99, 0)}:
        assert [draw.step for draw in draws.of_episode(episode)] == [step for step, other in plain if other == episode]
        assert all(draw.advantage_today == draw.step / 2 for draw in draws.of_episode(episode))
    assert draws.count() == len(plain)
    assert draws.count(3) == 4
    assert len(set(draws.keys().tolist())) == len({episode for _, episode in plain})


def test_curves_are_the_metrics_with_an_interval(root):
    run = Runs(root).get("a")
    curves = curves_of(run)
    rows = [json.loads(line) for line in (root / "a" / "metrics.jsonl").read_text().splitlines()]
    assert curves["steps"] == [row["step"] for row in rows]
    assert curves["series"]["policy/entropy"] == pytest.approx([row["policy/entropy"] for row in rows], rel=1e-5)
    low, high = curves["bands"]["rollout/success"]
    assert all(a < value < b for a, value, b in zip(low, curves["series"]["rollout/success"], high, strict=True))
    assert curves["series"]["replay/pass_rate"] == [0.75] * len(rows)
    assert next(chart["title"] for chart in charts_of([curves])) == "Success"


def test_a_long_run_is_drawn_by_some_of_its_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "x": {n}}}\n' for n in range(3 * MAX_POINTS + 5)))
    runs = Runs(tmp_path)
    curves = curves_of(runs.get(runs.root.name))
    assert len(curves["steps"]) <= MAX_POINTS + 1
    assert (curves["steps"][0], curves["steps"][-1]) == (0, 3 * MAX_POINTS + 4)


def test_a_report_is_one_file_that_loads_nothing(root, tmp_path):
    out = write_report([root / "a", root / "hostile"], tmp_path / "report.html")
    text = out.read_text("utf-8")
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert "<script>document" not in text
    assert "<img src=x" not in text
    assert "default-src 'none'" in html.unescape(text)
    assert text.count('<article id="e') >= 6
    data = json.loads(re.search(r'id="curves">(.*?)</script>', text, re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == ["a", "hostile"]


def test_an_experiment_has_the_curves_and_episodes_of_its_runs(root, tmp_path):
    arms = {"base": [root / "a", tmp_path / "gone"], "<b>spear": [root / "deep" / "b"]}
    text = write_runs_of(arms, tmp_path / "runs.html").read_text("utf-8")
    data = json.loads(re.search(r'id="curves">(.*?)</script>', text, re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == ["base: a", "<b>spear: b"]
    assert "<b>spear" not in text
    assert write_runs_of({"x": [tmp_path / "gone"]}, tmp_path / "none.html") is None


def test_what_is_no_run_is_refused_in_one_sentence(root, tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        write_report([root / "no run"], tmp_path / "x.html")
    with pytest.raises(UserError, match="no folder"):
        Runs(tmp_path / "none")


def test_the_command_serves_until_it_is_interrupted(root):
    command = [sys.executable, "-m", "spear_rl.cli", "view", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        address = re.search(r"http://[\d.:]+", server.stdout.readline())[0]
        assert ask(address, "/")[0] == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert not server.stderr.read()


def test_the_command_says_what_is_wrong_in_one_sentence(root, tmp_path):
    command = [sys.executable, "-m", "spear_rl.cli"]
    for words in (["view", tmp_path / "none"], ["report", root / "no run", "--out", tmp_path / "x.html"]):
        found = subprocess.run([*command, *map(str, words)], capture_output=True, text=True)
        assert found.returncode == 2
        assert found.stderr.startswith("error:")
        assert "Traceback" not in found.stderr
    assert not (tmp_path / "x.html").exists()


def test_a_part_of_another_kind_is_damaged_and_not_believed(tmp_path):
    run = LiveRun(tmp_path / "runs" / "x").write(2)
    path = run.folder / "trajectories" / "steps_000000_000000.parquet"
    table = pq.read_table(path)
    for name in ("step", "task", "turns", "measures"):
        place = table.schema.get_field_index(name)
        for column in (pa.nulls(len(table), table.schema.field(name).type), pa.array([b"\xff"] * len(table))):
            pq.write_table(table.set_column(place, name, column), path)
            with serving(tmp_path / "runs") as address:
                status, text, _ = ask(address, url("/episodes", run="x"))
                assert status == 200
                assert "steps_000000_000000.parquet is damaged" in text
                assert ask(address, url("/episode", run="x", step=0, episode=0))[0] in (200, 404)
