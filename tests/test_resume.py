"""A run is never lost and never silently another: settings on resume, locks, damaged files, diverged policies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import logged
from spear_rl.app.build.training import PPO, algorithm_of
from spear_rl.app.config import Config, FiltersConfig, flat, load, override, to_toml, update
from spear_rl.app.resume import FIXED, opened, settings_text, start_of, stored
from spear_rl.app.train import train_from
from spear_rl.engines.hf import HFEngine
from spear_rl.errors import CheckpointError, ConfigError, DiskError, UserError
from spear_rl.io.jsonl import mend_rows, read_rows, spans
from spear_rl.io.lock import locked
from spear_rl.train.callbacks import Event, JsonLines, TensorBoard
from spear_rl.train.checkpoint import best_checkpoint, checked_manifest, checkpoints, save_checkpoint

SMALL = [
    "run.steps=4", "run.checkpoint_every=2", "sft.episodes=8", "sft.epochs=1", "eval.tasks=4", "rollout.num_tasks=2",
    "rollout.group_size=2", "run.threads=1",
]  # fmt: skip
LONGER = ["run.steps=6", "algorithm.bonus.steps=4", "algorithm.imitation.warm_steps=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(load("lookup", [f"run.dir={run}", *SMALL]))
    return run


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> Path:
    """The same run, of six steps in one go."""
    run = tmp_path_factory.mktemp("longer") / "run"
    train(load("lookup", [f"run.dir={run}", *SMALL, *LONGER]))
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def train(config: Config) -> list[str]:
    """Train as the command does; the notes it gave."""
    notes: list[str] = []
    train_from(config, [lambda event: notes.append(event.text) if event.kind == "note" else None])
    return notes


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a folder but its lock."""
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


def assert_same_end(run: Path, other: Path) -> None:
    assert logged(run) == logged(other)
    assert logged(run, "eval.jsonl")[-1] == logged(other, "eval.jsonl")[-1]
    names = [folder / "checkpoints" / "step_000006" / "model.safetensors" for folder in (run, other)]
    assert names[0].read_bytes() == names[1].read_bytes()


# --- which run is resumed


@pytest.mark.parametrize("spelling", ["true", "True", " true", "true "])
def test_a_resume_goes_on_with_the_runs_own_task_however_it_is_spelt(spear, run, longer, spelling):
    code, text = spear("train", f"run.dir={run}", f"run.resume={spelling}", "run.steps=6")
    assert code == 0, text
    assert "spear-dr-grpo on lookup" in text
    assert "changed: run.steps 4 -> 6" in text
    assert_same_end(run, longer)


