"""What the command line prints while a run goes on: nothing is cut at any width, and logs are tidy lines."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_rl import cli
from spear_rl.app.build.threads import fastest_threads, use_threads
from spear_rl.app.config import load
from spear_rl.app.console import _SHOWN, LiveConsole, eval_progress, print_next_commands, print_report, sparkline
from spear_rl.app.evaluate import Report
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.io.record import recorded_threads
from spear_rl.io.terminal import PlainConsole
from spear_rl.rollout.workers.progress import Tally
from spear_rl.train.callbacks import Event
from spear_rl.train.evaluate import Evaluation

WIDTHS = [60, 61, 79, 80, 99, 100, 101, 120, 160, 200]


def drawn(width: int, height: int, values: list[float], *, steps: int = 30, total: int = 50, encoding: str = "utf-8"):
    """(what a terminal of this size shows after some steps, the metrics of the last)."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = PlainConsole(file=file, width=width, height=height, force_terminal=True, color_system=None)
    live = LiveConsole(console)
    rng = random.Random(0)
    live(Event("sft", total - 1, total, {"sft/loss": values[0]}))
    live(Event("sft", total, total, {"sft/loss": values[0]}))
    metrics: dict[str, float] = {}
    for step in range(steps):
        metrics = {key: rng.choice(values) for key in _SHOWN.values()}
        live(Event("step", step, total, metrics))
    console.print(live._view())
    file.flush()
    return raw.getvalue().decode(encoding), metrics


finite = st.one_of(st.floats(-1e9, 1e9), st.floats(-1, 1), st.floats(0, 1e-6), st.floats(-1e308, 1e308))
numbers = st.one_of(finite, st.sampled_from([math.nan, math.inf, -math.inf]))


@given(
    width=st.one_of(st.sampled_from(WIDTHS), st.integers(60, 250)),
    values=st.lists(numbers, min_size=1, max_size=8),
    total=st.sampled_from([50, 1_250, 10_000_000]),
)
def test_no_number_and_no_heading_is_cut_at_any_width(width, values, total):
    text, metrics = drawn(width, 24, values, total=total)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    words = re.split(r"\s\s+|\n", text)
    for name in _SHOWN:
        assert name in words
    if width < 100:
        for name, key in _SHOWN.items():
            row = next(line for line in text.splitlines() if line.startswith(name) and "0 to 1" not in line)
            shown = float(row.removeprefix(name).split()[0])
            assert shown == pytest.approx(metrics[key], rel=6e-3, abs=6e-4, nan_ok=True)
    assert f"{total}/{total}" in text
    assert "loss" in text
    assert f"30/{total}" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_metrics_stand_side_by_side_only_from_100_columns(width):
    text, _ = drawn(width, 24, [0.25, 0.5])
    is_wide = any("success" in line and "seconds" in line for line in text.splitlines())
    assert is_wide == (width >= 100)


@pytest.mark.parametrize("height", [5, 8, 12, 24, 50])
@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_view_is_never_higher_than_the_terminal(width, height):
    text, _ = drawn(width, height, [0.25, 1e6])
    assert len(text.splitlines()) <= height


def test_a_terminal_without_unicode_gets_plain_characters():
    text, _ = drawn(80, 24, [0.25, 0.5], encoding="ascii")
    assert "success, 0 to 1 " in text


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.integers(1, 100))
def test_a_sparkline_rises_and_falls_with_its_values(values, width):
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    if len(values) <= width:
        for value, mark in zip(values, line, strict=True):
            assert "▁▂▃▄▅▆▇█".index(mark) == pytest.approx(7 * value, abs=0.5)
    assert sparkline(sorted(values), width) == "".join(sorted(sparkline(sorted(values), width)))


def test_a_sparkline_leaves_out_what_is_not_known():
    assert sparkline([0.0, float("nan"), 1.0], 10) == "▁ █"
    assert sparkline([0.0, float("nan"), 1.0], 10, is_ascii=True) == "_ @"


def logged_lines(steps: int, updates: int, *, width: int = 80) -> list[str]:
    """What a log that is no terminal gets of a run with one evaluation."""
    file = io.StringIO()
    live = LiveConsole(PlainConsole(file=file, width=width))
    rng = random.Random(0)
    with live:
        for done in range(1, updates + 1):
            live(Event("sft", done, updates, {"sft/loss": 1 / done}))
        for step in range(steps):
            live(Event("step", step, steps, {key: rng.random() for key in _SHOWN.values()}))
            if step == steps // 2:
                live(Event("eval", step, metrics={"success": 0.5, "low": 0.4, "high": 0.6}))
        live(Event("end", steps, steps))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("steps", [1, 7, 20, 39, 50, 1000])
