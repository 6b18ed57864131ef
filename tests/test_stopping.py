"""Ctrl-C, SIGTERM and SIGHUP end a run where it can go on bit for bit, also in its cold start; run.resume=auto."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import pool_games as games
from conftest import logged
from spear_rl.app.config import load
from spear_rl.app.resume import command_to_go_on
from spear_rl.app.train import sft_from, train_from
from spear_rl.errors import ConfigError
from spear_rl.io import signals
from spear_rl.io.signals import Stop, Stopped, stop_on_signals
from spear_rl.rollout import Task
from spear_rl.rollout.workers.pool import Pool
from spear_rl.train import checkpoint

HERE = Path(__file__).parent
SMALL = [
    "run.steps=5", "run.checkpoint_every=3", "run.threads=1", "sft.episodes=48", "sft.epochs=2", "sft.batch_size=4",
    "sft.checkpoint_seconds=0", "eval.tasks=4", "eval.every=2", "rollout.num_tasks=2", "rollout.group_size=2",
    "rollout.max_turns=4", "algorithm.kl=0.01",
]  # fmt: skip
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(scope="session")
def spear_signalled() -> Iterator[Callable[..., dict]]:
    """Runs a command and sends it signals, each some seconds after its start; the outcome."""
    driver = subprocess.Popen(
        [sys.executable, HERE / "stop_driver.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"},
    )
    assert driver.stdout.readline() == "ready\n"

    def run(*arguments: object, signals: tuple[tuple[float, int], ...] = ()) -> dict:
        driver.stdin.write(json.dumps({"arguments": list(map(str, arguments)), "signals": signals}) + "\n")
        driver.stdin.flush()
        return json.loads(driver.stdout.readline())

    yield run
    driver.stdin.close()
    driver.wait()


def result(run: Path, verb: str) -> dict:
    """All of a run that must not depend on how often it was stopped."""
    assert not (run / "cold_start").exists()
    if verb == "sft":
        summary = json.loads((run / "summary.json").read_text())
        weights = (run / "model" / "model.safetensors").read_bytes()
        return {name: summary[name] for name in ("loss", "success_before", "success_after")} | {"weights": weights}
    kept = sorted((run / "checkpoints").iterdir())
    return {
        "metrics": logged(run),
        "evals": logged(run, "eval.jsonl"),
        "weights": (kept[-1] / "model.safetensors").read_bytes(),
        "last": kept[-1].name,
        "best": [json.loads((folder / "checkpoint.json").read_text())["evaluation"] for folder in kept[-1:]],
        "steps": json.loads((run / "summary.json").read_text())["steps"],
    }


@pytest.fixture(scope="module")
def whole(spear_signalled, tmp_path_factory) -> Callable[[str], tuple[dict, float]]:
    """The end of a run that nobody stopped, and how long it took."""
    known: dict[str, tuple[dict, float]] = {}

    def find(verb: str) -> tuple[dict, float]:
        if verb not in known:
            run = tmp_path_factory.mktemp(verb) / "run"
            outcome = spear_signalled(verb, "lookup", f"run.dir={run}", *SMALL)
            assert outcome["code"] == 0, outcome["text"]
            known[verb] = result(run, verb), outcome["seconds"]
        return known[verb]

    return find


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_run_stopped_or_killed_at_any_moment_ends_as_if_it_had_not_been(spear_signalled, whole, tmp_path, verb, seed):
    expected, seconds = whole(verb)
    rng, run, texts = random.Random(f"{verb}/{seed}"), tmp_path / "it's a run", []
    line = [verb, "lookup", f"run.dir={run}", *SMALL, "run.resume=auto"]
    for _ in range(5):
        number = rng.choice([*STOPS, signal.SIGTERM, signal.SIGKILL])
        outcome = spear_signalled(*line, signals=((rng.uniform(0, seconds), number),))
        texts.append(f"{number.name} {outcome}")
        if outcome["code"] == 0:
            break
        assert "Traceback" not in outcome["text"], texts
        assert outcome["code"] == (-number if number == signal.SIGKILL else 128 + number), texts
        if number != signal.SIGKILL:
            way_on = f"go on: spear {verb} {shlex.quote(f'run.dir={run}')} run.resume=true"
            assert way_on in outcome["text"] or "give the same command again" in outcome["text"], texts
    outcome = spear_signalled(*line)
    assert outcome["code"] == 0, [*texts, outcome]
    assert result(run, verb) == expected, texts
    assert "nothing is left to do" in spear_signalled(*line)["text"]


# --- the command


def begun(*arguments: object, **surroundings: str) -> subprocess.Popen:
    """A command in a process group of its own, as a shell starts it."""
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    return subprocess.Popen(
        [sys.executable, "-m", "spear_rl.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200", **surroundings},
        process_group=0,
    )


def read_to(process: subprocess.Popen, words: str) -> str:
    """What it prints up to a line with these words."""
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text
    raise AssertionError(f"{words!r} was never printed: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPS)
def test_the_printed_command_goes_on_after_a_signal_to_the_whole_process_group(
    spear_signalled, whole, tmp_path, number
):
    """As Ctrl-C in a terminal: the environments' workers get it too."""
    run = tmp_path / "a run & more"
    process = begun("train", "lookup", f"run.dir={run}", *SMALL, "rollout.workers=2")
    text = read_to(process, "at step 0")
    os.killpg(process.pid, number)
    text += process.communicate(timeout=120)[0]
    assert process.returncode == 128 + number, text
    assert "Traceback" not in text, text
    command = text.rpartition("go on: ")[2]
    assert not list((run / "checkpoints").glob(".*"))
    outcome = spear_signalled(*shlex.split(command)[1:])
    assert outcome["code"] == 0, outcome["text"]
    assert result(run, "train") == whole("train")[0]