@pytest.mark.parametrize(
    "name", ["2026", "2026-11-15", "1e3", "007", "true", "12:30:00", "x[red]", "x y", "0x10", "1_0", "[1]"]
)
@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_a_folder_of_any_name_is_found_as_it_was_typed(finished, tmp_path, monkeypatch, name, quote):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, name)
    with opened(None, [f"run.dir={quote}{name}{quote}", "run.resume=True"], verb="train") as (config, _):
        assert (config.run.dir, config.run.resume, config.task.env) == (name, True, "lookup")
        assert (config.algorithm.bonus.steps, config.run.steps) == (4, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_a_date_or_markup_as_a_folder_name_works_from_start_to_end(spear, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("2026-11-15", "x[/red]", "[bold]"):
        code, text = spear("train", "lookup", f"run.dir={name}", *SMALL, "run.steps=1")
        assert code == 0, text
        assert f"everything is in {name}" in text
        assert spear("train", f"run.dir={name}", "run.resume=true", "run.steps=2")[0] == 0
        assert [row["step"] for row in logged(tmp_path / name)] == [0, 1]


def test_a_preset_named_on_a_resume_changes_nothing_and_that_is_said(spear, run, longer):
    code, text = spear("train", "quickstart", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 0, text
    assert "the run's own settings are kept; quickstart differs in" in text
    assert "task.env" in text
    assert_same_end(run, longer)


# --- what may change


def other_value(value: object) -> str:
    """An override that is valid and different from `value`, for most settings."""
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int):
        return str(value + 2)
    if isinstance(value, float):
        return str(value / 2 + 0.003)
    return {"dict": "", "list": '["q_proj"]', "NoneType": "0.3"}.get(type(value).__name__, "other")


CHOICES = {
    "task.options": None, "engine.device": "cpu", "engine.dtype": "float32", "engine.attention": "padded",
    "engine.generator": "vllm", "rollout.layout": "log", "rollout.detail": "full", "optim.decay": "cosine",
    "algorithm.name": "spear-grpo", "algorithm.bonus.mode": "constant", "algorithm.bonus.count": "distinct",
    "algorithm.imitation.draw": "when_full", "algorithm.imitation.gate": "new",
    "algorithm.imitation.update": "separate", "algorithm.covariance.replay": "kl",
    "algorithm.covariance.on_policy": "clip", "eval.split": "test",
    "algorithm.divide_by_std": "true", "algorithm.dual_clip": "3.0", "algorithm.imitation.unit": "turns",
    "algorithm.imitation.divide_by_std": "true", "algorithm.anchor": "text", "rollout.history": "answer",
    "rollout.return_when": "mixed", "run.trajectories_format": "jsonl",
    "algorithm.reduction": "sequence_mean", "algorithm.ppo.level": "turn", "algorithm.imitation.profile": "paper",
    "algorithm.imitation.schedule": "steps", "algorithm.imitation.baseline": "percentile",
    "algorithm.imitation.priority": '["medium"]', "algorithm.imitation.max_second_moment": "2.0",
}  # fmt: skip


@pytest.mark.parametrize("key", [key for key in flat(Config()) if key not in ("run.dir", "run.resume")])
def test_every_setting_is_either_changed_and_said_so_or_refused_before_anything_is_written(run, key):
    before, old = contents(run), flat(stored(run).config)[key]
    text = f"{key}={CHOICES.get(key) or other_value(old)}" if key != "task.options" else "task.options.num_digits=4"
    overrides = [f"run.dir={run}", "run.resume=true", text]
    is_fixed = (
        key in FIXED or key.startswith("sft.") or key in ("algorithm.kl", *not_for_this_one(old_name="spear-dr-grpo"))
    )
    with pytest.raises(ConfigError) if is_fixed else opened(None, overrides, verb="train") as outcome:
        if is_fixed:
            with opened(None, overrides, verb="train") as (config, _):
                start_of(config, verb="train")
                algorithm_of(config)
        else:
            config, _ = outcome
            start = start_of(config, verb="train")
            assert flat(config)[key] != old
            assert [note for note in start.notes if note.startswith(f"changed: {key} ")], start.notes
            assert len([note for note in start.notes if note.startswith("changed: ")]) == 1
    assert contents(run) == before


def not_for_this_one(old_name: str) -> list[str]:
    """Settings that an algorithm does not have: changing them would change nothing."""
    assert old_name == "spear-dr-grpo"
    filters = [f"algorithm.filters.{name}" for name in vars(FiltersConfig())]
    ppo = [f"algorithm.ppo.{name}" for name in PPO]
    own = ["algorithm.discount", "algorithm.step_weight", "algorithm.keep_groups", "algorithm.max_length"]
    return [*own, *filters, *ppo]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm.name=grpo", "algorithm.name=grpo: the run began with spear-dr-grpo, which cannot change"),
        ("task.env=household", "task.env=household: the run began with lookup"),
        ("run.seed=1", "run.seed=1: the run began with 0"),
        ("engine.model=tiny", "engine.model=tiny: the run began with tiny-xs"),
        ("engine.lora_rank=4", "engine.lora_rank=4: the run began with 0"),
        ("sft.epochs=5", "the cold start is over"),
        ("algorithm.kl=0.1", "the run began without a reference policy"),
        ("run.steps=3", "run.steps=3: the run has already taken 4 steps"),
        ("run.stepz=3", "unknown setting run.stepz; did you mean run.steps?"),
        ("algorithm.discount=0.5", "algorithm.discount"),
        ("algorithm.keep_groups=0.5", "algorithm.keep_groups=0.5: spear-dr-grpo has no such setting"),
    ],
)
def test_a_refused_resume_leaves_the_run_as_it_was_and_the_plain_resume_works(spear, run, longer, setting, said):
    before = contents(run)
    code, text = spear("train", f"run.dir={run}", "run.resume=true", setting)
    assert code == 2, text
    assert said in text
    assert "Traceback" not in text
    assert contents(run) == before
    assert spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")[0] == 0
    assert_same_end(run, longer)


