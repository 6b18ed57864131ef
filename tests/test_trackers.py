"""The run owns its logs: the same files from Python and the command line, and trackers that can never stop a run."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import logged
from spear_rl.app.config import Config, flat, load
from spear_rl.app.train import sft_from, train_from
from spear_rl.errors import ConfigError, DiskError, MissingExtraError, UserError
from spear_rl.io.record import git_state, read_record
from spear_rl.train.callbacks import Event
from spear_rl.train.trackers import TRACKERS, RunInfo, Trackers

SMALL = [
    "run.steps=3", "run.checkpoint_every=2", "sft.episodes=4", "sft.epochs=1", "eval.tasks=2", "rollout.num_tasks=2",
    "rollout.group_size=2", "run.threads=1",
]  # fmt: skip

FAKES = {
    "wandb": """
class Run:
    def log(self, data, step=None): write("log", data=data, step=step)
    def finish(self, exit_code=None): write("finish", exit_code=exit_code)
def init(*, project=None, name=None, config=None, dir=None, id=None, resume=None, mode=None):
    write("init", project=project, name=name, config=config, dir=dir, id=id, resume=resume, mode=mode)
    return Run()
""",
    "trackio": """
def init(project, name=None, config=None, resume="never"):
    write("init", project=project, name=name, config=config, resume=resume)
def log(metrics, step=None): write("log", data=metrics, step=step)
def finish(): write("finish")
""",
    "mlflow": """
class Run:
    class info:
        run_id = "0123abcd"
def set_tracking_uri(uri): write("uri", uri=uri)
def start_run(run_id=None, run_name=None):
    write("init", id=run_id, name=run_name)
    return Run()
def log_params(params):
    assert len(params) <= 100
    write("params", params=params)
def log_metrics(metrics, step=None):
    assert all(isinstance(value, float) for value in metrics.values())
    write("log", data=metrics, step=step)
def end_run(status="FINISHED"): write("finish", status=status)
""",
}
"""Modules with the part of the real interfaces that is used; each call becomes a line of a file."""


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Puts the stand-ins where imports find them; gives what was called of one of them."""
    for name, body in FAKES.items():
        (tmp_path / "fakes").mkdir(exist_ok=True)
        path = tmp_path / "fakes" / f"{name}.calls"
        opened = f"open({str(path)!r}, 'a')"
        write = f"import json\ndef write(call, **values): {opened}.write(json.dumps([call, values]) + '\\n')\n"
        (tmp_path / "fakes" / f"{name}.py").write_text(write + body)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "fakes")

    def called(name: str, call: str = "") -> list:
        path = tmp_path / "fakes" / f"{name}.calls"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [values for kind, values in lines if kind == call] if call else [kind for kind, _ in lines]

    yield called
    for name in FAKES:
        sys.modules.pop(name, None)


def config_of(run: Path, *settings: str) -> Config:
    return load("lookup", [f"run.dir={run}", *SMALL, *settings])


def notes_of(run: Path, *settings: str) -> list[str]:
    notes: list[str] = []
    train_from(config_of(run, *settings), [lambda event: notes.append(event.text) if event.kind == "note" else None])
    return notes


def tree(run: Path) -> set[str]:
    """The files of a run; the name of a tensorboard file says when and where."""
    return {str(p.relative_to(run).parent if "tfevents" in p.name else p.relative_to(run)) for p in run.rglob("*")}


# --- the run owns its logs


def test_python_and_the_command_line_leave_the_same_files(spear, tmp_path):
    from spear_rl import Config, sft_from, train_from

    assert Config().run.trackers == ["jsonl", "tensorboard"]
    for verb, call in {"train": train_from, "sft": sft_from}.items():
        call(config_of(tmp_path / verb / "python"))
        code, text = spear(verb, "lookup", f"run.dir={tmp_path / verb / 'command'}", *SMALL)
        assert code == 0, text
        assert tree(tmp_path / verb / "python") == tree(tmp_path / verb / "command")
    assert logged(tmp_path / "train" / "python") == logged(tmp_path / "train" / "command")
    assert {"metrics.jsonl", "eval.jsonl", "run.json", "tensorboard"} <= tree(tmp_path / "train" / "python")