def test_a_log_gets_one_tidy_line_per_few_steps(steps):
    lines = logged_lines(steps, 1250)
    assert not any("\x1b" in line or "\r" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)
    trained = [line for line in lines if line.startswith("step ")]
    assert min(steps, 11) <= len(trained) <= 21
    assert re.match(rf"step {steps}/{steps} +done  success \d", trained[-1])
    fields = [re.findall(r"success|reward|tool turns|invalid|entropy", line) for line in trained]
    assert all(names == ["success", "reward", "tool turns"] for names in fields)
    started = [line for line in lines if line.startswith("cold start ")]
    assert 10 <= len(started) <= 12
    assert all(re.search(r"(left|done)  loss \d", line) for line in started)
    assert sum(line.startswith("held-out success 50.0% (40.0% to 60.0%)") for line in lines) == 1


def test_a_wide_log_has_every_metric():
    assert all(name in logged_lines(50, 10, width=300)[-1] for name in _SHOWN)


@pytest.mark.parametrize("late", list(_SHOWN))
def test_a_metric_that_comes_later_than_the_others_keeps_its_place(late):
    file = io.StringIO()
    live = LiveConsole(PlainConsole(file=file, width=300))
    with live:
        for step in range(3):
            known = [key for name, key in _SHOWN.items() if step or name != late]
            live(Event("step", step, 3, dict.fromkeys(known, 0.5)))
            live._console.print(live._view())
    complete = [line for line in file.getvalue().splitlines() if re.search(".*".join(_SHOWN), line)]
    logged = [line for line in complete if line.startswith("step ")]
    assert re.match("step 3/3 ", logged[-1])
    assert len(complete) - len(logged) == 2  # the table, of the second and the third step