def test_a_changed_learning_rate_and_weight_decay_take_effect(run):
    config = stored(run).config
    override(config, [f"run.dir={run}", "run.resume=true", "run.steps=5", "optim.learning_rate=0.5"])
    override(config, ["optim.weight_decay=0.25"])
    notes = train(config)
    assert "changed: optim.learning_rate 0.001 -> 0.5" in notes
    assert "changed: optim.weight_decay 0.01 -> 0.25" in notes
    assert logged(run)[-1]["policy/learning_rate"] == 0.5
    state = torch.load(run / "checkpoints" / "step_000005" / "trainer_state.pt", weights_only=True)
    assert state["engine"]["optimizer"]["param_groups"][0]["weight_decay"] == 0.25
    assert stored(run).saved.optim.weight_decay == 0.25


def test_from_python_a_whole_configuration_is_compared_with_the_stored_one(run, tmp_path):
    before = contents(run)
    with pytest.raises(ConfigError, match=r"rollout.detail=full: the run began with short"):
        train_from(load("lookup", [f"run.dir={run}", *SMALL, "run.resume=true", "rollout.detail=full"]))
    assert contents(run) == before
    notes = train(load("lookup", [f"run.dir={run}", *SMALL, "run.resume=true", "run.steps=5"]))
    assert notes == ["changed: run.steps 4 -> 5", "changed: algorithm.bonus.steps 4 -> 5"]
    assert len(logged(run)) == 5


# --- where the settings come from


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut between lines": lambda path: path.write_text("".join(path.read_text().splitlines(True)[:6])),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "not UTF-8": lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    "not TOML": lambda path: path.write_text("= 3"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_config_is_replaced_by_that_of_the_checkpoint(spear, run, longer, damage):
    DAMAGES[damage](run / "config.toml")
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    if damage == "a folder":
        assert code == 2
        assert "config.toml cannot be written: Is a directory" in text
        return
    assert code == 0, text
    if damage != "one byte short":
        assert "settings are taken from step_000004" in text
    assert_same_end(run, longer)
    assert (run / "config.toml").read_text() == (longer / "config.toml").read_text().replace(
        str(longer), str(run)
    ).replace("resume = false", "resume = true")


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d not in ("one byte short", "a folder")])
def test_a_run_without_any_readable_settings_is_refused(spear, run, damage):
    for checkpoint in checkpoints(run / "checkpoints"):
        manifest = json.loads((checkpoint / "checkpoint.json").read_text())
        older = {"step": manifest["step"], "sha256": manifest["sha256"]}
        (checkpoint / "checkpoint.json").write_text(json.dumps(older))
    DAMAGES[damage](run / "config.toml")
    before = contents(run)
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 2, text
    assert "is of an older format without settings; restore config.toml or start anew" in text
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 2, text
    assert "there is no checkpoint" in text or "holds no run" in text


def test_settings_nested_too_deep_to_be_read_are_damage(tmp_path):
    (tmp_path / "config.toml").write_text("a = " + "[" * 20_000)
    with pytest.raises(CheckpointError, match=r"config\.toml is damaged \(maximum recursion depth"):
        stored(tmp_path)


def test_a_checkpoint_of_the_older_format_goes_on_with_config_toml_and_says_so(spear, run, longer):
    for checkpoint in checkpoints(run / "checkpoints"):
        manifest = json.loads((checkpoint / "checkpoint.json").read_text())
        older = {"step": manifest["step"], "sha256": manifest["sha256"]}
        (checkpoint / "checkpoint.json").write_text(json.dumps(older))
    (run / "config.toml").write_text(to_toml(stored(run).config))
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 0, text
    assert "step_000004 is of an older format: settings are those of config.toml alone" in text
    assert_same_end(run, longer)


@pytest.mark.parametrize(
    "change", [{"format": 3}, {"format": "x"}, {"settings": "[run]\nseed = 3\n"}, {"step": "four"}]
)
def test_a_manifest_of_a_newer_format_or_changed_by_hand_is_refused(spear, run, change):
    path = run / "checkpoints" / "step_000004" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = contents(run)
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 2, text
    assert ("has format 3" if change == {"format": 3} else "is damaged") in text
    assert contents(run) == before