@pytest.mark.slow
def test_a_step_is_finished_on_the_first_signal_and_given_up_on_the_second(tmp_path):
    settings = ["sft.episodes=0", "eval.tasks=0", "run.steps=3", "run.checkpoint_every=9", "rollout.num_tasks=2"]
    line = ["train", "lookup", f"run.dir={tmp_path / 'run'}", *settings, "engine.name=slow_engine:make"]
    process = begun(*line, SLOW_UPDATES="2")
    read_to(process, "updating")
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 143, text
    assert "stopping after this step" in text
    assert "stopped at step 1; go on: spear train run.dir=" in text
    process = begun(*line, "run.resume=auto", SLOW_UPDATES="600")
    read_to(process, "updating")
    process.send_signal(signal.SIGINT)
    read_to(process, "stopping after this step")
    time.sleep(signals.SAME_SIGNAL_SECONDS)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 130, text
    assert "stopped at once in step 1: step_000001 is saved, nothing is lost; go on: " in text
    process = begun(*line, "run.resume=auto")
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 0, text
    assert [row["step"] for row in logged(tmp_path / "run")] == [0, 1, 2]


def test_a_stop_before_anything_is_written_says_so_and_leaves_no_folder(tmp_path):
    run = tmp_path / "runs" / "mine"
    process = begun("train", "lookup", f"run.dir={run}", *SMALL)
    read_to(process, "lookup, seed 0")
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 130, text
    assert "stopped before anything was written: give the same command again" in text
    assert not run.parent.exists()


