"""The command line as a user meets it: whole runs, exact repeats, kills and mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import logged
from spear_rl.app.config import load, to_toml
from spear_rl.engines.hf import HFEngine

SMALL = [
    "run.steps=6",
    "run.checkpoint_every=2",
    "sft.episodes=32",
    "sft.epochs=1",
    "eval.tasks=8",
    "rollout.num_tasks=4",
]


def test_a_run_leaves_everything_behind(spear, tmp_path):
    run = tmp_path / "run"
    code, text = spear(
        "train", "lookup", f"run.dir={run}", *SMALL, "run.trajectories_every=2", "run.trajectories_format=jsonl"
    )
    assert code == 0, text
    assert "success after" in text
    summary = json.loads((run / "summary.json").read_text())
    assert summary["hardware"]["device"] == ("cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert (summary["algorithm"], summary["env"], summary["seed"], summary["steps"]) == (
        "spear-dr-grpo",
        "lookup",
        0,
        6,
    )
    for when in ("success_before", "success_after"):
        assert summary[when]["low"] <= summary[when]["success"] <= summary[when]["high"]
    assert {"sft", "step", "rollout", "update", "eval"} <= set(summary["seconds"])
    assert {"torch", "transformers", "spear_rl"} <= set(summary["versions"])
    assert [row["step"] for row in logged(run)] == list(range(6))
    assert [row["step"] for row in logged(run, "eval.jsonl")] == [0, 6]
    assert {"rollout/success", "policy/entropy", "replay/fired", "policy/turns_trained"} <= set(logged(run)[-1])
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_000004", "step_000006"]
    episode = json.loads((run / "trajectories" / "step_000002.jsonl").read_text().splitlines()[0])
    assert {"task", "success", "reward", "stop", "turns"} <= set(episode)
    assert list((run / "tensorboard").iterdir())

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "checkpoints" / "step_000006"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model(**tokenizer("red code ?", return_tensors="pt")).logits.shape[-1] >= len(tokenizer)

    code, text = spear("show", run)
    assert code == 0
    assert "lookup/train/" in text
    code, text = spear("eval", run, "--env", "lookup", "--split", "test", "--out", tmp_path / "eval.json")
    assert code == 0, text
    assert "95 % interval" in text
    result = json.loads((tmp_path / "eval.json").read_text())
    assert len(result["solved"]) == result["episodes"] == 16
    assert set(result["by_family"]) == {"red", "green", "blue", "gold"}
    code, text = spear("eval", folder, "--env", "lookup", "--split", "test", "--tasks", "4")
    assert code == 0, text


@pytest.mark.parametrize("name", ["dr-grpo", "spear-dr-grpo", "hgpo", "graphgpo", "g2po", "ppo", "spear-ppo"])
def test_the_lookup_preset_learns_in_seconds(spear, tmp_path, name):
    assert spear("train", "lookup", f"run.dir={tmp_path / 'run'}", f"algorithm.name={name}")[0] == 0
    success = [row["rollout/success"] for row in logged(tmp_path / "run")]
    assert sum(success[-5:]) / 5 > sum(success[:2]) / 2 + 0.1
    assert sum(success[-5:]) / 5 > 0.8


@pytest.mark.parametrize(
    "base",
    [
        "grpo",
        "dr-grpo",
        "rloo",
        "gigpo",
        "hgpo",
        "graphgpo",
        "g2po",
        "ppo",
        "dr-bot-grpo",
        "dr-bot-gigpo",
        "dr-bot-ppo",
    ],
)
def test_without_bonus_and_imitation_spear_is_its_base_bit_for_bit(spear, tmp_path, base):
    off = ["algorithm.bonus.mode=none", "algorithm.imitation.enabled=false"]
    for name, extra in ((base, []), (f"spear-{base}", off)):
        code, text = spear("train", "lookup", f"run.dir={tmp_path / name}", f"algorithm.name={name}", *SMALL, *extra)
        assert code == 0, text
    assert logged(tmp_path / base) == logged(tmp_path / f"spear-{base}")
    assert logged(tmp_path / base, "eval.jsonl") == logged(tmp_path / f"spear-{base}", "eval.jsonl")


def test_two_runs_of_one_seed_are_the_same_and_of_two_seeds_are_not(spear, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert spear("train", "lookup", f"run.dir={tmp_path / name}", f"run.seed={seed}", *SMALL)[0] == 0
    assert logged(tmp_path / "a") == logged(tmp_path / "b") != logged(tmp_path / "c")


@pytest.mark.parametrize("name", ["spear-grpo", "spear-dr-bot-gigpo", "spear-ppo"])
def test_a_killed_run_resumes_bit_for_bit(spear, tmp_path, name):
    settings = [*SMALL, "run.steps=11", "run.checkpoint_every=3", f"algorithm.name={name}", "run.seed=5"]
    settings += ["sft.episodes=128", "sft.epochs=4", "rollout.num_tasks=8", "algorithm.imitation.warm_steps=2"]
    settings += ["algorithm.covariance.low=0", "algorithm.covariance.on_policy=clip"]
    assert spear("train", "lookup", f"run.dir={tmp_path / 'whole'}", *settings)[0] == 0
    killed = tmp_path / "killed"
    # 400 steps, so that it cannot finish before the kill; the schedules are those of the whole run.
    command = [sys.executable, "-m", "spear_rl.cli", "train", "lookup", f"run.dir={killed}", *settings]
    command += ["algorithm.bonus.steps=11"]
    process = subprocess.Popen([*command, "run.steps=400"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics, deadline = killed / "metrics.jsonl", time.time() + 120
    while time.time() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 5):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = sorted((killed / "checkpoints").glob("step_*"))
    assert 0 < int(done[-1].name.removeprefix("step_")) < 11, "the kill came too late to show anything"
    code, text = spear("train", f"run.dir={killed}", "run.resume=true", "run.steps=11")
    assert code == 0, text
    assert logged(killed) == logged(tmp_path / "whole")
    assert logged(killed, "eval.jsonl") == logged(tmp_path / "whole", "eval.jsonl")
    assert any(row["replay/fired"] for row in logged(killed))


def test_a_run_killed_before_its_first_checkpoint_starts_over(spear, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(load("lookup", ["run.steps=2"])))
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / ".draft_000000").mkdir()
    code, text = spear(
        "train", "lookup", f"run.dir={run}", *SMALL, "run.resume=true", "run.steps=2", "rollout.max_turns=2"
    )
    assert code == 0, text
    assert len(logged(run)) == 2


MISTAKES = {
    "algorithm.name=gpro": "algorithm.name cannot be 'gpro'; did you mean grpo?",
    "algorithm.nmae=grpo": "unknown setting algorithm.nmae; did you mean algorithm.name?",
    "rolout.group_size=8": "unknown setting rolout.group_size; did you mean rollout.group_size?",
    "rollout.group_size=1": "rollout.group_size must be 2 or more",
    "rollout.group_size=-3": "rollout.group_size must be 2 or more",
    "rollout.group_size=many": "rollout.group_size takes a whole number; got 'many'",
    "task.env=atari": "task.env: there is no environment 'atari'; there are: alfworld, household, lookup",
    "task.options.max_tasks=0": "task.options leave no task in the train panel of lookup",
    "task.options.level=easy": "task.options.level: lookup has no such option; it has: num_digits",
    "engine.model=gpt-9": "engine.model: 'gpt-9' is no folder and no built-in model; built-in: tiny",
    "run.steps": "'run.steps' is neither a preset nor a file",
    "run.resume=true": "holds no run",
    "algorithm.bonus=3": "algorithm.bonus is a section",
    "algorithm.imitation.keep_step_part=true": "set algorithm.name to one with gigpo",
}


@pytest.mark.parametrize("setting", MISTAKES)
def test_a_mistake_is_one_sentence_that_says_what_to_do_and_exit_code_2(spear, tmp_path, setting):
    preset = [] if setting == "run.steps" else ["lookup"]
    code, text = spear("train", *preset, f"run.dir={tmp_path / 'run'}", *SMALL, setting)
    assert code == 2
    assert MISTAKES[setting] in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists(), "so that the corrected command can use the same folder"


def test_a_used_folder_is_never_overwritten(spear, tmp_path):
    assert spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, "run.steps=2")[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL)
    assert code == 2
    assert "run.resume=true to go on" in text
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_damaged_or_missing_checkpoint_is_named_and_nothing_is_lost(spear, tmp_path):
    run = tmp_path / "run"
    assert spear("train", "lookup", f"run.dir={run}", *SMALL, "run.steps=4")[0] == 0
    recorded = logged(run)
    weights = run / "checkpoints" / "step_000004" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 2
    assert "model.safetensors changed on disk; delete it to resume from step_000002" in text
    assert logged(run) == recorded
    code, text = spear("eval", run, "--env", "lookup")
    assert code == 2
    assert "model.safetensors changed on disk" in text
    (weights.parent / "checkpoint.json").unlink()
    code, text = spear("eval", run, "--env", "lookup")
    assert code == 2
    assert "does not load as a transformers model" in text
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 2
    assert "step_000004 is damaged" in text
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=6")
    assert code == 2
    assert "its checkpoints/ is gone" in text
    assert logged(run) == recorded


@pytest.fixture
def runaway(monkeypatch):
    """A rate at which any model breaks, and that no setting allows."""
    set_rate = HFEngine.set_learning_rate
    monkeypatch.setattr(HFEngine, "set_learning_rate", lambda engine, rate: set_rate(engine, 1e30))


def test_a_loss_that_is_not_finite_stops_with_advice_and_keeps_the_checkpoint(spear, tmp_path, runaway):
    run = tmp_path / "run"
    code, text = spear(
        "train", "lookup", f"run.dir={run}", *SMALL, "sft.episodes=0", "run.steps=20", "run.checkpoint_every=1"
    )
    assert code == 2, text
    assert "smaller optim.learning_rate" in text
    assert list((run / "checkpoints").glob("step_*"))


def test_a_cold_start_that_runs_away_says_which_rate_to_lower(spear, tmp_path, runaway):
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL)
    assert code == 2, text
    assert "lower sft.learning_rate" in text or "smaller optim.learning_rate" in text


def test_a_cold_start_alone_writes_a_model_that_training_starts_from(spear, tmp_path):
    code, text = spear("sft", "lookup", f"run.dir={tmp_path / 'sft'}", *SMALL)
    assert code == 0, text
    model = tmp_path / "sft" / "model"
    assert json.loads((tmp_path / "sft" / "summary.json").read_text())["algorithm"] == "sft"
    settings = [f"run.dir={tmp_path / 'rl'}", *SMALL, "sft.episodes=0", f"engine.model={model}", "run.steps=2"]
    assert spear("train", "lookup", *settings)[0] == 0
    assert spear("sft", "lookup", f"run.dir={tmp_path / 'x'}", "sft.episodes=0")[0] == 2


def test_a_saved_config_reproduces_its_run(spear, tmp_path):
    assert spear("train", "lookup", f"run.dir={tmp_path / 'a'}", *SMALL)[0] == 0
    assert spear("train", tmp_path / "a" / "config.toml", f"run.dir={tmp_path / 'b'}")[0] == 0
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_runs_compare_side_by_side(spear, tmp_path):
    for name in ("grpo", "spear-grpo"):
        for seed in (0, 1):
            where = f"run.dir={tmp_path / f'{name}-{seed}'}"
            assert spear("train", "lookup", where, f"algorithm.name={name}", f"run.seed={seed}", *SMALL)[0] == 0
    runs = sorted(tmp_path.glob("*grpo-*"))
    code, text = spear("compare", *runs, "--out", tmp_path / "out")
    assert code == 0, text
    assert "spear-grpo" in text
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "command", [["--help"], ["train", "--help"], ["list"], ["show", "config"], ["show", "quickstart"]]
)
def test_help_lists_and_settings_are_printed(spear, command):
    code, text = spear(*command)
    assert code == 0
    assert len(text) > 100


def test_the_kl_term_compares_with_the_cold_started_policy_after_resuming_too(spear, tmp_path):
    settings = [*SMALL, "algorithm.kl=0.1", "algorithm.name=grpo"]
    assert spear("train", "lookup", f"run.dir={tmp_path / 'whole'}", *settings)[0] == 0
    part = tmp_path / "part"
    assert spear("train", "lookup", f"run.dir={part}", *settings, "run.steps=4")[0] == 0
    assert spear("train", f"run.dir={part}", "run.resume=true", "run.steps=6")[0] == 0
    assert logged(part) == logged(tmp_path / "whole")
    assert logged(part)[-1]["policy/reference_kl"] > 0


def test_the_environment_side_starts_without_torch():
    code = "import sys, spear_rl.envs, spear_rl.rollout, spear_rl.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_a_missing_extra_is_named_with_the_command_that_installs_it():
    code = "import sys; sys.modules['typer'] = None; import spear_rl.cli"
    result = subprocess.run([sys.executable, "-c", code], env=os.environ, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert "pip install 'spear-rl[train]'" in result.stderr


def test_the_core_needs_torch_alone():
    block = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'rich', 'typer', 'matplotlib', 'tensorboard']))"
    )
    use = "from spear_rl.algorithms import *; from spear_rl.train.step import train_step; spear(dr_bot(gigpo()))"
    assert subprocess.run([sys.executable, "-c", f"{block}\n{use}"], env=os.environ, check=False).returncode == 0