def test_what_is_changed_by_hand_in_config_toml_obeys_the_same_rules(spear, run):
    path = run / "config.toml"
    whole = path.read_text()
    path.write_text(whole.replace("steps = 4\n", "steps = 5\n", 1))
    code, text = spear("train", f"run.dir={run}", "run.resume=true")
    assert code == 0, text
    assert "changed: run.steps 4 -> 5" in text
    path.write_text(path.read_text().replace('env = "lookup"', 'env = "household"'))
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 2
    assert "task.env=household: the run began with lookup" in text


def test_an_evaluation_of_a_run_with_a_damaged_config_plays_the_runs_own_task(spear, run, tmp_path):
    (run / "config.toml").unlink()
    code, text = spear("eval", run, "--tasks", "2", "--out", tmp_path / "eval.json")
    assert code == 0, text
    assert json.loads((tmp_path / "eval.json").read_text())["env"] == "lookup"


def test_settings_that_cannot_be_read_back_are_refused_before_anything_is_written(tmp_path):
    config = load("lookup", [f"run.dir={tmp_path / 'run'}"])
    config.run.dir = str(tmp_path / "run\udcff")
    with pytest.raises(ConfigError, match=r"run\.dir takes a text in UTF-8"):
        train_from(config)
    assert not list(tmp_path.iterdir())
    config.run.dir = "x [/red] \"'\\ \u00e9"
    again = Config()
    update(again, tomllib.loads(settings_text(config, "train")))
    assert again == config


# --- two at once


def test_two_processes_in_one_folder_leave_the_rows_of_one(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "spear_rl.cli", "train", "lookup", f"run.dir={run}", *SMALL, "run.steps=12"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    refused = said[[process.returncode for process in both].index(2)]
    assert "is in use by process" in refused or "is not empty" in refused
    assert "Traceback" not in refused
    assert [row["step"] for row in logged(run)] == list(range(12))


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_folder_in_use_is_refused_in_a_sentence_until_its_holder_dies(spear, run, verb):
    hold = "import sys, time; from pathlib import Path; from spear_rl.io.lock import locked\n"
    hold += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", hold, run], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    before = contents(run)
    for extra in ([], ["run.resume=true", "run.steps=6"]):
        code, text = spear(verb, "lookup", f"run.dir={run}", *extra)
        assert code == 2
        assert f"run.dir: {run} is in use by process {holder.pid} on " in text
    assert contents(run) == before
    holder.kill()
    holder.wait()
    assert spear("train", f"run.dir={run}", "run.resume=true", "run.steps=5")[0] == 0


def test_processes_may_make_their_folders_under_one_new_parent_at_the_same_moment(tmp_path):
    make = "import sys, time; from pathlib import Path; from spear_rl.io.lock import locked\n"
    make += "print('ready', flush=True); begin = float(sys.stdin.readline())\n"
    make += "for turn in range(60):\n"
    make += "    while time.time() < begin + 0.01 * turn: pass\n"
    make += "    with locked(Path(sys.argv[1], str(turn), 'arm', sys.argv[2])): pass\n"
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [start([sys.executable, "-c", make, tmp_path, str(number)]) for number in range(4)]
    assert all(process.stdout.readline() == "ready\n" for process in processes)
    begin = f"{time.time() + 0.2}\n"
    for process in processes:
        process.stdin.write(begin)
        process.stdin.flush()
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said


def test_a_lock_leaves_nothing_behind_where_nothing_was_written(tmp_path):
    with locked(tmp_path / "a" / "b" / "c"):
        assert (tmp_path / "a" / "b" / "c" / ".lock").is_file()
        with locked(tmp_path / "a" / "b" / "c"):
            pass
        assert (tmp_path / "a" / "b" / "c" / ".lock").is_file()
        said: list[str] = []

        def other() -> None:
            try:
                with locked(tmp_path / "a" / ".." / "a" / "b" / "c"):
                    pass
            except ConfigError as error:
                said.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "is in use" in said[0]
    assert not list(tmp_path.iterdir())


def test_a_folder_with_only_a_lock_or_an_unfinished_file_counts_as_empty(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / ".config.toml.part").write_text("[run]\nste")
    train(load("lookup", [f"run.dir={run}", *SMALL, "run.steps=1"]))
    assert not (run / ".config.toml.part").exists()


# --- folders that cannot be


@pytest.mark.parametrize("verb", ["train", "sft"])
@pytest.mark.parametrize("where", ["a file", "under a file", "too long", "read-only"])
def test_a_folder_that_cannot_be_written_is_one_sentence(spear, tmp_path, verb, where):
    (tmp_path / "file").touch()
    places = {
        "a file": tmp_path / "file",
        "under a file": tmp_path / "file" / "run",
        "too long": tmp_path / ("x" * 300),
        "read-only": Path("/proc/run"),
    }
    for resume in ("false", "true"):
        code, text = spear(verb, "lookup", f"run.dir={places[where]}", *SMALL, f"run.resume={resume}")
        assert code == 2, text
        assert "error: run." in text
        assert "Traceback" not in text
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_rows_and_curves_that_cannot_be_written_are_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"metrics.jsonl cannot be written: No space left on device"):
        JsonLines(tmp_path / "metrics.jsonl", "step")(Event("step", 0, metrics={"x": 1.0}))
    (tmp_path / "tensorboard").touch()
    with pytest.raises(DiskError, match="tensorboard cannot be written"):
        TensorBoard(tmp_path / "tensorboard")(Event("step", 0, metrics={"x": 1.0}))


