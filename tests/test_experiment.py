"""Experiments: plans that are refused, commands that run, kills, failures, and a report whose numbers are recomputed.

Most cells are played by a program that writes a finished run folder at once; those of the slow tests are real.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from warnings import catch_warnings, simplefilter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chromium import PROGRAM, Browser
from conftest import logged
from spear_rl.app.compare.experiment import commands, jobs_of, live, read_plan, results_of_plan
from spear_rl.app.compare.experiment.about import cells_ran_on
from spear_rl.app.compare.experiment.cells import cell_of, gpus
from spear_rl.app.compare.experiment.curves import NAMES, Line, Panels, _ages
from spear_rl.app.compare.experiment.figures import _fill, draw_all
from spear_rl.app.compare.experiment.measures import MEASURES
from spear_rl.app.compare.experiment.plan import BUDGET
from spear_rl.app.compare.plots import add_legend, drawing, looks_of
from spear_rl.app.config import flat, load, merged, resolved, to_toml, with_changes
from spear_rl.cli.experiment import _print_table
from spear_rl.errors import ConfigError
from spear_rl.io.http.look import asset

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
PLAN = """# Does it help?
preset = "lookup"
seeds = [0, 1]
reference = "base"
[budget]
steps = 3
[settings]
run = {trackers = ["jsonl"]}
sft = {episodes = 16, epochs = 1}
eval = {tasks = 8, every = 1}
rollout = {num_tasks = 2}
[arms.base]
algorithm = {bonus = {mode = "none"}, imitation = {enabled = false}}
[arms.spear]
"""
BLOCKS = """
[blocks.task.short]
task = {options = {num_digits = 3}}
[blocks.task.long]
task = {options = {num_digits = 6}}
[blocks.base.grpo]
algorithm = {name = "spear-grpo"}
[blocks.base.rloo]
algorithm = {name = "spear-rloo"}
"""

STAND_IN = """#!{python}
import json, os, sys, time
from pathlib import Path
from spear_rl.app.config import load, to_toml

words = sys.argv[3:]
log = Path(os.environ["STAND_IN_LOG"])
with log.open("a") as file:
    call = {{"words": words, "threads": os.environ.get("OMP_NUM_THREADS"), "time": time.time()}}
    call["gpu"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    sources = [word for word in words[1:] if "=" not in word]
    config = load(sources[0] if sources else None, [word for word in words[1:] if "=" in word])
    folder = Path(config.run.dir)
    file.write(json.dumps(call | {{"folder": str(folder)}}) + "\\n")
deadline = time.time() + 120
while len(log.read_text().splitlines()) < int(os.environ.get("STAND_IN_WAITS_FOR", "0")) and time.time() < deadline:
    time.sleep(0.05)
time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
part, _, times = os.environ.get("STAND_IN_FAILS", "").partition("*")
tries = sum(json.loads(line)["words"] == words for line in log.read_text().splitlines())
if part and part in str(folder) and tries <= int(times):
    print("something before")
    print("error: no room \\x1b[31m left")
    sys.exit(3)
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.toml").write_text(to_toml(config))
if words[0] == "sft":
    (folder / "model").mkdir()
    sys.exit()
rate = {{"success": 0.5, "low": 0.4, "high": 0.6}}
steps = config.run.steps
rows = [{{"step": n, "rollout/success": 0.5, "rollout/episodes": 16.0, "time/step": 1.0}} for n in range(steps)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
evals = [{{"step": n}} | rate for n in range(steps + 1)]
(folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in evals))
(folder / "summary.json").write_text(json.dumps({{"steps": steps, "success_before": rate, "success_after": rate}}))
"""


@pytest.fixture
def written(tmp_path):
    """Writes a plan and returns its path."""

    def write(text=PLAN, name="plan.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in place of Python that plays every cell at once; returns what it was called with."""
    program, log = tmp_path / "stand_in", tmp_path / "calls.jsonl"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    monkeypatch.setattr(sys, "executable", str(program))

    def calls():
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return calls


@pytest.fixture
def drawn():
    """Asks for figures, which take most of the time of a report."""


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("spear_rl.app.compare.experiment.report.draw_all", lambda *_: [])


def refused(path, out=None):
    with pytest.raises(ConfigError) as error:
        read_plan(path, out)
    return str(error.value)


# The plan.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sedes = [0]\n" + PLAN, "unknown key sedes; did you mean seeds?"),
        (PLAN.replace("[0, 1]", "[1, 2, 1]"), "seeds has 1 more than once"),
        (PLAN.replace("[0, 1]", "[0, true]"), "seeds must be whole numbers"),
        (PLAN.replace("[0, 1]", "[0, -1]"), "run.seed must be"),
        (PLAN.replace("[0, 1]", "[]"), "seeds is missing or empty"),
        (PLAN.replace('"base"', '"bass"'), "reference is no arm: 'bass'; did you mean base?"),
        (PLAN + "algorithm = {imitation = {wieght = 2}}\n", "[arms.spear] unknown setting algorithm.imitation.wieght"),
        (PLAN + "optim = {learning_rate = 7}\n", "[arms.spear] optim.learning_rate must be"),
        (PLAN + "run = {seed = 3}\n", "[arms.spear] sets run.seed"),
        (PLAN + "preset = 'tiny'\n", "[arms.spear] names a preset"),
        (PLAN + "run = {steps = 4}\n", "run.steps is 4 in spear and 3 in base: [budget] is for all arms alike"),
        (PLAN + "eval = {tasks = 0}\n", "eval.every=1 with eval.tasks=0"),
        (PLAN + "[arms.twin]\n", "the arms spear and twin are equal"),
        (PLAN + "[arms.'a/b']\nrun = {threads = 2}\n", "the name 'a/b' must be of letters"),
        (PLAN + "[arms.'..']\nrun = {threads = 2}\n", "the name '..' must be of letters"),
        ('primary = "eval_men"\n' + PLAN, "primary cannot be 'eval_men'; did you mean eval_mean?"),
        ('primary = "also_mean"\n' + PLAN, "primary=also_mean: it needs a split in eval.also, which is empty"),
        (PLAN.replace("steps = 3", "steps = 0"), "primary=eval_mean: run.steps is 0 in cell base/seed_0"),
        (PLAN + "[blocks.task.a]\n[blocks.task.b]\n", "the blocks a and b are equal"),
        ('secondary = ["eval_mean"]\n' + PLAN, "eval_mean is named more than once"),
        ('secondary = [["x"]]\n' + PLAN, "secondary cannot be"),
        ("jobs = -1\n" + PLAN, "jobs must be 0 or more"),
        ("shared_cold_start = 1\n" + PLAN, "shared_cold_start must be true or false"),
        ('config = "other.toml"\n' + PLAN, "the plan has a preset and a config"),
        (PLAN.replace('"lookup"', '"lookpu"'), "there is no preset 'lookpu'; did you mean lookup?"),
        (PLAN.replace("steps = 3", "setps = 3"), "[budget] has no key setps; did you mean steps?"),
        (PLAN.replace("steps = 3", 'steps = "x"'), "[budget] run.steps"),
        (PLAN + "[blocks.task]\nshort = 3\n", "[blocks.task] must be an axis"),
        (PLAN + "[blocks.task.a]\npreset = ['x']\n", "[blocks.task.a]: preset must be a text"),
        (PLAN + "[settings.eval]\n", "not valid TOML"),
        ("arms = 3\n", "arms must be a table"),
        (PLAN + "algoritm = {kl = 0.1}\n", "[arms.spear] has an unknown section algoritm; did you mean algorithm?"),
        (PLAN + "[arms.Spear]\nalgorithm = {kl = 0.1}\n", "spear and Spear differ in case alone"),
        (PLAN + BLOCKS + "[blocks.base.GRPO]\n", "grpo and GRPO differ in case alone"),
    ],
)  # fmt: skip
def test_a_plan_with_a_fault_is_refused_in_a_sentence_before_anything_runs(
    spear, written, tmp_path, stand_in, text, says
):
    code, printed = spear("experiment", written(text), "--out", tmp_path / "out")
    assert (code, says in " ".join(printed.split())) == (2, True), printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
    assert not stand_in()


def test_all_faults_of_a_plan_are_told_at_once(written):
    text = PLAN.replace('"base"', '"x"').replace("[0, 1]", "[0, 0]") + "optim = {learning_rate = 7}\n"
    said = refused(written(text)).splitlines()
    assert len(said) == 3
    assert all(line.startswith(str(written(text))) for line in said)


def test_a_plan_whose_file_has_no_name_for_a_folder_is_told_to_have_one(written):
    says = "the name 'my plan' must be of letters"
    assert f"{says}" in (told := refused(written(name="my plan.toml")))
    assert told.endswith("it is the file's, so give the plan another: name = ...")
    assert read_plan(written('name = "mine"\n' + PLAN, name="my plan.toml")).name == "mine"