def test_an_ignored_signal_stays_ignored():
    """As under nohup, or SIGINT for a background job of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.is_asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "name", ["runs/mine", "a b", "it's", '"quoted"', "'q", "$HOME/`x`", " x ", "a;b&c", "=", "\u2603"]
)
def test_the_command_to_go_on_names_the_folder_as_it_is(name):
    words = shlex.split(command_to_go_on(name, "train"))
    assert words[:2] == ["spear", "train"]
    config = load(None, words[2:])
    assert (config.run.dir, config.run.resume) == (name, True)


# --- what a signal does to running code


@pytest.fixture
def stop() -> Iterator[Stop]:
    with stop_on_signals() as stop:
        yield stop


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_interrupts_episodes_but_no_update_and_no_checkpoint(stop, number):
    done = []

    def train() -> None:
        with stop.finished():
            with stop.shielded():
                signal.raise_signal(number)
                done.append("checkpoint")
            done.append("update")
            with stop.abandoned():
                done.append("episodes")

    with pytest.raises(Stopped) as stopped:
        train()
    assert done == ["checkpoint", "update"]
    assert stopped.value.exit_code == 128 + number
    with pytest.raises(Stopped), stop.abandoned():
        pass


def test_episodes_that_caught_the_interruption_are_abandoned_all_the_same(stop):
    def play() -> None:
        with stop.finished(), stop.abandoned(), suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped):
        play()


def test_an_error_made_of_the_interruption_is_a_stop(stop):
    def step() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            raise ValueError("an environment broke") from None

    with pytest.raises(Stopped), stop.finished(), stop.abandoned():
        step()


def test_an_interrupted_class_definition_is_a_stop():
    class Interrupting:
        def __set_name__(self, owner: type, name: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped), stop_on_signals():
        type("Defined", (), {"field": Interrupting()})


def test_a_second_signal_at_once_is_a_copy_and_a_later_one_stops_now_but_not_in_a_checkpoint(stop, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    with stop.finished():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        clock[0] += 2
        with stop.shielded():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGINT)
    assert stopped.value.at_once


def test_workers_outlive_a_schedulers_sigterm_but_what_they_start_does_not():
    with Pool(num_workers=1) as pool:
        pool.open(0, Task("chain", partial(games.Chain, 1)))
        pool.answers(1)
        [worker] = pool.pids
        os.kill(worker, signal.SIGTERM)
        pool.step(0, "look")
        [(_, answer)] = pool.answers(1)
        assert answer.observation.text.startswith("code"), answer
        pool.open(1, Task("terminating", partial(games.Terminating, 1)))
        [(_, answer)] = pool.answers(1)
        assert answer.text == f"-{signal.SIGTERM} -{signal.SIGTERM}"
        assert pool.pids == [worker]


# --- run.resume=auto

TINY = [
    "sft.episodes=8", "sft.epochs=1", "eval.tasks=2", "run.steps=2", "rollout.num_tasks=2", "rollout.group_size=2",
    "run.threads=1",
]  # fmt: skip


def test_auto_starts_a_run_and_says_when_it_is_finished_and_goes_on_with_more_steps(spear, tmp_path):
    line = ["train", "lookup", f"run.dir={tmp_path / 'run'}", *TINY, "run.resume=auto"]
    code, text = spear(*line)
    assert code == 0, text
    assert "success after" in text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    code, text = spear(*line)
    assert code == 0, text
    assert text == f"the run in {tmp_path / 'run'} is finished: nothing is left to do\n"
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    code, text = spear(*line, "run.steps=3")
    assert code == 0, text
    assert "changed: run.steps 2 -> 3" in text
    assert [row["step"] for row in logged(tmp_path / "run")] == [0, 1, 2]
    code, text = spear(*line)
    assert code == 2, text
    assert "run.steps=2: the run has already taken 3 steps" in text
    code, text = spear(*line[:2], f"run.dir={tmp_path / 'run'}", "run.resume=auto", "run.seed=4")
    assert code == 2, text
    assert "run.seed=4: the run began with 0" in text


def test_auto_says_that_a_cold_start_is_finished(spear, tmp_path):
    line = ["sft", "lookup", f"run.dir={tmp_path / 'run'}", *TINY, "run.resume=auto"]
    assert spear(*line)[0] == 0
    code, text = spear(*line)
    assert code == 0, text
    assert "is finished: nothing is left to do" in text
    code, text = spear("train", *line[1:])
    assert code == 2, text
    assert "was begun by `spear sft`" in text


@pytest.mark.parametrize("moment", ["before its checkpoint is deleted", "while it is deleted"])
def test_auto_deletes_the_checkpoint_of_a_cold_start_that_was_killed_after_its_result(
    spear, tmp_path, monkeypatch, moment
):
    def killed(path: Path) -> None:
        if moment == "while it is deleted":
            os.rename(path, path.with_name(f".old_{path.name}"))
        raise SystemExit("killed")

    settings = [f"run.dir={tmp_path / 'run'}", *TINY, "sft.checkpoint_seconds=0", "run.resume=auto"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove_folder", lambda path: killed(path) if path.name == "cold_start" else None)
        with pytest.raises(SystemExit, match="killed"):
            sft_from(load("lookup", settings))
    assert {"cold_start", ".old_cold_start"} & {path.name for path in (tmp_path / "run").iterdir()}
    code, text = spear("sft", "lookup", *settings)
    assert code == 0, text
    assert "is finished: nothing is left to do" in text
    assert not {"cold_start", ".old_cold_start"} & {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("content", ["notes.txt", "slurm-1.out", "model"])
def test_auto_leaves_a_folder_of_something_else_alone(spear, tmp_path, content):
    run = tmp_path / "run"
    run.mkdir()
    (run / content).write_text("mine")
    code, text = spear("train", "lookup", f"run.dir={run}", *TINY, "run.resume=auto")
    assert code == 2, text
    assert "holds files but no run" in text
    assert [path.name for path in run.iterdir()] == [content]
    code, text = spear("train", "lookup", f"run.dir={run / content}", *TINY, "run.resume=auto")
    assert code == 2, text
    assert "is not a folder" in text


def test_auto_starts_in_an_empty_folder_and_from_python(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    config = load("lookup", [f"run.dir={run}", *TINY, "run.resume=auto"])
    assert train_from(config)["steps"] == 2
    config = load("lookup", [f"run.dir={run}", *TINY, "run.steps=3", "run.resume=auto"])
    assert train_from(config)["steps"] == 3
    assert 'resume = "auto"' not in (run / "config.toml").read_text()


# --- the cold start


def stopped_in_cold_start(run: Path, *settings: str) -> None:
    def interrupt(event: object) -> None:
        if getattr(event, "kind", "") == "sft" and getattr(event, "step", 0) == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped) as stopped, stop_on_signals() as stop:
        train_from(load("lookup", [f"run.dir={run}", *TINY, "sft.batch_size=2", *settings]), [interrupt], stop=stop)
    assert stopped.value.place == "stopped in the cold start after update 2 of 4"


def test_a_stopped_cold_start_goes_on_with_its_own_settings_only(spear, tmp_path):
    run = tmp_path / "run"
    stopped_in_cold_start(run)
    assert [path.name for path in (run / "cold_start").iterdir()] == ["step_000002"]
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "sft.epochs=2")
    assert code == 2, text
    assert "sft.epochs=2: the cold start has begun (with 1), so it cannot change" in text
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "sft.checkpoint_seconds=5")
    assert code == 0, text
    assert "the cold start goes on after update 2" in text
    assert not (run / "cold_start").exists()


def test_a_damaged_checkpoint_of_a_cold_start_is_named_with_what_to_do(spear, tmp_path):
    run = tmp_path / "run"
    stopped_in_cold_start(run)
    (run / "cold_start" / "step_000002" / "model.safetensors").write_bytes(b"")
    code, text = spear("train", f"run.dir={run}", "run.resume=auto")
    assert code == 2, text
    assert "delete it to begin the cold start again" in text


def test_a_run_cannot_be_started_over_a_stopped_one(tmp_path):
    run = tmp_path / "run"
    stopped_in_cold_start(run)
    with pytest.raises(ConfigError, match=r"run\.resume=true to go on"):
        train_from(load("lookup", [f"run.dir={run}", *TINY]))