def test_a_full_disk_in_the_middle_says_what_is_saved(spear, tmp_path, monkeypatch):
    from spear_rl.train import checkpoint

    original = torch.save
    calls = []

    def fails(state, file):
        calls.append(1)
        if len(calls) == 4:  # after those of the cold start, of step 0 and of step 2
            file.write(b"half")
            raise OSError(28, "No space left on device")
        original(state, file)

    monkeypatch.setattr(checkpoint.torch, "save", fails)
    run = tmp_path / "run"
    code, text = spear("train", "lookup", f"run.dir={run}", *SMALL, *LONGER)
    assert code == 2, text
    assert "step 4: " in text
    assert "step_000004 cannot be written: No space left on device" in text
    assert "step_000002 is saved, steps since then (2) are taken again: go on with run.resume=true" in text
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []
    assert spear("train", f"run.dir={run}", "run.resume=true")[0] == 0
    assert len(logged(run)) == 6


def test_a_run_goes_on_where_it_and_its_model_were_moved_or_are_spelt_otherwise(spear, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spear("sft", "lookup", "run.dir=one/start", *SMALL)[0] == 0
    begins = ["engine.model=one/start/model", "sft.episodes=0"]
    assert spear("train", "lookup", "run.dir=one/run", *SMALL, *begins, "run.steps=1")[0] == 0
    shutil.copytree("one/start/model", "other/model")
    code, text = spear("train", "run.dir=one/run", "run.resume=true", "engine.model=other/model", "run.steps=2")
    assert code == 2
    assert "engine.model=other/model: the run began with one/start/model, which cannot change" in text
    whole = [f"run.dir={tmp_path}/one/run", f"engine.model={tmp_path}/one/start/model"]
    code, text = spear("train", *whole, "run.resume=true", "run.steps=2")
    assert code == 0, text
    Path("one").rename("two")
    code, text = spear("train", "run.dir=two/run", "engine.model=two/start/model", "run.resume=true", "run.steps=3")
    assert code == 0, text
    assert len(logged(Path("two/run"))) == 3
    assert load("two/run/config.toml").engine.model == "two/start/model"


# --- checkpoints


def test_a_model_half_written_by_a_cold_start_is_recognised(spear, tmp_path):
    code, text = spear("sft", "lookup", f"run.dir={tmp_path / 'sft'}", *SMALL)
    assert code == 0, text
    model = tmp_path / "sft" / "model"
    assert checked_manifest(model)["step"] == 0
    code, text = spear("train", f"run.dir={tmp_path / 'sft'}", "run.resume=true")
    assert code == 2
    assert "was begun by `spear sft`" in text
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for command in (["train", "lookup", f"engine.model={model}", f"run.dir={tmp_path / 'rl'}"], ["eval", model]):
        code, text = spear(*command)
        assert code == 2
        assert "model.safetensors changed on disk" in text
    shutil.rmtree(model)
    code, text = spear("eval", tmp_path / "sft")
    assert code == 2
    assert "has no checkpoint yet" in text
    assert spear("sft", f"run.dir={tmp_path / 'sft'}", "run.resume=true")[0] == 0
    assert checked_manifest(model)


def copies(folder: Path) -> dict[str, bytes]:
    """What a user might put beside the checkpoints."""
    shutil.copytree(folder / "step_000004", folder / "step_000004_backup")
    shutil.copytree(folder / "step_000004", folder / "step_000007 (copy)")
    shutil.copytree(folder / "step_000002", folder / "step_000099")
    shutil.copytree(folder / "step_000004", folder / "step_0000004")
    (folder / "step_000006").write_text("notes")
    (folder / "step_000008").symlink_to("step_000004")
    (folder / "step_abc").mkdir()
    (folder / "step_").mkdir()
    (folder / "notes.txt").write_text("best so far: 4")
    ours = ("step_000002/", "step_000004/")
    return {name: content for name, content in contents(folder).items() if not name.startswith(ours)}


def test_copies_that_users_made_neither_break_a_resume_nor_are_deleted(spear, run, longer):
    folder = run / "checkpoints"
    theirs = copies(folder)
    assert [path.name for path in checkpoints(folder)] == ["step_000002", "step_000004"]
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 0, text
    assert_same_end(run, longer)
    left = contents(folder)
    assert left.pop("step_000006.kept-1") == b"notes" == theirs.pop("step_000006")
    assert theirs.items() <= left.items()
    assert (folder / "step_000008").is_symlink()
    assert spear("eval", run, "--tasks", "2")[0] == 0


def filled(folder: Path, rates: dict[int, float | None], keep: int = 2) -> list[str]:
    """Checkpoints saved one after the other with these successes; those that are left."""
    for step, success in rates.items():
        save_checkpoint(
            folder,
            step=step,
            save_model=lambda draft: (draft / "model.safetensors").write_bytes(b"x"),
            state={"step": step},
            evaluation=None if success is None else {"success": success},
            keep=keep,
        )
    return [path.name for path in checkpoints(folder)]


def test_the_best_evaluated_checkpoint_is_kept_beside_the_two_newest(tmp_path):
    rates = {0: 0.1, 1: 0.9, 2: 0.3, 3: None, 4: 0.9, 5: 0.2, 6: None, 7: 0.1}
    kept = {1: "01", 2: "12", 3: "123", 4: "34", 5: "45", 6: "456", 7: "467"}
    for step, success in rates.items():
        left = filled(tmp_path, {step: success})
        if step in kept:
            assert left == [f"step_{number:0>6}" for number in kept[step]]
    assert best_checkpoint(tmp_path).name == "step_000004"
    assert checked_manifest(tmp_path / "step_000004")["evaluation"] == {"success": 0.9}


def test_checkpoints_are_in_order_beyond_a_million_steps(tmp_path):
    assert filled(tmp_path, {999_998: 0.5, 1_000_000: 0.4, 1_000_001: 0.1}) == [
        "step_999998",
        "step_1000000",
        "step_1000001",
    ]


@pytest.mark.parametrize("rate", [1e30, 3e5])
def test_a_diverged_policy_is_not_saved_and_the_good_checkpoint_goes_on(spear, tmp_path, monkeypatch, rate):
    run = tmp_path / "run"
    code, text = spear("train", "lookup", f"run.dir={run}", *SMALL, *LONGER, "run.checkpoint_every=1")
    assert code == 0, text
    good = contents(run / "checkpoints")
    with monkeypatch.context() as patched:  # a rate at which any model breaks, and that no setting allows
        set_rate = HFEngine.set_learning_rate
        patched.setattr(HFEngine, "set_learning_rate", lambda engine, _: set_rate(engine, rate))
        code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=9")
    assert code == 2, text
    assert "step_000006 is saved" in text
    assert "smaller optim.learning_rate" in text
    assert contents(run / "checkpoints") == good
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=9", "optim.learning_rate=0.0005")
    assert code == 0, text
    assert len(logged(run)) == 9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2e4])