def test_the_names_of_the_package_are_there_without_torch():
    code = "import sys, spear_rl; spear_rl.Config; import spear_rl.train.trackers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_without_jsonl_is_refused_before_anything_is_written(tmp_path):
    for setting in ('["tensorboard"]', '["jsonl", "jsonl"]', '["jsonl", "wandbb"]', "[]"):
        for call in (train_from, sft_from):
            with pytest.raises(ConfigError, match=r"run\.trackers"):
                call(config_of(tmp_path / "run", f"run.trackers={setting}"))
    config = config_of(tmp_path / "run")
    config.run.trackers = ["tensorboard"]
    with pytest.raises(ConfigError, match="resume, show and compare read"):
        train_from(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "jsonl"])
def test_a_missing_package_is_named_before_anything_is_written(spear, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, f'run.trackers=["jsonl","{name}"]')
    assert (code, f"pip install {name}" in text) == (2, True), text
    assert not (tmp_path / "run").exists()
    with pytest.raises(MissingExtraError, match=f"pip install {name}"):
        sft_from(config_of(tmp_path / "run", f'run.trackers=["jsonl","{name}"]'))


# --- the services


@pytest.mark.parametrize("name", FAKES)
def test_a_service_gets_config_versions_and_every_step_and_evaluation(calls, tmp_path, name):
    run = tmp_path / "my run"
    train_from(config_of(run, f'run.trackers=["jsonl","{name}"]'))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row.pop("rollout/by_family") for row in rows)  # no number, so it is in the file only
    expected = [(row.pop("step"), row) for row in rows]
    logs = calls(name, "log")
    assert [(c["step"], c["data"]) for c in logs if "rollout/reward" in c["data"]] == expected
    evals = [(c["step"], c["data"]["eval/success"]) for c in logs if "eval/success" in c["data"]]
    assert evals == [(row["step"], row["success"]) for row in logged(run, "eval.jsonl")]
    assert [c["step"] for c in logs] == sorted(c["step"] for c in logs)  # wandb leaves out what goes back
    [start] = calls(name, "init")
    batches = [call["params"] for call in calls(name, "params")] if name == "mlflow" else [start["config"]]
    described = {key: value for batch in batches for key, value in batch.items()}
    assert {"run.seed", "algorithm.imitation.capacity", "versions.torch", "versions.spear_rl", "platform"} <= {
        *described
    }
    assert str(described["run.steps"]) == "3"
    assert start["name"].startswith("my run")
    assert calls(name)[-1] == "finish"
    assert not (run / "tensorboard").exists()


def test_services_stay_offline_and_in_the_run_folder_unless_told_otherwise(calls, tmp_path, monkeypatch):
    both = 'run.trackers=["wandb","jsonl","mlflow"]'
    train_from(config_of(tmp_path / "a", both, "run.steps=1"))
    assert (calls("wandb", "init")[-1]["mode"], calls("wandb", "init")[-1]["dir"]) == ("offline", str(tmp_path / "a"))
    assert calls("mlflow", "uri")[-1]["uri"] == (tmp_path / "a" / "mlflow").as_uri()
    for name, value in {"WANDB_MODE": "online", "WANDB_API_KEY": "x" * 40}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            TRACKERS["wandb"](RunInfo(tmp_path, "b", {}, {}))
            assert calls("wandb", "init")[-1]["mode"] is None
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    TRACKERS["wandb"](RunInfo(tmp_path, "b", {}, {}))
    assert calls("wandb", "init")[-1]["mode"] is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    count = len(calls("mlflow", "uri"))
    TRACKERS["mlflow"](RunInfo(tmp_path, "b", {}, {}))
    assert len(calls("mlflow", "uri")) == count


