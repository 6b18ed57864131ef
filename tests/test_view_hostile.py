"""`spear view` against files and requests made to break it: no traceback, no hang, nothing from outside the folder."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from spear_rl.app.show.view import runs as runs_module
from spear_rl.app.show.view.report import write_report
from spear_rl.app.show.view.runs import GrowingRows
from spear_rl.app.show.view.server import ViewServer
from spear_rl.io.escaping import one_line
from spear_rl.io.http import site
from test_view import ask, links, url
from viewed_runs import LiveRun, running, serving

PAGES = ("/curves", "/episodes", "/groups", "/replays", "/data/curves", "/data/state", "/episode")


def visited(address: str, name: str) -> dict[str, str]:
    """Every page of a run, each of which must be made, and the list."""
    found = {}
    for path in ("/", *PAGES):
        status, text, _ = ask(address, url(path, run=name, step=0, episode=0) if path != "/" else "/")
        assert status in (200, 303) or (path == "/episode" and status == 404), (path, status, text[:300])
        found[path] = text
    return found


HUGE = 10**400
STRANGE = [
    "NaN", "Infinity", "-Infinity", "1e999", "-0.0", str(HUGE), f"-{HUGE}", "true", "null", '"<b>"', "[]", "{}",
    "[" * 900 + "]" * 900, "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, '"\\ud800"', "1" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: value[:12])
def test_no_value_of_a_metric_breaks_a_page(tmp_path, value):
    folder = LiveRun(tmp_path / "runs" / "x").write(2).folder
    also = f'{{"test": {{"success": {value}, "low": {value}}}, "other": {value}}}'
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            f'{{"step": 2, "rollout/success": {value}, "rollout/episodes": {value}, "replay/eligible": {value}}}\n'
        )
    (folder / "eval.jsonl").write_text(f'{{"step": 1, "success": {value}, "high": {value}, "also": {also}}}\n')
    (folder / "warnings.jsonl").write_text(f'{{"step": 1, "warnings": [{{"text": {value}}}, {value}]}}\n')
    (folder / "buffer.jsonl").write_text(f'{{"step": 1, "entered": [{value}], "left": {value}}}\n')
    draw = (
        f'{{"episode": "0/3", "advantage": {value}, "advantage_today": {value}, "task": {value}, "success": {value}}}'
    )
    (folder / "draws.jsonl").write_text(
        f'{{"step": 1, "draws": [{draw}, {value}]}}\n{{"step": {value}, "draws": []}}\n'
    )
    with serving(tmp_path / "runs") as address:
        text = visited(address, "x")["/data/curves"]
        assert not {"NaN", "Infinity"} & set(json.loads(text, parse_constant=str)["runs"][0])
        assert "NaN" not in text
        assert ask(address, url("/episode", run="x", step=0, episode=3))[0] == 200
    write_report([folder], tmp_path / "report.html")


@pytest.mark.parametrize("field", ["reward", "success", "stop", "task", "family", "metrics", "turns", "bonus"])
def test_no_value_in_json_lines_breaks_a_page(tmp_path, field):
    folder = LiveRun(tmp_path / "runs" / "x").write(1).folder
    good = {
        "task": "good",
        "success": True,
        "reward": 1.0,
        "stop": "done",
        "turns": [{"observation": "o", "text": "t"}],
    }
    bad = json.dumps(good | {field: "VALUE"})
    turn = json.dumps(good | {"turns": [{"reward": "VALUE", "advantage": "VALUE", field: "VALUE"}]})
    lines = [line.replace('"VALUE"', value) for value in STRANGE for line in (bad, turn)]
    (folder / "trajectories" / "step_000007.jsonl").write_text("\n".join([*lines, json.dumps(good)]) + "\n")
    with serving(tmp_path / "runs") as address:
        visited(address, "x")
        for path in ("/episodes", "/groups"):
            for sort in ("reward", "-task", "success", "-advantage", "measures"):
                status, text, _ = ask(address, url(path, run="x", step=7, sort=sort))
                assert (status, "good" in text) == (200, True)
        for number in range(len(lines) + 1):
            assert ask(address, url("/episode", run="x", step=7, episode=number))[0] == 200


NAMES = ["a\"b'<x>&", "a#b?c=d", "%2e%2e", "a+b %", "{{ 7*7 }}", "new\nline", "\u202eevil", "-x", "run=1&run=2", "é ü"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_of_a_run_leads_to_its_pages_and_is_no_markup(tmp_path, name):
    LiveRun(tmp_path / "runs" / name).write(2)
    with serving(tmp_path / "runs") as address:
        found = visited(address, name)
        assert json.loads(found["/data/curves"])["runs"][0]["label"] == one_line(name), "what the script shows"
        assert "<x>" not in "".join(text for path, text in found.items() if not path.startswith("/data"))
        assert "49" not in found["/curves"].partition("<h1>")[2].partition("</h1>")[0]
        for link in set(links(found["/episodes"])) | set(links(found["/"])):
            assert ask(address, link)[0] == 200
        assert "you see" in ask(address, url("/episode", run=name, step=0, episode=0))[1]
    text = write_report([tmp_path / "runs" / name], tmp_path / "report.html").read_text("utf-8")
    assert "<x>" not in text


def test_a_name_that_is_no_text_hides_no_other_run(tmp_path):
    LiveRun(tmp_path / "good").write(1)
    try:
        os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    except OSError:
        pytest.skip("this file system takes no such name")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff/config.toml")).write_text("")
    with serving(tmp_path) as address:
        assert "good" in visited(address, "good")["/"]


SECRET = "the secret of another folder"


@pytest.mark.parametrize(
    "what", ["metrics.jsonl", "config.toml", "trajectories", "evaluations", "token_texts", "dump", "part", "eval.jsonl"]
)
def test_a_link_out_of_the_folder_is_not_followed(tmp_path, what):
    other = LiveRun(tmp_path / "other", text=SECRET).write(2).folder
    row = {"step": 1, "success": 1, f"rollout/{SECRET}": 0.5, "warnings": [{"text": SECRET}]}
    turn = {"observation": SECRET, "text": SECRET}
    episode = {"task": SECRET, "success": True, "reward": 1.0, "stop": "done", "turns": [turn]}
    (other / "evaluations").mkdir()
    (other / "evaluations" / "step_000001.jsonl").write_text(json.dumps(episode))
    for name in ("metrics.jsonl", "eval.jsonl", "warnings.jsonl"):
        (other / name).write_text(json.dumps(row) + "\n")
    (other / "trajectories" / "token_texts.jsonl").write_text(
        json.dumps({"step": 0, "pieces": {str(n): SECRET for n in range(100)}}) + "\n"
    )
    own = LiveRun(tmp_path / "runs" / "x").write(2).folder
    path, target = {
        "token_texts": ("trajectories/token_texts.jsonl",) * 2,
        "dump": ("trajectories/step_000005.jsonl", "evaluations/step_000001.jsonl"),
        "part": ("trajectories/steps_000000_000000.parquet",) * 2,
    }.get(what, (what, what))
    if (own / path).is_dir():
        (own / path).rename(tmp_path / "moved")
    (own / path).unlink(missing_ok=True)
    os.symlink(other / target, own / path)
    os.symlink(other / "warnings.jsonl", own / "warnings.jsonl")
    with serving(tmp_path / "runs") as address:
        found = visited(address, "x")
        more = [
            url("/episodes", run="x", kind="evaluated"),
            url("/episode", run="x", kind="evaluated", step=1, episode=0),
        ]
        more += [url("/episode", run="x", step=step, episode=0) for step in (0, 1, 5)]
        assert SECRET not in "".join([*found.values(), *(ask(address, path)[1] for path in more)])


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "draws.jsonl", "config.toml"])
def test_a_pipe_in_place_of_a_file_does_not_hang_the_server(tmp_path, name):
    folder = LiveRun(tmp_path / "runs" / "x").write(2).folder
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    LiveRun(tmp_path / "runs" / "y").write(1)
    with serving(tmp_path / "runs") as address:
        visited(address, "x")
        visited(address, "y")


@pytest.mark.parametrize("seed", range(12))
def test_no_address_makes_the_server_fail(tmp_path_factory, seed):
    rng = random.Random(seed)
    root = tmp_path_factory.mktemp("runs")
    LiveRun(root / "x").write(2)
    values = [
        "", "0", "1", "-1", "9" * 8, "9" * 23, "9" * 4000, "\u0661", "\xb2", "0x1", "1e3", "\0", "'", "../x", "x/.",
        "x", "./x", "x//", "%00", "\n", "yes", "any", "a" * 30_000, "reward", "-measures", "also_x_", "evaluated",
    ]  # fmt: skip
    names = [
        "run", "step", "episode", "colour", "full", "task", "family", "success", "stop", "dropped", "replayed", "group",
        "sort", "page", "kind", "token", "x",
    ]  # fmt: skip
    with serving(root) as address:
        for _ in range(40):
            query = [("run", "x")] * rng.randint(0, 3) + [
                (rng.choice(names), rng.choice(values)) for _ in range(rng.randint(0, 5))
            ]
            rng.shuffle(query)
            path = rng.choice(
                ["/", *PAGES, "/static/view.css", "/%2e%2e/x", "/static/%2e%2e%2f%2e%2e%2fpages.py", "//x"]
            )
            joined = "&".join(url("", **{name: value})[1:] for name, value in query)
            status = ask(address, f"{path}?{joined}")[0]
            assert status in (200, 303, 400, 403, 404, 414, 431), (status, path, joined[:300])


def test_an_answer_that_nobody_reads_is_dropped_and_one_that_is_read_slowly_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "SECONDS", 0.5)
    LiveRun(tmp_path / "runs" / "x", text="y" * 1_000_000).write(1)
    view = ViewServer(tmp_path / "runs")
    view._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)  # else the kernel takes all of the answer
    with running(view) as server:
        address = ("127.0.0.1", urlsplit(server.address).port)
        question = (
            f"GET /episode?run=x&step=0&episode=0&full=1 HTTP/1.1\r\nHost: localhost:{address[1]}\r\n\r\n".encode()
        )
        with socket.socket() as idle, socket.socket() as slow:
            for client in (idle, slow):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
                client.connect(address)
                client.settimeout(60)
                client.sendall(question)
            received = bytearray()
            while b"</html>" not in received[-100:]:
                time.sleep(0.05)
                received += slow.recv(65_536)
            length = re.search(rb"(?i)content-length: (\d+)", received)
            assert len(received.partition(b"\r\n\r\n")[2]) == int(length[1]) > 2_000_000
            until = time.monotonic() + 30
            while server.server.server_state.connections and time.monotonic() < until:
                time.sleep(0.1)
            assert not server.server.server_state.connections


def test_a_file_of_rows_that_never_ends_a_line_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "_MAX_LINE", 2**16)
    rows = GrowingRows(tmp_path / "metrics.jsonl")
    rows.path.write_text('{"step": 0}\n')
    os.truncate(rows.path, 2**40)
    rows.refresh()
    assert list(rows.by_step) == [0]


def test_tokens_that_spell_markup_are_text(tmp_path):
    run = LiveRun(tmp_path / "runs" / "x")
    parts = [
        "</span></script>",
        "<scr",
        "ipt>owned=1</scr",
        "ipt>",
        '" onmouseover="owned=1',
        "&lt;b&gt;",
        "\x1b[2J",
        "\u202e",
    ]
    run.writer.pieces = lambda ids: [parts[number % len(parts)] for number in ids]
    run.write(2)
    with serving(tmp_path / "runs") as address:
        text = ask(address, url("/episode", run="x", step=0, episode=0))[1]
        answers = text.partition("<h2>Replay")[0]
        assert "ipt>owned" not in answers
        assert ' onmouseover="' not in answers
        assert "&amp;lt;b" in answers or "&lt;scr" in answers
    assert "ipt>owned=1" not in write_report([run.folder], tmp_path / "r.html").read_text("utf-8").replace("&gt;", "")