def test_weights_that_are_not_finite_or_too_large_are_refused(make_engine, value):
    from spear_rl.engines.base import NonFiniteLossError
    from spear_rl.train.loop import MAX_WEIGHT

    engine = make_engine()
    engine.check_weights(MAX_WEIGHT)
    list(engine.model.parameters())[3].data.view(-1)[5] = value
    with pytest.raises(NonFiniteLossError, match="was not saved"):
        engine.check_weights(MAX_WEIGHT)


# --- rows


def test_damaged_rows_are_reported_kept_aside_and_missing_ones_named(spear, run):
    path = run / "metrics.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(rows[0] + b"\xff\xfe{not a row\n" + rows[2] + rows[2] + rows[3][:20])
    code, text = spear("compare", run, "--out", run.parent / "out")
    assert code == 2
    assert "metrics.jsonl, line 2 is not valid UTF-8" in text
    code, text = spear("show", run)
    assert code == 0, text
    assert "metrics.jsonl, line 2 is not valid UTF-8" in text
    assert "step 2:" in text
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 0, text
    assert "metrics.jsonl, line 2 is not valid UTF-8" in text
    assert "metrics.jsonl lacks the rows of steps 1, 3;" in text
    assert [row["step"] for row in logged(run)] == [0, 2, 4, 5]
    assert (run / "metrics.jsonl.damaged").read_bytes() == b"\xff\xfe{not a row\n"
    code, text = spear("compare", run, "--out", run.parent / "out")
    assert code == 0, text
    assert "without the rows of steps 1, 3" in " ".join(text.split())


def test_a_half_line_at_the_end_of_a_run_is_left_out_by_all_readers(spear, run):
    for name in ("metrics.jsonl", "eval.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"step": 4, "rollout/succ')
    for command in (["show", run], ["compare", run, "--out", run.parent / "out"]):
        code, text = spear(*command)
        assert code == 0, text
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=5")
    assert code == 0, text
    assert ", line" not in text
    assert [row["step"] for row in logged(run)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"null\n", b"[1]\n", b'{"step": true}\n', b'{"step": 1.5}\n', b"\x00" * 99]
)
def test_any_bytes_are_read_as_rows_or_as_faults(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + content + b'\n{"step": 1}')
    found = read_rows(path)
    assert list(found.by_step) == [0, 1]
    assert len(found.faults) == bool(content.strip())
    mend_rows(path, from_step=9)
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'
    assert not read_rows(path).faults


def test_spans_are_short():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_rows_are_on_disk_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(f"-> {b}"), rename(a, b))[1])
    run = tmp_path / "run"
    train(load("lookup", [f"run.dir={run}", *SMALL, "run.steps=2"]))
    moved = done.index(f"-> {run / 'checkpoints' / 'step_000002'}")
    last = moved - done[:moved][::-1].index(str(run / "metrics.jsonl")) - 1
    start = done.index(f"-> {run / 'checkpoints' / 'step_000000'}")
    assert start < last < moved
    flushed = {Path(name).name for name in done[last:moved]}
    assert {"eval.jsonl", "run", "model.safetensors", "trainer_state.pt", "checkpoint.json", ".draft_000002"} <= flushed