def test_a_missing_plan_and_one_that_is_no_text_are_sentences(spear, tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name in ("absent.toml", "bytes.toml"):
        code, printed = spear("experiment", tmp_path / name)
        assert code == 2
        assert "Traceback" not in printed


def test_every_arm_and_block_of_a_seed_comes_before_the_next_seed(written):
    plan = read_plan(written(PLAN + BLOCKS))
    assert [cell.seed for cell in plan.cells] == [0] * 8 + [1] * 8
    assert [cell.name for cell in plan.cells[:3]] == [
        "short/grpo/base/seed_0",
        "short/grpo/spear/seed_0",
        "short/rloo/base/seed_0",
    ]
    assert plan.cells[0].folder == Path("experiments_out/plan/cells/short/grpo/base/seed_0")


def test_what_is_nearer_to_a_cell_wins(written):
    text = PLAN.replace("rollout = {num_tasks = 2}", "rollout = {num_tasks = 2, group_size = 4}")
    text += "rollout = {group_size = 6}\n" + BLOCKS + "rollout = {group_size = 5, num_tasks = 3}\n"
    cells = {cell.name: cell.config for cell in read_plan(written(text)).cells}
    grpo, rloo = cells["short/grpo/base/seed_1"], cells["short/rloo/base/seed_1"]
    assert (grpo.rollout.num_tasks, grpo.rollout.group_size, grpo.run.seed) == (2, 4, 1)
    assert (rloo.rollout.num_tasks, rloo.rollout.group_size) == (3, 5)
    assert cells["long/rloo/spear/seed_0"].rollout.group_size == 6
    assert cells["long/rloo/spear/seed_0"].algorithm.name == "spear-rloo"


def test_a_choice_may_begin_with_a_preset_or_a_file_of_its_own(written, tmp_path):
    (tmp_path / "mine.toml").write_text('[task]\nenv = "lookup"\n[rollout]\ngroup_size = 3\n')
    axis = '[blocks.task.toy]\n[blocks.task.file]\nconfig = "mine.toml"\n[blocks.task.house]\npreset = "quickstart"\n'
    plan = read_plan(written(PLAN + axis))
    sources = {cell.block: cell.source for cell in plan.cells}
    assert sources == {("toy",): "lookup", ("file",): str(tmp_path / "mine.toml"), ("house",): "quickstart"}
    assert {c.config.task.env for c in plan.cells if c.block == ("house",)} == {"household"}
    assert {c.config.rollout.group_size for c in plan.cells if c.block == ("file",)} == {3}


def test_a_block_with_another_environment_does_not_get_the_options_of_the_first(written):
    text = PLAN.replace("[settings]", "[settings]\ntask = {options = {num_digits = 4}}")
    text += '[blocks.task.toy]\n[blocks.task.house]\ntask = {env = "household", options = {level = "starter"}}\n'
    options = {cell.block: cell.config.task.options for cell in read_plan(written(text)).cells}
    assert options == {("toy",): {"num_digits": 4}, ("house",): {"level": "starter"}}


def random_layer(rng):
    texts = ["plain", "5", "true", " led", "a=b", 'quo"te', "#x", "[1]", "ü/\\n", "1e-3", "'q'", "0x1f", "2020-01-01"]
    options = {
        rng.choice(["a", "b", "odd key", "c.d"]): rng.choice([1, 2.5, True, [1, "x"], {"z": {"y": "5"}}, *texts])
    }
    layer = {
        "task": {"options": options},
        "optim": {"learning_rate": rng.choice([1, 0.5, 1e-7])},
        "rollout": {"stop": rng.sample(texts, 2), "group_size": rng.randint(2, 9)},
        "engine": {"model": rng.choice(texts), "lora_targets": rng.sample(texts, 1)},
        "algorithm": {"name": "my.module:make", "bonus": {"mode": rng.choice(["none", "cosine"])}, "kl": 0.5},
    }
    return {key: layer[key] for key in rng.sample(sorted(layer), rng.randint(0, 5))}


@pytest.mark.parametrize("seed", range(40))
def test_the_command_of_a_cell_means_the_settings_of_its_layers_one_after_the_other(seed):
    rng = random.Random(seed)
    layers = [random_layer(rng) for _ in range(3)]
    cell = cell_of("lookup", layers, Path("out dir"), ("x",), "arm", 3)
    expected = merged("lookup")
    for layer in layers:
        with_changes(expected, [], block=layer)
    expected.run.seed, expected.run.dir, expected.run.resume = 3, str(cell.folder), "auto"
    verb, source, *overrides = shlex.split(shlex.join(cell.arguments))
    assert (verb, source) == ("train", "lookup")
    assert flat(load(source, overrides)) == flat(resolved(expected)) == flat(cell.config)


def test_notes_say_what_else_differs_between_arms(written):
    text = PLAN.replace("[budget]\nsteps = 3\n", "[budget]\n")
    text += 'algorithm = {imitation = {update = "separate"}}\nrollout = {group_size = 16}\n'
    notes = " ".join(read_plan(written(text)).notes)
    assert "not the same budget: rollout.group_size is 16 in spear and 8 in base" in notes
    assert "spear takes optimizer steps of its own" in notes
    assert not read_plan(written(PLAN)).notes
    easier = read_plan(written(PLAN + "task = {options = {num_digits = 3}}\n")).notes
    assert easier == ["not the same task: task.options is {'num_digits': 3} in spear and {'num_digits': 5} in base"]


@pytest.mark.parametrize(("every", "is_told"), [(0, True), (1, False), (3, True), (9, True)])
def test_a_note_says_that_a_mean_over_evaluations_is_of_one_alone(written, every, is_told):
    notes = read_plan(written(PLAN.replace("every = 1", f"every = {every}"))).notes
    said = "cells are evaluated before and after RL only, so eval_mean is eval_final"
    assert notes == [f"eval.every is {every} and run.steps 3: {said}"] * is_told


def test_a_plan_that_begins_with_a_byte_order_mark_is_the_same_plan(written):
    text = read_plan(written()).text
    assert read_plan(written("\ufeff" + PLAN)).text == text == PLAN


def test_notes_say_which_measure_no_cell_will_have(written):
    assert (
        "no also_final in cell base/seed_0: it needs a split"
        in read_plan(written('secondary = ["also_final"]\n' + PLAN)).notes[0]
    )
    silent = PLAN.replace("eval = {tasks = 8, every = 1}", "eval = {tasks = 0}")
    (note,) = read_plan(written('primary = "rollout_last"\n' + silent)).notes
    assert note == "there will be no eval_final in cell base/seed_0: it needs evaluations, but eval.tasks is 0"


@pytest.mark.parametrize("key", BUDGET)
def test_no_arm_may_change_what_the_budget_fixes(written, key):
    section, name = BUDGET[key].split(".")
    value = 2 if key != "minibatch_rows" else 0
    other = 4 if key != "minibatch_rows" else 8
    text = PLAN.replace("steps = 3", f"{key} = {value}").replace("rollout = {num_tasks = 2}\n", "")
    assert "[budget] is for all arms alike" in refused(written(text + f"{section} = {{{name} = {other}}}\n"))
    assert read_plan(written(text + f"{section} = {{{name} = {value}}}\n"))


def test_cells_take_one_thread_unless_the_plan_says_otherwise(written, monkeypatch):
    monkeypatch.setattr("spear_rl.app.compare.experiment.cells.gpus", lambda: ())
    text = PLAN.replace('"lookup"', '"quickstart"')
    assert {cell.config.run.threads for cell in read_plan(written(text)).cells} == {1}
    assert all("run.threads=1" in cell.arguments for cell in read_plan(written(text)).cells)
    text = text.replace("run = {trackers", "run = {threads = 3, trackers")
    assert {cell.config.run.threads for cell in read_plan(written(text)).cells} == {3}


# Shared cold starts.


def test_blocks_that_differ_in_the_algorithm_alone_share_a_cold_start(written):
    plan = read_plan(written("shared_cold_start = true\n" + PLAN + BLOCKS))
    folders = [cold.folder.relative_to(plan.out) for cold in plan.cold_starts]
    assert sorted(map(str, folders)) == sorted(f"cold_starts/{t}/seed_{s}" for t in ("short", "long") for s in (0, 1))
    for cell in plan.cells:
        assert cell.config.sft.episodes == 0
        assert cell.config.engine.model == str(cell.cold_start.folder / "model")
        assert cell.cold_start.config.run.seed == cell.seed
        assert cell.cold_start.config.task.options == cell.config.task.options
        assert cell.cold_start.config.sft.episodes == 16


def test_an_arm_with_another_cold_start_has_one_of_its_own(written):
    text = "shared_cold_start = true\n" + PLAN + "sft = {episodes = 8}\n[arms.third]\nalgorithm = {kl = 0.1}\n"
    plan = read_plan(written(text + "[arms.none]\nsft = {episodes = 0}\n"))
    starts = {cell.arm: cell.cold_start for cell in plan.cells if cell.seed == 0}
    assert starts["base"] is starts["third"]
    assert starts["spear"].folder != starts["base"].folder
    assert starts["spear"].config.sft.episodes == 8
    assert starts["none"] is None
    assert len(plan.cold_starts) == 4


def test_a_cold_start_is_run_before_the_first_cell_that_needs_it(written):
    jobs = jobs_of(read_plan(written("shared_cold_start = true\n" + PLAN + BLOCKS)))
    seen = set()
    for job in jobs:
        assert job.needs is None or id(job.needs) in seen
        seen.add(id(job))
    assert [job.arguments[0] for job in jobs].count("sft") == 4


# Running.


@contextlib.contextmanager
def begun(path, out, is_there, *options):
    """The command in a process of its own, once `is_there` says that it came far enough; ended afterwards."""
    arguments = ["spear", "experiment", str(path), "--out", str(out), *options]
    program = f"import sys; sys.executable, sys.argv = {sys.executable!r}, {arguments!r}; "
    process = subprocess.Popen(
        [PYTHON, "-c", f"{program}from spear_rl.cli import main; main()"], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    try:
        deadline = time.time() + 180
        while not is_there():
            assert process.poll() is None, process.stdout.read()
            assert time.time() < deadline
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
        process.stdout.close()


def test_the_dry_run_prints_the_commands_that_run_and_runs_none(spear, written, tmp_path, stand_in):
    path, out = written("shared_cold_start = true\n" + PLAN + BLOCKS), tmp_path / "out with space"
    code, printed = spear("experiment", path, "--out", out, "--dry-run")
    assert code == 0
    assert not stand_in()
    assert not out.exists()
    promised = [shlex.split(line) for line in printed.splitlines()]
    assert all(words[0] == "spear" for words in promised)
    assert len(promised) == 4 + 16
    assert spear("experiment", path, "--out", out, "--jobs", 1)[0] == 0
    assert [call["words"] for call in stand_in()] == [words[1:] for words in promised]
    assert {call["threads"] for call in stand_in()} == {"1"}


def test_what_is_finished_is_not_run_again(spear, written, tmp_path, stand_in):
    path, out = written(), tmp_path / "out"
    assert spear("experiment", path, "--out", out)[0] == 0
    assert len(stand_in()) == 4
    before = (out / "cells/base/seed_0/summary.json").stat().st_mtime_ns
    (out / "report.md").unlink()
    (out / "cells/spear/seed_1/summary.json").unlink()
    assert spear("experiment", path, "--out", out)[0] == 0
    assert [call["words"][-2] for call in stand_in()[4:]] == [f"run.dir={out / 'cells/spear/seed_1'}"]
    assert (out / "cells/base/seed_0/summary.json").stat().st_mtime_ns == before
    assert (out / "report.md").exists()


def test_cells_of_other_settings_than_the_plans_are_refused(spear, written, tmp_path, stand_in):
    out = tmp_path / "out"
    assert spear("experiment", written(), "--out", out)[0] == 0
    changed = PLAN.replace("num_tasks = 2", "num_tasks = 4")
    code, printed = spear("experiment", written(changed), "--out", out)
    assert code == 2
    assert "rollout.num_tasks=2 where the plan has 4: choose another --out, or delete that folder" in printed
    assert len(stand_in()) == 4
    (out / "cells/base/seed_0/summary.json").unlink()  # one that is half-way is refused as well
    assert str(out / "cells/base/seed_0") in spear("experiment", written(changed), "--out", out)[1]


@pytest.mark.parametrize("options", [[], ["--report-only"]])
def test_cells_that_were_begun_are_taken_where_the_experiment_moved_or_its_folder_is_spelt_otherwise(
    spear, written, tmp_path, stand_in, monkeypatch, options
):
    monkeypatch.chdir(tmp_path)
    path = written("shared_cold_start = true\n" + PLAN)
    assert spear("experiment", path, "--out", "out")[0] == 0
    for out in (tmp_path / "out", Path("moved")):
        if not out.exists():
            Path("out").rename(out)
        (out / "cells/base/seed_0/summary.json").unlink(missing_ok=True)
        calls = len(stand_in())
        code, printed = spear("experiment", path, "--out", out, *options)
        assert code == 0, printed
        assert len(stand_in()) == calls + (not options)


def test_cells_that_saved_or_recorded_more_often_than_the_plan_says_are_taken(spear, written, tmp_path, stand_in):
    out = tmp_path / "out"
    assert spear("experiment", written(), "--out", out)[0] == 0
    changed = PLAN.replace('trackers = ["jsonl"]', 'trackers = ["jsonl"], checkpoint_every = 7, trajectories_every = 3')
    assert changed != PLAN
    assert spear("experiment", written(changed), "--out", out)[0] == 0
    assert len(stand_in()) == 4


@pytest.mark.parametrize("text", [PLAN, "shared_cold_start = true\n" + PLAN])
def test_cells_of_a_machine_with_gpus_are_taken_on_one_without(spear, written, tmp_path, stand_in, monkeypatch, text):
    """Where a plan does not say run.threads, a cell has one thread on a CPU and leaves it open on a GPU."""
    path, out = written(text.replace('"lookup"', '"quickstart"')), tmp_path / "out"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus.cache_clear()
    try:
        assert spear("experiment", path, "--out", out)[0] == 0
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        gpus.cache_clear()
        calls = len(stand_in())
        code, printed = spear("experiment", path, "--out", out)
    finally:
        gpus.cache_clear()
    assert (code, len(stand_in())) == (0, calls), printed


def test_a_failing_cell_is_retried_once_and_then_reported_while_the_others_go_on(
    spear, written, tmp_path, stand_in, monkeypatch
):
    monkeypatch.setenv("STAND_IN_FAILS", "spear/seed_0*2")
    out = tmp_path / "out"
    code, printed = spear("experiment", written(), "--out", out, "--jobs", 1)
    assert code == 1
    assert "spear/seed_0 failed and is retried: exit code 3" in printed
    assert "spear/seed_0 failed: exit code 3; its last line: error: no room \\x1b[31m left" in printed
    assert len(stand_in()) == 5
    assert "something before" in (out / "cells/spear/seed_0.log").read_text()
    results = json.loads((out / "results.json").read_text())
    states = {cell["cell"]: cell["state"] for cell in results["cells"]}
    assert states == {"base/seed_0": "done", "spear/seed_0": "failed", "base/seed_1": "done", "spear/seed_1": "done"}
    assert "1 of 4 cells have no result yet" in (out / "report.md").read_text()
    code, printed = spear("experiment", written(), "--out", out, "--jobs", 1)  # its two failures are over
    assert code == 0, printed
    assert len(stand_in()) == 6


def test_a_later_report_keeps_why_cells_have_no_result(spear, written, tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "cold_starts/seed_1*9")
    path, out = written("shared_cold_start = true\n" + PLAN), tmp_path / "out"
    assert spear("experiment", path, "--out", out, "--jobs", 1)[0] == 1
    cell = out / "cells/spear/seed_0"
    (cell / "summary.json").unlink()
    write_rows(cell / "metrics.jsonl", [{"step": 0}, {"step": 1}])
    (out / "cells/spear/seed_0.log").write_text("error: no room\n\n")
    assert spear("experiment", path, "--out", out, "--report-only")[0] == 0
    told = {c["cell"]: (c["state"], c["error"]) for c in json.loads((out / "results.json").read_text())["cells"]}
    assert told["base/seed_0"] == ("done", "")
    assert told["spear/seed_0"] == ("unfinished", "step 2 of 3; the last line of its log: error: no room")
    line = "the last line of its log: error: no room \\x1b[31m left"
    assert told["base/seed_1"] == ("waiting", f"its cold start/seed_1 is unfinished: {line}")


def test_a_cell_that_fails_once_is_no_failure(spear, written, tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "spear/seed_0*1")
    assert spear("experiment", written(), "--out", tmp_path / "out")[0] == 0
    assert len(stand_in()) == 5


def test_cells_whose_cold_start_failed_are_reported_and_not_run(spear, written, tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "cold_starts/seed_0*9")
    code, printed = spear("experiment", written("shared_cold_start = true\n" + PLAN), "--out", tmp_path / "out")
    assert code == 1
    assert "base/seed_0 cannot run: its cold start/seed_0 failed" in printed
    ran = [call["words"] for call in stand_in() if call["words"][0] == "train"]
    assert len(ran) == 2
    assert all("run.seed=1" in words for words in ran)


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_as_many_cells_run_at_once_as_asked_and_no_more(spear, written, tmp_path, stand_in, monkeypatch, jobs):
    monkeypatch.setenv("STAND_IN_WAITS_FOR", str(jobs))  # a cell does not end before so many have begun
    assert spear("experiment", written(), "--out", tmp_path / "out", "--jobs", jobs)[0] == 0
    spans = [(call["time"], Path(f"{call['folder']}/summary.json").stat().st_mtime) for call in stand_in()]
    most = max(sum(begin <= time < end for begin, end in spans) for time, _ in spans)
    assert most == jobs


def test_on_gpus_one_cell_runs_on_each(spear, written, tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpus.cache_clear()
    try:
        text = PLAN.replace('"lookup"', '"quickstart"')
        code, printed = spear("experiment", written(text), "--out", tmp_path / "out")
    finally:
        gpus.cache_clear()
    assert code == 0, printed
    assert "2 at once" in printed
    calls = stand_in()
    assert {call["gpu"] for call in calls[:2]} == {"3", "5"} >= {call["gpu"] for call in calls}
    assert not any("run.threads" in word for call in calls for word in call["words"])
    assert {call["threads"] for call in calls} == {None}


def test_two_experiments_in_one_folder_are_refused(spear, written, tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_SECONDS", "60")
    with begun(written(), tmp_path / "out", stand_in) as process:
        code, printed = spear("experiment", written(), "--out", tmp_path / "out")
        assert code == 2
        assert f"is in use by process {process.pid}" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_cells_and_says_how_to_go_on(written, tmp_path, stand_in, monkeypatch, number):
    monkeypatch.setenv("STAND_IN_SECONDS", "60")
    path, out = written(), tmp_path / "out"
    with begun(path, out, lambda: len(stand_in()) == 2, "--jobs", "2") as process:
        process.send_signal(number)
        printed = process.stdout.read()
        assert process.wait(60) == 128 + number
    assert f"go on: spear experiment {path} --out {out} --jobs 2" in printed
    assert not running(str(out))


def running(part):
    """Processes whose command line has this text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if part.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


def test_cells_that_outlive_a_killed_command_are_waited_for_and_not_run_twice(
    spear, written, tmp_path, stand_in, monkeypatch
):
    """The stand-in holds no lock, so the lock of a run is held here by a process of its own."""
    out = tmp_path / "out"
    cell = out / "cells/base/seed_0"
    cell.mkdir(parents=True)
    holds = (
        "import sys, time, pathlib; from spear_rl.io.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(4)\n"
    )
    other = subprocess.Popen([PYTHON, "-c", holds, str(cell)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    code, printed = spear("experiment", written(), "--out", out, "--jobs", 2)
    other.wait()
    other.stdout.close()
    assert code == 0, printed
    assert f"base/seed_0 is being run by process {other.pid}: waiting for it" in printed
    assert [f"run.dir={cell}" in call["words"] for call in stand_in()].count(True) == 1


@pytest.fixture
def forecast(written, tmp_path, monkeypatch):
    """(jobs of two cells of a hundred steps, a forecast, and what sets the time and the steps of the first cell)."""
    plan = read_plan(written(PLAN.replace("steps = 3", "steps = 100").replace("[0, 1]", "[0]")), tmp_path / "out")
    metrics = plan.cells[0].folder / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    (metrics.parent / "config.toml").touch()

    def made(first, at_once):
        write_rows(metrics, [{"step": n} for n in range(first)])
        jobs = jobs_of(plan)
        jobs[0].state, jobs[0].began, jobs[0].attempts = "running", 1000.0, 1
        seen = live.Forecast(jobs, at_once)

        def look(seconds, steps):
            monkeypatch.setattr(live.time, "monotonic", lambda: 1000.0 + seconds)
            write_rows(metrics, [{"step": n} for n in range(first + steps)])
            seen.look()
            return seen.seconds_left()

        return jobs, seen, look

    return made


@pytest.mark.parametrize(
    ("first", "at_once", "expected"),
    [
        (0, 1, 90 + 20 + 100),  # a second a step, and another cell that has not begun, which takes 20 to begin
        (0, 2, 20 + 100),
        (85, 1, 5 + 20 + 100),  # an earlier command took 85
    ],
)
def test_the_time_left_is_that_of_the_steps_left_at_the_pace_since_a_cell_first_moved(
    forecast, first, at_once, expected
):
    _, _, look = forecast(first, at_once)
    assert [look(0, 0), look(15, 0), look(21, 1), look(24, 1)] == [None] * 4
    assert look(30, 10) == pytest.approx(expected)
    assert look(31, 10) == pytest.approx(expected - (1 if at_once == 1 else 0))


def test_cold_starts_say_nothing_about_how_long_a_cell_takes(written, tmp_path):
    jobs = jobs_of(read_plan(written("shared_cold_start = true\n" + PLAN), tmp_path / "out"))
    cold = [job for job in jobs if not job.is_cell]
    cold[0].state, cold[0].seconds = "done", 5.0
    seen = live.Forecast(jobs, 1)
    assert seen.seconds_left() is None
    cells = [job for job in jobs if job.is_cell]
    cells[0].state, cells[0].seconds = "done", 60.0
    assert seen.seconds_left() == pytest.approx(5 + 3 * 60)


def test_a_retried_cell_is_judged_by_its_own_attempt(forecast):
    jobs, _, look = forecast(0, 2)
    look(0, 0), look(10, 1), look(20, 11)
    jobs[0].attempts, jobs[0].began = 2, 1100.0
    assert look(100, 11) is None
    assert look(150, 12) is None
    assert look(152, 13) == pytest.approx(50 - 2 + 2 * 100)


def test_a_resumed_cell_that_is_done_does_not_make_the_others_look_short(forecast):
    jobs, seen, _ = forecast(90, 1)
    jobs[0].state, jobs[0].seconds = "done", 10.0
    assert seen.seconds_left() == pytest.approx(100)


def test_torch_is_not_imported_by_the_command(written, tmp_path):
    program = "import sys; from spear_rl.app.compare.experiment import live, read_plan; import spear_rl.cli\n"
    program += f"read_plan(__import__('pathlib').Path({str(written())!r})); print('torch' in sys.modules)"
    shown = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=120)
    assert shown.stdout.strip() == "False", shown.stderr


# The report.


def fabricate(folder, config, rng, *, families=("red", "gold"), level=0.5):
    """A finished run folder of random numbers; returns what it wrote."""
    steps = config.run.steps
    folder.mkdir(parents=True)
    config.run.dir = str(folder)
    (folder / "config.toml").write_text(to_toml(config))
    rows = [
        {"step": n, "rollout/success": rng.random(), "rollout/episodes": 16.0, "time/step": rng.uniform(1, 2)}
        | {"policy/optimizer_steps": float(rng.randint(1, 3)), "policy/entropy": rng.random()}
        | {"rollout/tool_turns": rng.random(), "replay/fired": float(n > 0), "replay/buffer_size": 10.0}
        | {"replay/eligible": float(rng.randint(0, 10)), "replay/age": 1.5}
        for n in range(steps)
    ]
    evals = []
    for n in range(steps + 1):
        by_family = {name: {"success": rng.random()} for name in families}
        evals.append(
            {"step": n, "success": min(rng.random() * level * 2, 1), "low": 0.0, "high": 1.0, "by_family": by_family}
        )
    ages = [{"episode": "0/0", "played": 0, "age": rng.randint(1, 3), "group_success": rng.random()} for _ in range(20)]
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "eval.jsonl", evals)
    write_rows(folder / "draws.jsonl", [{"step": 1, "draws": ages}])
    (folder / "summary.json").write_text(
        json.dumps({"steps": steps, "success_before": evals[0], "success_after": evals[-1]})
    )
    return rows, evals


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_age_that_no_number_holds_is_left_out_of_the_figure(tmp_path):
    played = [{"age": 2}, {"age": 10**400}, {"age": -(10**400)}, {"age": True}, {"age": "2"}, {"age": 1}]
    write_rows(tmp_path / "draws.jsonl", [{"step": 1, "draws": played}])
    assert _ages(tmp_path) == {1.0: 0.5, 2.0: 0.5}


T_975 = {1: 12.7062047, 2: 4.3026527, 3: 3.1824463, 4: 2.7764451}
"""Of printed tables."""


def interval(values):
    half = T_975[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


@pytest.mark.parametrize("seed", range(4))
def test_every_number_of_the_table_equals_a_computation_by_hand(spear, written, tmp_path, seed):
    rng, seeds = random.Random(seed), [5, 1, 3, 8, 2][: 2 + seed]
    out, runs = tmp_path / "out", {}
    path = written(PLAN.replace("[0, 1]", str(seeds)) + BLOCKS)
    for cell in read_plan(path, out).cells:
        runs[cell.block, cell.arm, cell.seed] = fabricate(cell.folder, cell.config, rng)
    code, printed = spear("experiment", path, "--out", out)
    assert code == 0, printed
    results = json.loads((out / "results.json").read_text())
    assert [block["block"] for block in results["blocks"]] == [
        "short / grpo",
        "short / rloo",
        "long / grpo",
        "long / rloo",
    ]
    above = below = 0
    shifts = {}
    for block in results["blocks"]:
        name = tuple(block["block"].split(" / "))
        means = {
            arm: {s: mean(row["success"] for row in runs[name, arm, s][1][1:]) for s in seeds}
            for arm in ("base", "spear")
        }
        for entry in block["arms"]:
            shown, own = entry["measures"], means[entry["arm"]]
            assert shown["eval_mean"]["value"] == pytest.approx(mean(own.values()))
            assert (shown["eval_mean"]["low"], shown["eval_mean"]["high"]) == pytest.approx(
                interval(list(own.values()))
            )
            final = [runs[name, entry["arm"], s][1][-1]["success"] for s in seeds]
            assert shown["eval_final"]["value"] == pytest.approx(mean(final))
            for key, column in (("policy/optimizer_steps", "optimizer steps"), ("time/step", "seconds")):
                sums = [sum(row[key] for row in runs[name, entry["arm"], s][0]) for s in seeds]
                assert shown[column]["value"] == pytest.approx(mean(sums))
            assert shown["episodes"]["value"] == 48
        difference = next(d for d in block["differences"] if d["measure"] == "eval_mean")
        by_seed = [means["spear"][s] - means["base"][s] for s in seeds]
        assert [difference["by_seed"][str(s)] for s in seeds] == pytest.approx(by_seed)
        low, high = interval(by_seed)
        assert (difference["estimate"]["low"], difference["estimate"]["high"]) == pytest.approx((low, high))
        above, below = above + (low > 0), below + (high < 0)
        shifts[block["block"]] = mean(by_seed)
    (summary,) = results["summary"]
    assert (summary["above"], summary["below"], summary["blocks"]) == (above, below, 4)
    assert summary["worst"] == pytest.approx(min(shifts.values()))
    assert summary["worst_block"] == min(shifts, key=shifts.get)
    names = {figure["name"] for figure in results["figures"]}
    assert names == {
        "success_episodes", "success_optimizer_steps", "success_seconds", "entropy", "tool_turns", "replay_age",
        "replay_success", "gate", "families",
    }  # fmt: skip
    steps = next(f for f in results["figures"] if f["name"] == "success_optimizer_steps")["lines"]["long / rloo"][
        "base"
    ]
    taken = [[row["policy/optimizer_steps"] for row in runs[("long", "rloo"), "base", s][0]] for s in seeds]
    assert steps["x"] == pytest.approx([mean(sum(run[:n]) for run in taken) for n in range(4)])
    gate = next(f for f in results["figures"] if f["name"] == "gate")["lines"]["short / grpo"]["spear"]
    passed = [[row["replay/eligible"] / 10 for row in runs[("short", "grpo"), "spear", s][0]] for s in seeds]
    assert gate["mean"] == pytest.approx([mean(run[n] for run in passed) for n in range(3)])


def test_every_figure_is_written_as_svg_and_png(spear, written, tmp_path, drawn):
    out, path = tmp_path / "out", written()
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(cell.name))
    assert spear("experiment", path, "--out", out)[0] == 0
    names = [figure["name"] for figure in json.loads((out / "results.json").read_text())["figures"]]
    assert tuple(names) == NAMES
    for name in [*names, "differences"]:
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / "figures" / f"{name}.svg").read_text()
        assert f"(figures/{name}.svg)" in (out / "report.md").read_text()
    assert len(list((out / "figures").iterdir())) == 2 * (len(names) + 1)


def test_figures_of_an_earlier_report_go_and_files_of_others_stay(tmp_path, drawn):
    for name in ("gate.svg", "gate.png", "differences.svg", "mine.svg", "gate.txt"):
        (tmp_path / name).touch()
    assert draw_all(tmp_path, [], [], "eval_mean") == []
    assert {path.name for path in tmp_path.iterdir()} == {"mine.svg", "gate.txt"}


@pytest.mark.parametrize("values", [[0.0] * 4, [0.2, 0.0, 0.4, 0.1]])
def test_tool_turns_begin_at_zero_and_steps_are_whole_numbers(values):
    with drawing((6.5, 4)) as figure:
        axes = figure.subplots()
        lines = {"arm": Line([0.0, 1.0, 2.0, 3.0], values, values, values)}
        _fill(axes, Panels("tool_turns", "tool use", "step", "tool turns", {"block": lines}), lines, looks_of(["arm"]))
        low, high = axes.get_ylim()
        assert low == 0
        assert (high == 1) if not any(values) else (0.4 < high < 0.5)
        assert all(tick == int(tick) for tick in axes.get_xticks())


@pytest.mark.parametrize("words", [1, 30])
def test_panels_keep_their_room_however_long_the_names_of_arms_are(words):
    labels = [f"arm {n} [{', '.join(['algorithm.imitation.weight=1.5'] * words)}]" for n in range(3)]
    with drawing((6.5, 4.2)) as figure, catch_warnings():
        simplefilter("error")
        axes = figure.subplots()
        add_legend(figure, looks_of(labels), "a title", width=58)
        figure.savefig(io.BytesIO())
        assert axes.get_window_extent().height > 200


def test_seeds_that_an_arm_lacks_take_no_part_in_its_differences(spear, written, tmp_path):
    rng, out, path = random.Random(0), tmp_path / "out", written(PLAN.replace("[0, 1]", "[0, 1, 2]"))
    for cell in read_plan(path, out).cells:
        if cell.name != "spear/seed_1":
            fabricate(cell.folder, cell.config, rng)
    code, printed = spear("experiment", path, "--out", out, "--report-only")
    assert code == 0, printed
    assert not (out / "cells/spear/seed_1").exists()
    (block,) = json.loads((out / "results.json").read_text())["blocks"]
    assert block["differences"][0]["by_seed"].keys() == {"0", "2"}
    assert [arm["seeds"] for arm in block["arms"]] == [[0, 1, 2], [0, 2]]
    assert "spear/seed\\_1" in (out / "report.md").read_text()


def test_a_lost_evaluation_at_the_end_takes_its_seed_out_of_the_measures_and_is_said(spear, written, tmp_path):
    out, path = tmp_path / "out", written()
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(cell.name))
    odd = out / "cells/spear/seed_1"
    write_rows(odd / "eval.jsonl", logged(odd, "eval.jsonl")[:-1])
    code, printed = spear("experiment", path, "--out", out)
    assert code == 0, printed
    said = (
        "is without its last evaluation (eval.jsonl has none after step 2 of 3): it has no eval_mean and no eval_final"
    )
    assert f"{odd} {said}" in printed
    (block,) = json.loads((out / "results.json").read_text())["blocks"]
    for measure in ("eval_mean", "eval_final"):
        assert block["arms"][1]["measures"][measure]["by_seed"].keys() == {"0"}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_row_takes_its_seed_out_of_totals_and_curves_of_success_and_is_said(spear, written, tmp_path, lost):
    out, path = tmp_path / "out", written()
    for cell in read_plan(path, out).cells:
        rows, evals = fabricate(cell.folder, cell.config, random.Random(cell.name))
        if cell.name == "spear/seed_0":
            totals, first = [sum(row["policy/optimizer_steps"] for row in rows)], evals
    odd = out / "cells/spear/seed_1"
    rows = [json.loads(line) for line in (odd / "metrics.jsonl").read_text().splitlines()]
    write_rows(odd / "metrics.jsonl", [row for row in rows if row["step"] != lost])
    code, printed = spear("experiment", path, "--out", out)
    assert code == 0, printed
    said = (
        f"is without the rows of steps {lost} in metrics.jsonl: it is left out of totals and of the curves of success"
    )
    assert f"{odd} {said}" in printed
    results = json.loads((out / "results.json").read_text())
    measures = results["blocks"][0]["arms"][1]["measures"]
    assert list(measures["optimizer steps"]["by_seed"].values()) == totals
    assert measures["eval_mean"]["by_seed"].keys() == {"0", "1"}
    curves = [f for f in results["figures"] if f["name"].startswith("success_")]
    assert len(curves) == 3
    for figure in curves:
        assert figure["lines"]["plan"]["spear"]["mean"] == [row["success"] for row in first]


@pytest.mark.parametrize(
    ("file", "key", "value", "names"),
    [
        ("eval.jsonl", None, None, "eval_mean and no eval_final"),
        ("metrics.jsonl", "rollout/success", math.nan, "rollout_last"),
        ("metrics.jsonl", "rollout/episodes", None, "episodes"),
        ("metrics.jsonl", "time/step", math.inf, "seconds"),
        ("metrics.jsonl", "time/step", 1e300, "seconds"),
    ],
)
def test_a_run_that_lacks_what_others_have_is_left_out_there_and_named(
    spear, written, tmp_path, file, key, value, names
):
    out, path = tmp_path / "out", written('secondary = ["eval_final", "rollout_last"]\n' + PLAN)
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(cell.name))
    odd = out / "cells/spear/seed_1"
    rows = [json.loads(line) for line in (odd / file).read_text().splitlines()]
    lost = rows if key == "rollout/success" else rows[1:2]
    for row in lost if key else ():
        row[key] = value
    write_rows(odd / file, rows if key else [])
    code, printed = spear("experiment", path, "--out", out)
    assert code == 0, printed
    assert f"warning: {odd} has no {names}: it is left out of their means" in printed
    measures = json.loads((out / "results.json").read_text())["blocks"][0]["arms"][1]["measures"]
    for name in MEASURES.keys() | {"episodes", "seconds"}:
        if name in measures:
            assert measures[name]["by_seed"].keys() == ({"0"} if name in names else {"0", "1"}), name


@pytest.mark.parametrize("width", [50, 80, 100, 200])
@pytest.mark.parametrize("secondary", [["eval_final"], ["eval_final", "rollout_last", "eval_best"]])
def test_no_number_of_the_table_is_broken_at_any_width(written, tmp_path, monkeypatch, secondary, width):
    plan = read_plan(written(f"secondary = {json.dumps(secondary)}\n{PLAN}"), tmp_path / "out")
    for cell in plan.cells:
        fabricate(cell.folder, cell.config, random.Random(cell.name))
    results = results_of_plan(plan, jobs_of(plan), [])
    monkeypatch.setattr("spear_rl.cli.experiment.console", console := Console(width=width, file=io.StringIO()))
    _print_table(results, results.blocks[0])
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    for row in results.rows(results.blocks[0]):
        for part in " (".join(row[: 2 + len(results.measures)]).replace(" (", "\n").split("\n"):
            assert any(part in line for line in lines), part
    is_table = any("┃" in line for line in lines)
    assert is_table == (width >= (80 if len(secondary) == 1 else 200))


def test_one_seed_has_no_interval(spear, written, tmp_path):
    out, path = tmp_path / "out", written(PLAN.replace("[0, 1]", "[7]"))
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(cell.arm))
    assert spear("experiment", path, "--out", out)[0] == 0
    (block,) = json.loads((out / "results.json").read_text())["blocks"]
    assert all(arm["measures"]["eval_mean"]["low"] is None for arm in block["arms"])
    assert block["differences"][0]["estimate"] is None
    assert "one seed" in (out / "report.md").read_text()


def test_a_report_before_any_cell_is_finished_says_so(spear, written, tmp_path):
    code, printed = spear("experiment", written(), "--out", tmp_path / "out", "--report-only")
    assert code == 0, printed
    assert "there is nothing to compare: there is no finished run" in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (["base/seed_0", "base/seed_1"], "no arm but the reference base has a finished run"),
        (["spear/seed_0"], "the reference base has no finished run"),
        (["base/seed_0", "spear/seed_1"], "no arm has a seed in common with the reference"),
        (["base/seed_0", "-spear/seed_0"], "no arm but the reference base has a run with eval_mean"),
        (["-base/seed_0", "spear/seed_0"], "the reference base has no run with eval_mean"),
        (["-base/seed_0", "-spear/seed_0"], "there is no run with eval_mean"),
    ],
)
def test_a_report_says_what_is_missing_where_nothing_can_be_compared(spear, written, tmp_path, kept, says):
    out, path = tmp_path / "out", written()
    for cell in read_plan(path, out).cells:
        if cell.name in kept or f"-{cell.name}" in kept:
            fabricate(cell.folder, cell.config, random.Random(cell.name))
            if f"-{cell.name}" in kept:
                (cell.folder / "eval.jsonl").unlink()
    code, printed = spear("experiment", path, "--out", out, "--report-only")
    assert (code, f"there is nothing to compare: {says}" in printed) == (0, True), printed


def test_a_summary_says_which_blocks_it_does_not_count(spear, written, tmp_path):
    out, path = tmp_path / "out", written(PLAN + BLOCKS)
    for cell in read_plan(path, out).cells:
        if cell.block[0] == "short" and (cell.block[1] == "grpo" or cell.seed == 0):
            fabricate(cell.folder, cell.config, random.Random(cell.name))
    code, printed = spear("experiment", path, "--out", out, "--report-only")
    assert code == 0, printed
    assert "of 2 blocks (of 4 planned) with an interval above zero" in printed
    assert "with one below zero, 1 without an interval; mean difference" in printed


def test_seeds_that_are_equal_have_no_interval_that_looks_certain(spear, written, tmp_path):
    out, path = tmp_path / "out", written()
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(cell.arm))
    code, printed = spear("experiment", path, "--out", out)
    assert code == 0, printed
    assert printed.count("% (all seeds equal)") == 4


def test_a_damaged_cell_is_left_out_and_named(spear, written, tmp_path):
    out, path = tmp_path / "out", written()
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(0))
    (out / "cells/spear/seed_1/metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    code, printed = spear("experiment", path, "--out", out)
    assert code == 1, printed
    states = {cell["cell"]: cell["state"] for cell in json.loads((out / "results.json").read_text())["cells"]}
    assert states["spear/seed_1"] == "damaged"
    folder = out / "cells/spear/seed_1"
    assert f"spear/seed_1 is damaged: {folder}: metrics.jsonl, line 2 is not valid JSON" in printed
    assert "run.resume=true, or delete its folder to have it played again" in printed
    assert f"; to mend it: spear train run.dir={folder} run.resume=true" in printed


def test_a_report_that_cannot_be_written_does_not_hide_which_cells_failed(
    spear, written, tmp_path, stand_in, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("STAND_IN_FAILS", "spear/seed_0*2")
    monkeypatch.setattr("spear_rl.app.compare.experiment.report.draw_all", full)
    code, printed = spear("experiment", written(), "--out", tmp_path / "out", "--jobs", 1)
    assert code == 2
    assert "spear/seed_0 failed: exit code 3; its last line: error: no room" in printed
    assert "1 failed; to try them again: spear experiment" in printed
    assert "cannot be written: No space left on device" in printed


def test_a_plan_changed_after_its_first_cell_is_said_in_the_report(spear, written, tmp_path, stand_in):
    out = tmp_path / "out"
    assert spear("experiment", written(), "--out", out)[0] == 0
    assert "was changed after" not in (out / "report.md").read_text()
    time.sleep(1.1)
    assert spear("experiment", written('primary = "eval_best"\n' + PLAN), "--out", out)[0] == 0
    report = json.loads((out / "results.json").read_text())
    assert report["about"]["plan changed after that"]
    assert any(
        "the plan was changed after its first cell began" in text and "primary" in text for text in report["warnings"]
    )
    assert "the plan was changed after its first cell began" in (out / "report.html").read_text()


CHANGES = {
    "a default written out": ('primary = "eval_mean"\nsecondary = ["eval_final"]\n', "", "but not in primary"),
    "another first arm": ("", "reference", "in reference (base before), arms (['base', 'spear'] before)"),
    "an arm more": ("", "[arms.third]\nalgorithm = {kl = 0.1}\n", "in arms (['base', 'spear'] before)"),
    "a block more": ("", "[blocks.task.a]\n", "in blocks ({} before)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_of_a_plan_is_said_as_it_counts(spear, written, tmp_path, name):
    before, after, says = CHANGES[name]
    plan = PLAN.replace('reference = "base"\n', "")
    changed = before + plan + after
    if after == "reference":
        head, base, own = plan.partition("[arms.base]")[0], *plan.partition("[arms.base]")[2].split("[arms.spear]\n")
        changed = f"{head}[arms.spear]\n{own}[arms.base]{base}"
    out, path = tmp_path / "out", written(plan)
    assert spear("experiment", path, "--out", out, "--report-only")[0] == 0
    declared = json.loads((out / "plan.json").read_text())
    declared["plans"][0]["time"] = "2020-01-01T00:00:00+00:00"
    declared["first_cell"] = "2020-01-02T00:00:00+00:00"
    (out / "plan.json").write_text(json.dumps(declared))
    code, printed = spear("experiment", written(changed), "--out", out, "--report-only")
    assert code == 0, printed
    (said,) = [text for text in json.loads((out / "results.json").read_text())["warnings"] if "was changed" in text]
    assert said.endswith(says) or f": {says}" in said
    assert "Primary measure, declared before the first cell began: eval\\_mean" in (out / "report.md").read_text()


def test_a_report_does_not_call_a_measure_declared_before_that_was_chosen_after(spear, written, tmp_path):
    out, path = tmp_path / "out", written()
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(cell.name))
    time.sleep(1.1)
    assert spear("experiment", path, "--out", out)[0] == 0
    assert "Primary measure, declared after the first cell began: eval\\_mean" in (out / "report.md").read_text()
    code, printed = spear("experiment", written('primary = "eval_best"\n' + PLAN), "--out", out)
    assert code == 0
    assert "after the first cell began" in printed
    assert "in primary (eval_mean before)" in printed
    assert "Primary measure, changed after the first cell began: eval\\_best" in (out / "report.md").read_text()


def test_the_report_says_how_it_was_run(spear, written, tmp_path, stand_in):
    out = tmp_path / "out"
    assert spear("experiment", written(), "--out", out)[0] == 0
    about = json.loads((out / "results.json").read_text())["about"]
    assert {"spear_rl", "python", "torch", "transformers"} <= about["versions"].keys()
    assert about["cores"] >= 1
    hardware = {"machine": "x", "threads": 1, "device": "cpu"}
    cell = out / "cells/base/seed_0"
    (cell / "summary.json").write_text(json.dumps({"versions": {"torch": "2"}, "hardware": hardware}))
    assert cells_ran_on([cell]) == ["1 cell: torch 2, x, 1 thread, cpu"]
    assert about["cpu"]
    assert about["plan declared"] <= about["first cell began"]
    for text in ((out / "report.md").read_text(), (out / "report.html").read_text()):
        assert "Does it help?" in text
        assert re.sub(r"\W", "", "spear experiment") in re.sub(r"\W", "", text)
        assert PLAN.strip().splitlines()[-1] in text


HOSTILE = '<script>alert(1)</script>"><img src=http://evil.example/x onerror=a>`|$x^2$ \x1b[31m\u202e'


def hostile_report(spear, tmp_path) -> Path:
    runs = []
    for n, name in enumerate(["grpo", "mine<b>:make", "mine<b>:make"]):
        config = load("lookup", ["run.steps=3", f"run.seed={n % 2}"])
        config.algorithm.name, config.task.options = name, {"num_digits": 5, "note": HOSTILE}
        folder = tmp_path / f"run{n}<i>"
        fabricate(folder, config, random.Random(n), families=(HOSTILE, "&amp;"))
        runs.append(folder)
    code, printed = spear("experiment", *runs, "--out", tmp_path / "out")
    assert code == 0, printed
    assert "\x1b[31m" not in printed
    return tmp_path / "out/report.html"


def test_the_html_refers_to_nothing_outside_and_escapes_hostile_names(spear, tmp_path, drawn):
    page = hostile_report(spear, tmp_path).read_text()
    images = re.findall(r'src="data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)"', page)
    assert len(images) >= 8
    rest = re.sub(r'src="data:image/svg\+xml;base64,[A-Za-z0-9+/=]+"', "", page)
    for name in ("uPlot.min.js", "view.js"):
        assert rest.count(asset(name)) == 1
        rest = rest.replace(asset(name), "")
    charts = json.loads(re.search(r'<script type="application/json" id="curves">(.*?)</script>', rest)[1])["charts"]
    assert len(charts) >= 4
    assert {line["label"] for chart in charts for line in chart["runs"]} == {"grpo", "mine<b>:make"}
    values = {chart["title"].partition(",")[0]: [] for chart in charts}
    for chart in charts:
        for line in chart["runs"]:
            edges = line["bands"].get("", [])
            values[chart["title"].partition(",")[0]] += [v for part in (line["series"][""], *edges) for v in part]
    assert min(map(min, values.values())) >= 0
    assert 1 < max(values["success of evaluations against episodes played"]) <= 100
    assert {"entropy of the policy, means of 5 steps, nats per token"} < {chart["title"] for chart in charts}
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z!]+)", rest))
    assert tags <= {
        "!doctype", "html", "head", "meta", "title", "style", "body", "h", "ul", "li", "table", "thead", "tbody", "tr",
        "th", "td", "figure", "img", "figcaption", "pre", "a", "link", "header", "span", "main", "div", "script",
        "noscript",
    }  # fmt: skip
    assert set(re.findall(r"<[^>]*\b(?:src|href|action|srcset|onerror)\s*=([^ >]*)", rest)) == {'"data:,"', '"#main"'}
    assert re.search("default-src 'none'; img-src data:;.*script-src 'sha256-", unescape(page))
    assert "url(" not in rest
    assert "@import" not in rest
    assert "\x1b" not in page
    assert "\u202e" not in page
    for image in images:
        svg = base64.b64decode(image).decode()
        assert "<script" not in svg
        assert "<image" not in svg
    assert "<script" not in (tmp_path / "out/report.md").read_text().replace("\\<script", "")


@pytest.mark.skipif(not PROGRAM, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_the_html_draws_its_curves_and_has_its_pictures_without_scripts_too(spear, tmp_path, drawn):
    report = hostile_report(spear, tmp_path)
    with Browser(tmp_path / "profile") as browser:
        browser.open(report.as_uri())
        figures = "[...document.querySelectorAll('#charts figure')]"
        labels = browser.value(f"{figures}.map(f => f.getAttribute('aria-label'))")
        assert browser.value(f"{figures}.every(f => f.querySelector('canvas'))")
        assert labels[0].startswith("success of evaluations against episodes played, share of tasks in %")
        assert re.search(r"mine<b>:make \d\d\.", labels[0])
        assert browser.value("document.querySelectorAll('main b, main script:not([type])').length") == 0
        shown = browser.value("[...document.querySelectorAll('main img')].map(i => i.alt.split(',')[0])")
        assert shown == ["eval_mean", "success at the end per kind of task"]
        assert browser.value("[...document.querySelectorAll('main img')].every(i => i.naturalWidth > 100)")
        assert browser.complaints() == []
        browser.as_phone()
        browser.open(report.as_uri())
        assert browser.value("document.documentElement.scrollWidth <= 390")
    assert report.read_text().count("<noscript><figure") == len({label.partition(",")[0] for label in labels})


@pytest.mark.skipif(not PROGRAM, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_an_axis_of_curves_ends_near_them_and_not_at_a_hundred_where_all_are_zero(tmp_path):
    def chart(values):
        run = {"label": "an arm", "steps": [0, 1, 2], "series": {"": values}, "bands": {}}
        return {"title": "tool turns", "names": [""], "runs": [run]}

    content = json.dumps({"charts": [chart([0, 0, 0]), chart([2, 2, 2]), chart([0.1, 0.5, 0.2]), chart([None] * 3)]})
    spy = "const plots = [], made = uPlot; uPlot = function (...a) { plots.push(new made(...a)); return plots.at(-1); }"
    script = f"{asset('uPlot.min.js')};{spy}; uPlot.rangeNum = made.rangeNum;{asset('view.js')}"
    data = f"<div id='charts'></div><script type='application/json' id='curves'>{content}</script>"
    (tmp_path / "page.html").write_text(f"{data}<script>{script}</script>")
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "page.html").as_uri())
        ends = browser.value("plots.map(plot => [plot.scales.y.min, plot.scales.y.max])")
        assert [[end and round(end, 9) for end in pair] for pair in ends] == [
            [0, 1], [0, 4], [0.06, 0.54], [None, None],
        ]  # fmt: skip
        assert browser.complaints() == []


# Existing runs.


def existing(tmp_path, algorithm, seed, *extra, preset="lookup"):
    settings = ["run.steps=3", f"run.seed={seed}", f"algorithm.name={algorithm}", *extra]
    folder = tmp_path / "_".join([algorithm, str(seed), *extra])
    fabricate(folder, load(preset, settings), random.Random(str(folder)))
    return folder


def test_existing_runs_are_read_and_named_as_compare_names_them(spear, tmp_path):
    runs = [existing(tmp_path, name, seed) for name in ("spear-grpo", "grpo") for seed in (0, 1, 2)]
    runs += [existing(tmp_path, "spear-grpo", seed, "algorithm.imitation.max_age=9") for seed in (0, 1)]
    code, printed = spear("experiment", *runs, "--out", tmp_path / "out")
    assert code == 0, printed
    results = json.loads((tmp_path / "out/results.json").read_text())
    (block,) = results["blocks"]
    labels = [arm["arm"] for arm in block["arms"]]
    assert block["reference"] == "grpo"
    assert labels == [
        "grpo",
        "spear-grpo [algorithm.imitation.max_age=10]",
        "spear-grpo [algorithm.imitation.max_age=9]",
    ]
    assert any("not like for like: seeds are" in text for text in results["warnings"])
    assert "not declared before running" in (tmp_path / "out/report.md").read_text()
    spear("compare", *runs, "--out", tmp_path / "compared")
    compared = json.loads((tmp_path / "compared/compare.json").read_text())
    assert [arm["label"] for arm in compared["arms"]] == labels
    final = {d["arm"]: d["estimate"] for d in block["differences"] if d["measure"] == "eval_final"}
    for pair in compared["pairs"]:
        if pair["base"] == "grpo":
            assert final[pair["arm"]] == pair["difference"]


def test_arms_that_were_evaluated_at_other_steps_or_on_other_tasks_are_warned_of(spear, tmp_path):
    runs = [existing(tmp_path, name, seed) for name in ("grpo", "spear-grpo") for seed in (0, 1)]
    code, printed = spear("experiment", *runs, "--out", tmp_path / "out")
    assert (code, "not evaluated alike" in printed) == (0, False)
    for number, run in enumerate(runs):
        rows = logged(run, "eval.jsonl")
        rows[-1]["solved"] = {f"task {number // 2}": 1.0}
        write_rows(run / "eval.jsonl", rows if number < 2 else [rows[0], rows[-1]])
    code, printed = spear("experiment", *runs, "--out", tmp_path / "out")
    assert code == 0, printed
    assert "not evaluated alike: at steps 3 in spear-grpo and 1-3 in grpo with seed 0 (eval.every)" in printed
    assert "not evaluated alike: spear-grpo and grpo played other tasks at the end" in printed


def test_the_logs_that_a_pattern_names_beside_their_cells_are_left_out(spear, tmp_path):
    runs = [existing(tmp_path, "grpo", seed) for seed in (0, 1)]
    for run in runs:
        run.with_name(f"{run.name}.log").touch()
    code, printed = spear("experiment", *sorted(tmp_path.glob("grpo_*")), "--out", tmp_path / "out")
    assert code == 0, printed
    (tmp_path / "alone.log").touch()
    code, printed = spear("experiment", *runs, tmp_path / "alone.log", "--out", tmp_path / "out")
    assert (code, "alone.log is not a folder" in printed) == (2, True)


def test_runs_of_several_tasks_are_blocks_and_unfinished_ones_are_left_out(spear, tmp_path):
    runs = [existing(tmp_path, name, seed) for name in ("spear-grpo", "grpo") for seed in (0, 1)]
    runs += [existing(tmp_path, "grpo", seed, "task.options.num_digits=7") for seed in (0, 1)]
    (runs[0] / "summary.json").unlink()
    code, printed = spear(
        "experiment", *runs, "--out", tmp_path / "out", "--primary", "eval_best", "--reference", "grpo"
    )
    assert code == 0, printed
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [block["block"] for block in results["blocks"]] == ["lookup (num_digits=5)", "lookup (num_digits=7)"]
    assert results["primary"] == "eval_best"
    assert any("is left out: it is unfinished" in text for text in results["warnings"])


@pytest.mark.parametrize("by", ["folder", "label"])
def test_the_reference_of_existing_runs_is_an_arm_or_a_folder_of_one(spear, tmp_path, by, monkeypatch):
    runs = [existing(tmp_path, name, seed) for name in ("spear-grpo", "grpo") for seed in (0, 1)]
    runs += [existing(tmp_path, "grpo", 0, "task.options.num_digits=7")]
    monkeypatch.chdir(tmp_path)
    reference = f"./{runs[1].name}/" if by == "folder" else "spear-grpo"
    code, printed = spear("experiment", *runs, "--out", tmp_path / "out", "--reference", reference)
    assert code == 0, printed
    blocks = json.loads((tmp_path / "out/results.json").read_text())["blocks"]
    assert [block["reference"] for block in blocks] == ["spear-grpo", "grpo"]
    assert f"lookup (num_digits=7): no arm is {reference} here, so arms are compared with grpo" in printed
    (runs[1] / "summary.json").unlink()
    code, printed = spear("experiment", *runs[1:], "--out", tmp_path / "out", "--reference", runs[1])
    assert (code, "name one of the folders that are finished, or an arm: grpo" in printed) == (2, True), printed


@pytest.mark.parametrize(("name", "owner"), [("plan.json", "an experiment"), ("config.toml", "a run")])
def test_a_report_on_existing_runs_does_not_replace_that_of_another(spear, tmp_path, name, owner):
    run, out = existing(tmp_path, "grpo", 0), tmp_path / "taken"
    out.mkdir()
    (out / name).touch()
    code, printed = spear("experiment", run, "--out", out)
    assert (code, f"taken is the folder of {owner}: choose another --out" in printed) == (2, True), printed
    assert [path.name for path in out.iterdir()] == [name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--primary", "eval_x"], "--primary cannot be 'eval_x'"),
        (["--primary", "also_mean"], "--primary=also_mean: no run has it; they have: eval_mean, eval_final, eval_best"),
        (["--reference", "nobody"], "--reference is no arm of these runs"),
        (["--reference", "endless"], "--reference is no arm of these runs"),
        (["--jobs", "2"], "are for a plan"),
        (["--dry-run"], "are for a plan"),
        (["missing"], "missing is not a folder: name one plan, or folders of runs only"),
    ],
)
def test_options_that_do_not_fit_existing_runs_are_refused(spear, tmp_path, arguments, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "endless").symlink_to("endless")
    run = existing(tmp_path, "grpo", 0)
    code, printed = spear("experiment", run, *arguments, "--out", tmp_path / "out")
    assert (code, says in printed) == (2, True), printed


def test_the_folder_of_an_experiment_is_no_run(spear, written, tmp_path):
    assert spear("experiment", written(), "--out", tmp_path / "out", "--report-only")[0] == 0
    code, printed = spear("experiment", tmp_path / "out")
    assert code == 2
    assert "name its plan" in printed


def test_a_plan_declares_its_measure_itself(spear, written, tmp_path):
    code, printed = spear("experiment", written(), "--primary", "eval_best")
    assert code == 2
    assert "are declared in a plan" in printed


def test_cells_of_a_shared_cold_start_are_one_arm_when_they_are_read_as_runs(spear, written, tmp_path):
    out, path = tmp_path / "out", written("shared_cold_start = true\n" + PLAN)
    for cell in read_plan(path, out).cells:
        fabricate(cell.folder, cell.config, random.Random(cell.name))
    runs = sorted((out / "cells").glob("*/seed_*"))
    code, printed = spear("compare", *runs, "--out", tmp_path / "compared")
    assert code == 0, printed
    arms = json.loads((tmp_path / "compared/compare.json").read_text())["arms"]
    assert [arm["seeds"] for arm in arms] == [[0, 1], [0, 1]]
    assert "engine.model" not in printed


# Real cells.

REAL = """
preset = "lookup"
seeds = [3]
reference = "base"
shared_cold_start = true
[budget]
steps = 4
[settings]
run = {trackers = ["jsonl"], checkpoint_every = 1}
sft = {episodes = 32, epochs = 1}
eval = {tasks = 8, every = 2}
rollout = {num_tasks = 4}
[arms.base]
algorithm = {bonus = {mode = "none"}, imitation = {enabled = false}}
[arms.spear]
algorithm = {imitation = {update = "separate", warm_steps = 1}}
optim = {num_minibatches = 2}
"""


@pytest.mark.slow
def test_a_shared_cold_start_gives_all_arms_the_same_evaluation_before_rl(spear, written, tmp_path):
    out = tmp_path / "out"
    code, printed = spear("experiment", written(REAL), "--out", out, "--jobs", 1)
    assert code == 0, printed
    base, own = out / "cells/base/seed_3", out / "cells/spear/seed_3"
    assert logged(base, "eval.jsonl")[0] == logged(own, "eval.jsonl")[0]
    texts = [(run / "evaluations/step_000000.jsonl").read_text() for run in (base, own)]
    assert texts[0] == texts[1]
    taken = [2 + min(2, row["replay/trajectories"]) for row in logged(own)]  # two mini-batches, if it has the rows
    assert [row["policy/optimizer_steps"] for row in logged(base)] == [1] * 4
    assert [row["policy/optimizer_steps"] for row in logged(own)] == taken
    assert max(taken) > 2
    draws = [draw for row in logged(own, "draws.jsonl") for draw in row["draws"]]
    assert all(0 < draw["group_success"] <= 1 for draw in draws if draw["success"])
    (block,) = json.loads((out / "results.json").read_text())["blocks"]
    assert block["arms"][1]["measures"]["optimizer steps"]["value"] == sum(taken)
    assert "not the same budget: optim.num_minibatches is 2 in spear and 1 in base" in printed
    times = f"spear took {sum(taken) / 4:.2f} times as many optimizer steps as base"
    assert times in (out / "report.md").read_text()
    # What a cell did alone, by the command of the dry run in another process, is what it did here.
    (line,) = [line for line in commands(read_plan(written(REAL), out)) if "cells/base" in line]
    words = [word.replace(str(base), str(tmp_path / "alone")) for word in shlex.split(line)]
    assert spear(*words[1:])[0] == 0
    assert logged(tmp_path / "alone") == logged(base)


@pytest.mark.slow
def test_an_experiment_ends_as_if_nobody_had_killed_its_cells_and_its_command(spear, written, tmp_path):
    path, plain, out = written(REAL.replace("steps = 4", "steps = 30")), tmp_path / "plain", tmp_path / "out"
    assert spear("experiment", path, "--out", plain, "--jobs", 2)[0] == 0

    def steps(arm):
        metrics = out / f"cells/{arm}/seed_3/metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    with begun(path, out, lambda: steps("base") >= 3, "--jobs", "1") as process:
        (cell,) = [int(pid) for pid in running(str(out / "cells/base")) if int(pid) != process.pid]
        os.kill(cell, signal.SIGKILL)
        deadline = time.time() + 120
        while time.time() < deadline and not (steps("base") == 30 and steps("spear") >= 3):
            time.sleep(0.05)
        process.kill()  # its cell goes on without it
        process.wait()
    code, printed = spear("experiment", path, "--out", out, "--jobs", 2)
    assert code == 0, printed
    for arm in ("base", "spear"):
        assert logged(out / f"cells/{arm}/seed_3") == logged(plain / f"cells/{arm}/seed_3")
        assert logged(out / f"cells/{arm}/seed_3", "eval.jsonl") == logged(plain / f"cells/{arm}/seed_3", "eval.jsonl")


@pytest.mark.slow
def test_a_stopped_experiment_saves_its_cells_and_goes_on(spear, written, tmp_path):
    path, out = written(REAL.replace("steps = 4", "steps = 200")), tmp_path / "out"
    metrics = out / "cells/base/seed_3/metrics.jsonl"
    with begun(
        path, out, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, "--jobs", "2"
    ) as process:
        process.send_signal(signal.SIGINT)
        printed = process.stdout.read()
        assert process.wait(120) == 130
    assert "go on: spear experiment" in printed
    assert not running(str(out))
    assert "stopped at step" in (out / "cells/base/seed_3.log").read_text()


def test_the_example_plans_are_sound():
    for path in sorted((ROOT / "experiments").glob("*.toml")):
        assert read_plan(path).cells


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6))
def test_measures_of_a_further_split_are_those_of_the_main_one_on_its_evaluations(rates):
    both = {5 * n: {"success": main, "also": {"held_out": {"success": other}}} for n, (main, other) in enumerate(rates)}
    other = {step: row["also"]["held_out"] for step, row in both.items()}
    main, alone = (SimpleNamespace(evals=evals, taken=max(evals)) for evals in (both, other))
    for name in ("mean", "final"):
        assert MEASURES[f"also_{name}"](main) == MEASURES[f"eval_{name}"](alone)
        assert MEASURES[f"also_{name}"](alone) is None