def test_a_resumed_run_continues_the_same_run_of_every_service(calls, tmp_path):
    run, all_of_them = tmp_path / "run", 'run.trackers=["jsonl","wandb","mlflow","trackio"]'
    train_from(config_of(run, all_of_them, "run.steps=2"))
    num_batches = len(calls("mlflow", "params"))
    train_from(config_of(run, all_of_them, "run.resume=true"))
    first, second = calls("wandb", "init")
    assert (first["id"], first["resume"]) == (second["id"], second["resume"])
    assert [c["id"] for c in calls("mlflow", "init")] == [None, "0123abcd"]
    assert len(calls("mlflow", "params")) == num_batches > 0
    assert len({c["name"] for c in calls("trackio", "init")}) == 1
    assert [c["resume"] for c in calls("trackio", "init")] == ["allow", "allow"]
    assert read_record(run)["trackers"].keys() == {"wandb", "mlflow", "trackio"}
    train_from(config_of(tmp_path / "other" / "run", all_of_them, "run.steps=1"))
    assert calls("wandb", "init")[-1]["id"] != first["id"]
    assert calls("trackio", "init")[-1]["name"] != calls("trackio", "init")[0]["name"]


def test_a_run_that_fails_is_finished_as_failed(calls, tmp_path, monkeypatch):
    def fail(event: Event) -> None:
        if event.kind == "step":
            raise UserError("out of luck")

    with pytest.raises(UserError, match="out of luck"):
        train_from(config_of(tmp_path / "run", 'run.trackers=["jsonl","wandb","mlflow"]'), [fail])
    assert calls("wandb", "finish") == [{"exit_code": 1}]
    assert calls("mlflow", "finish") == [{"status": "FAILED"}]


def test_a_cold_start_alone_is_tracked_by_update(calls, tmp_path):
    sft_from(config_of(tmp_path / "run", 'run.trackers=["jsonl","wandb"]'))
    assert [c["step"] for c in calls("wandb", "log")] == [1]
    assert "sft/loss" in calls("wandb", "log")[0]["data"]
    assert calls("wandb")[-1] == "finish"


# --- one's own


def test_a_tracker_from_outside_is_named_like_an_environment(tmp_path):
    run = tmp_path / "run"
    train_from(config_of(run, 'run.trackers=["outside_package.trackers:recording","jsonl"]'))
    start, *events = (run / "mine.txt").read_text().splitlines()
    assert json.loads(start)["config"] == json.loads(
        json.dumps(flat(config_of(run, 'run.trackers=["outside_package.trackers:recording","jsonl"]')))
    )
    rewards = [f"step {row['step']} {row['rollout/reward']}" for row in logged(run)]
    assert [line for line in events if line.startswith("step")] == rewards
    assert events[-1].startswith("end")
    assert "mine" in read_record(run)["trackers"]


@pytest.mark.parametrize(
    "name", ["nowhere:start", "outside_package.trackers:nothing", "outside_package.trackers:no_function"]
)
def test_a_tracker_that_is_not_there_is_refused_in_a_sentence(tmp_path, name):
    with pytest.raises(ConfigError, match=r"^run\.trackers: "):
        train_from(config_of(tmp_path / "run", f'run.trackers=["jsonl","{name}"]'))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["never_starts", "exits", "fails_at_step_one", "returns_nothing"])
def test_a_tracker_that_raises_is_dropped_with_one_note(tmp_path, name):
    folder = Path.cwd()
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    train_from(config_of(whole))
    notes = notes_of(hurt, f'run.trackers=["outside_package.trackers:{name}","jsonl"]')
    notes = [note for note in notes if not note.startswith("warning: engine.model=")]  # of so short a cold start
    assert len(notes) == 1
    assert f"outside_package.trackers:{name} raised" in notes[0]
    assert logged(hurt) == logged(whole)
    assert Path.cwd() == folder