def test_time_left_follows_the_pace(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("spear_rl.app.console.time.monotonic", lambda: now[0])
    file = io.StringIO()
    live = LiveConsole(PlainConsole(file=file, width=80))
    for done in range(1, 11):
        now[0] += 90
        live(Event("sft", done, 100, {"sft/loss": 1.0}))
    assert "2:15:00 left" in file.getvalue().splitlines()[-1]
    assert len(file.getvalue().splitlines()) == 10, "a slow run is not silent for longer than a minute"


@pytest.mark.parametrize("run_dir", ["runs/quickstart", "runs/with a space", "r", "runs/" + "long" * 30])
@pytest.mark.parametrize("verb", ["train", "sft"])
@pytest.mark.parametrize("trackers", [["jsonl"], ["jsonl", "tensorboard"]])
def test_a_run_ends_with_three_commands_to_look_further(run_dir, verb, trackers):
    file = io.StringIO()
    print_next_commands(PlainConsole(file=file, width=80), Path(run_dir), verb=verb, trackers=trackers)
    head, *lines = file.getvalue().splitlines()
    assert head == "look further:"
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[0] in ("spear", "tensorboard")
        assert any(run_dir in word for word in words)
        assert len(line) <= 80 or len(run_dir) > 40


@pytest.mark.parametrize("width", WIDTHS)
def test_the_progress_of_an_evaluation_is_not_cut(width):
    file = io.StringIO()
    console = PlainConsole(file=file, width=width, force_terminal=True, color_system=None)
    with eval_progress(console) as show:
        show(Tally(num_turns=123456789, num_solved=1234567, num_failed=1234, num_ended=2345678, num_episodes=20000000))
        console.print("")  # draws what is to be seen now
    assert "…" not in file.getvalue()
    assert "2345678/20000000" in file.getvalue()


def test_an_evaluation_with_long_names_is_printed_whole_at_80_columns():
    rate = {"success": 0.123, "low": 0.0, "high": 0.987654, "episodes": 123456789.0}
    name = "a_very_long_kind_of_task_" * 6
    evaluation = Evaluation(
        **{**rate, "episodes": 123456789},
        reward=0.5,
        turns=3.0,
        invalid_turns=0.1,
        failed_episodes=0,
        by_family={name: rate},
        solved={},
    )
    about = {"model": "m" * 100, "env": "e", "split": "test", "tasks": ["t"], "episodes_per_task": 1}
    report = Report(evaluation, about | {"max_turns": 3, "seed": 0})
    file = io.StringIO()
    print_report(report, PlainConsole(file=file, width=80))
    text = file.getvalue()
    assert "…" not in text
    assert "123456789" in text
    assert "0.0% - 98.8%" in text
    assert text.count("m") >= 100


@pytest.fixture
def threads(monkeypatch):
    """Two threads, as if nobody had said how many; one again afterwards."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class SlowModel(torch.nn.Module):
    """Its forward pass takes as many milliseconds as `cost` says for the number of threads, by a clock of its own."""

    def __init__(self, cost: dict[int, float]) -> None:
        super().__init__()
        self.cost, self.asked, self.now = cost, set(), 0.0

    def perf_counter(self):
        return self.now

    def forward(self, input_ids):
        self.asked.add(torch.get_num_threads())
        self.now += self.cost[torch.get_num_threads()] / 1000


@pytest.mark.parametrize(
    ("cost", "best"),
    [({1: 30, 2: 10}, 2), ({1: 10, 2: 30}, 1), ({1: 40, 2: 20, 4: 10, 8: 40}, 4), ({1: 5, 3: 25, 6: 25}, 1)],
)
def test_the_fastest_number_of_threads_is_found(threads, monkeypatch, cost, best):
    model = SlowModel(cost)
    monkeypatch.setattr("spear_rl.app.build.threads.time", model)
    assert fastest_threads(model, max(cost)) == best
    assert model.asked == set(cost)


def test_measuring_threads_changes_neither_weights_nor_random_numbers(threads, tokenizer, monkeypatch):
    monkeypatch.setattr("spear_rl.app.build.threads._SECONDS", 0.05)
    model = tiny_model("tiny-xs", tokenizer, seed=0).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert fastest_threads(model, 2) in (1, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_threads_that_are_set_are_obeyed_and_recorded_ones_are_used_again(threads, monkeypatch, tmp_path):
    monkeypatch.setattr("spear_rl.app.build.threads.fastest_threads", lambda model, most: 5)
    cpu, model = torch.device("cpu"), SlowModel({})

    def used(threads: int = 0, folder: Path | None = None) -> int:
        torch.set_num_threads(2)
        use_threads(load("lookup", [f"run.dir={tmp_path}", f"run.threads={threads}"]), model, cpu, folder)
        return torch.get_num_threads()

    checkpoint = tmp_path / "checkpoints" / "step_000003"
    assert used() == 5
    assert used(threads=3) == 3
    assert used(folder=checkpoint) == 5, "nothing is recorded"
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"threads": 1}, {"threads": 4}], "trackers": {}}))
    assert used(folder=checkpoint) == used(folder=tmp_path / "model") == 4
    assert used(threads=3, folder=checkpoint) == 3
    assert used() == 5, "a new run measures"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert used() == 2
    assert used(folder=checkpoint) == 2
    assert used(threads=3) == 3


@pytest.mark.parametrize("threads", [None, 0, -1, 2000, 1.5, "2", True, [], {}])
def test_a_damaged_record_of_threads_counts_as_none(tmp_path, threads):
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"threads": threads}], "trackers": {}}))
    assert recorded_threads(tmp_path) == 0


def test_a_run_records_its_threads_and_neither_resume_nor_evaluation_measures_again(
    threads, spear, tmp_path, monkeypatch
):
    chosen = []

    def choose(model, most):
        chosen.append(1)
        return 1

    monkeypatch.setattr("spear_rl.app.build.threads.fastest_threads", choose)
    tiny = ["run.threads=0", "sft.episodes=4", "sft.epochs=1", "eval.tasks=2", "rollout.num_tasks=2"]
    assert spear("train", "lookup", f"run.dir={tmp_path / 'run'}", "run.steps=1", *tiny)[0] == 0
    torch.set_num_threads(2)
    assert spear("train", f"run.dir={tmp_path / 'run'}", "run.resume=true", "run.steps=2")[0] == 0
    torch.set_num_threads(2)
    assert spear("eval", tmp_path / "run", "--tasks", 2)[0] == 0
    assert torch.get_num_threads() == 1
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert [start["threads"] for start in starts] == [1, 1]
    assert chosen == [1]


def test_the_command_line_has_waiting_threads_sleep_unless_the_user_says_otherwise(spear, monkeypatch):
    for asked, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.setenv("OMP_WAIT_POLICY", asked or "")
        if asked is None:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        assert spear("--version")[0] == 0
        assert os.environ["OMP_WAIT_POLICY"] == expected


def test_importing_the_library_changes_no_environment_variable():
    script = (
        "import os; before = dict(os.environ); import spear_rl.cli, spear_rl.app.train; assert os.environ == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


_WARNING = """
import logging, sys, warnings
from spear_rl import cli
sys.argv = ["spear", "show", "config"]
try:
    cli.main()
except SystemExit:
    pass
from transformers.utils import logging as theirs
theirs.get_logger("transformers.models.x").warning("logged by transformers")
warnings.warn_explicit("warned by transformers", FutureWarning, "x.py", 1, module="transformers.models.x")
logging.getLogger("spear_rl.x").warning("logged by us")
warnings.warn_explicit("warned by us", UserWarning, "x.py", 1, module="spear_rl.x")
warnings.warn_explicit("warned by another", UserWarning, "x.py", 1, module="transformers_of_mine")
"""


def test_warnings_of_transformers_stay_out_and_ours_do_not():
    unset = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", _WARNING], capture_output=True, text=True, check=True, env=unset)
    assert "by transformers" not in done.stdout + done.stderr
    for text in ("logged by us", "warned by us", "warned by another"):
        assert text in done.stderr


@pytest.mark.parametrize("command", [["list"], ["doctor", "quickstart"]])
@pytest.mark.parametrize("width", [60, 80])
def test_tables_are_not_cut(spear, monkeypatch, command, width):
    monkeypatch.setattr(cli, "console", PlainConsole(width=width))
    code, text = spear(*command)
    assert code == 0
    assert "…" not in text
    assert command != ["list"] or "GGUF" in text, "every kind of model is named"