def test_curves_are_written_for_tensorboard_to_read(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "board")
    for step in range(3):
        board(Event("step", step, metrics={"rollout/reward": step / 2, "name": "x"}))
    board(Event("eval", 3, metrics={"success": 0.5}))
    time.sleep(1.1)  # files are ordered by the second they were begun in
    TensorBoard(tmp_path / "board")(Event("step", 2, metrics={"rollout/reward": 9.0}))
    curves = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(e.step, e.value) for e in curves.Scalars("rollout/reward")] == [(0, 0.0), (1, 0.5), (2, 9.0)]


def test_the_cold_start_says_how_far_it_is_where_there_is_no_terminal(spear, tmp_path):
    code, text = spear(
        "sft", "lookup", f"run.dir={tmp_path / 'run'}", "sft.episodes=120", "sft.epochs=1", "eval.tasks=0"
    )
    assert code == 0, text
    assert sum(line.startswith("cold start ") for line in text.splitlines()) >= 10


def test_a_state_that_does_not_fit_is_a_sentence_and_writes_nothing(run):
    folder = run / "checkpoints" / "step_000004"
    state = torch.load(folder / "trainer_state.pt", weights_only=True)
    del state["algorithm"]["generators"]
    config = stored(run).config
    override(config, [f"run.dir={run}", "run.resume=true", "run.steps=6"])
    shutil.rmtree(folder)
    model = run / "checkpoints" / "step_000002"

    def save_model(draft: Path) -> None:
        for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, draft / name)

    save_checkpoint(
        run / "checkpoints", step=4, save_model=save_model, state=state, settings=settings_text(config, "train")
    )
    before = contents(run)
    with pytest.raises(CheckpointError, match="does not fit"):
        train_from(config)
    assert contents(run) == before
    assert issubclass(CheckpointError, UserError)