def test_a_dropped_tracker_is_logged_where_there_is_no_callback(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train_from(config_of(tmp_path / "run", 'run.trackers=["jsonl","outside_package.trackers:never_starts"]'))
    assert sum("the run continues without it" in message for message in caplog.messages) == 1


def test_jsonl_alone_may_stop_a_run(tmp_path):
    run = RunInfo(tmp_path, "run", {}, {})
    trackers = Trackers(["tensorboard", "jsonl"])
    trackers.start(run)
    (tmp_path / "tensorboard").touch()
    trackers(Event("step", 0, metrics={"x": 1.0}))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "x": 1.0}\n'
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DiskError, match=r"metrics\.jsonl cannot be written"):
        trackers(Event("step", 1, metrics={"x": 1.0}))


def test_the_examples_in_the_documentation_run(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "runs.md").read_text("utf-8")
    start, tracker, stoppable = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "documented_tracker.py").write_text(tracker)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    changed = start.replace("summary =", 'config.run.trackers.append("documented_tracker:my_tracker")\nsummary =')
    exec(changed, names := {})
    assert names["summary"]["steps"] == 2
    assert "mine with seed 0 at commit" in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").is_file()
    exec(stoppable, {})
    assert (tmp_path / "runs" / "stoppable" / "summary.json").is_file()


# --- the record


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "code.py").write_text("1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_versions_and_git_state_of_every_start_are_recorded(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    train_from(config_of(Path("run"), "run.steps=1"))
    (checkout / "code.py").write_text("2\n")
    train_from(config_of(Path("run"), "run.steps=2", "run.resume=true"))
    first, second = json.loads(Path("run/run.json").read_text())["starts"]
    assert (first["step"], second["step"]) == (0, 1)
    assert {"spear_rl", "python", "torch", "transformers"} <= first["versions"].keys()
    assert first["git"]["commit"] == second["git"]["commit"]
    assert (first["git"]["dirty"], second["git"]["dirty"]) == (False, True)


def test_outside_of_a_checkout_there_is_no_git_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "gone") is None
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert git_state(tmp_path / "empty") is None


def test_git_runs_nothing_that_a_repository_names(checkout, tmp_path):
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path / 'sprung'}\ncat\n")
    trap.chmod(0o755)
    (checkout / "data.bin").write_text("1\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "second")
    for hook in ("post-index-change", "fsmonitor-watchman", "post-checkout", "reference-transaction"):
        (checkout / ".git" / "hooks" / hook).write_text(trap.read_text())
        (checkout / ".git" / "hooks" / hook).chmod(0o755)
    for key in (
        "core.fsmonitor",
        "filter.x.clean",
        "filter.x.process",
        "filter.a=b.clean",
        "diff.external",
        "core.pager",
    ):
        git(checkout, "config", key, str(trap))
    git(checkout, "config", "filter.x.required", "true")
    (checkout / ".git" / "info" / "attributes").write_text("*.py filter=x\n*.bin filter=a=b\n")
    for name in ("code.py", "data.bin"):
        os.utime(checkout / name, (1, 1))
    (tmp_path / "sprung").unlink(missing_ok=True)
    assert git_state(checkout) == git_state(checkout) != None  # noqa: E711
    assert not (tmp_path / "sprung").exists()
    subprocess.run(["git", "status"], cwd=checkout, capture_output=True, timeout=60)
    assert (tmp_path / "sprung").exists()


def test_a_git_that_hangs_is_given_up(checkout, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\nsleep 20 &\nsleep 20\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    before = time.monotonic()
    assert git_state(checkout) is None
    assert time.monotonic() - before < 15


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"starts": 3, "trackers": []}',
        "[" * 100_000,
        "\xff",
        '{"starts": [], "trackers": {"wandb": "../../x", "mlflow": 3}}',
    ],
)
def test_a_damaged_record_neither_stops_a_resume_nor_reaches_a_service(calls, tmp_path, content):
    run = tmp_path / "run"
    train_from(config_of(run, "run.steps=1"))
    (run / "run.json").write_text(content, "latin-1")
    train_from(config_of(run, "run.steps=2", "run.resume=true", 'run.trackers=["jsonl","wandb"]'))
    assert [len(start) > 1 for start in read_record(run)["starts"]][-1:] == [True]
    assert calls("wandb", "init")[0]["id"].isalnum()
