"""`spear verl` without verl: the translation of settings, the files it writes, and what it says when it cannot run."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from spear_rl.app.config import load
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.integrations.shared import requirements
from spear_rl.integrations.verl import launch

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("task", ["alfworld", "webshop", "math"])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B"])
def test_the_papers_presets_are_configurations_that_verl_can_be_given(task, model):
    config = load(f"paper-{task}", [f"engine.model={model}"])
    keys = launch.verl_settings(config, Path("runs"), {"trainer.n_gpus_per_node": "8"})
    assert keys["trainer.v1.trainer_mode"] == "spear"
    assert keys["actor_rollout_ref.model.path"] == model
    assert (keys[f"{ACTOR}.clip_ratio_low"], keys[f"{ACTOR}.clip_ratio_high"]) == (0.2, 0.28)
    assert keys[f"{ACTOR}.clip_ratio_c"] == 10.0
    assert keys["trainer.n_gpus_per_node"] == "8"
    json.dumps(keys)


@pytest.mark.parametrize("layout", ["chat", "turns"])
def test_mini_batches_are_the_same_share_of_the_tasks_in_every_layout(layout):
    settings = ["engine.model=a/b", "rollout.num_tasks=12", "optim.num_minibatches=3", f"rollout.layout={layout}"]
    keys = launch.verl_settings(load(None, settings), Path("runs"), {})
    assert keys["data.train_batch_size"] // keys[f"{ACTOR}.ppo_mini_batch_size"] == 3


def test_each_reduction_has_its_name_in_verl():
    dr_bot = launch.verl_settings(
        load(None, ["engine.model=a/b", "rollout.layout=turns", "rollout.max_new_tokens=33"]), Path("runs"), {}
    )
    assert (dr_bot[f"{ACTOR}.loss_agg_mode"], dr_bot[f"{ACTOR}.loss_scale_factor"]) == ("seq-mean-token-sum-norm", 33)
    grpo = launch.verl_settings(load(None, ["engine.model=a/b", "algorithm.name=grpo"]), Path("runs"), {})
    assert (grpo[f"{ACTOR}.loss_agg_mode"], grpo[f"{ACTOR}.loss_scale_factor"]) == ("seq-mean-token-mean", None)
    by_tokens = ["engine.model=a/b", "algorithm.name=grpo", "algorithm.reduction=token_mean"]
    assert launch.verl_settings(load(None, by_tokens), Path("runs"), {})[f"{ACTOR}.loss_agg_mode"] == "token-mean"


def test_verl_validates_with_the_samples_and_the_top_p_of_an_evaluation():
    where = "actor_rollout_ref.rollout.val_kwargs"
    given = ["engine.model=a/b", "rollout.top_p=0.9", "eval.samples=4"]
    own = launch.verl_settings(load(None, [*given, "eval.top_p=0.6"]), Path("runs"), {})
    assert (own[f"{where}.n"], own[f"{where}.top_p"]) == (4, 0.6)
    assert launch.verl_settings(load(None, given), Path("runs"), {})[f"{where}.top_p"] == 0.9


def test_files_and_checkpoints_go_into_the_runs_folder():
    keys = launch.verl_settings(load(None, ["engine.model=a/b"]), Path("/data/run"), {})
    assert keys["+spear.file"] == "/data/run/config.toml"
    assert keys["trainer.default_local_dir"] == "/data/run/checkpoints"


@pytest.mark.parametrize(
    ("settings", "theirs", "sentence"),
    [
        (["engine.model=some/model", "rollout.num_tasks=6", "rollout.group_size=3"], {"trainer.nnodes": "4"}, "4 GPUs"),
        (["engine.model=some/model", "rollout.num_tasks=6", "optim.num_minibatches=4"], {}, "do not divide"),
        (["engine.model=tiny"], {}, "transformers folder"),
        (["engine.model=some/model", "sft.episodes=3"], {}, "no cold start"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(settings, theirs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        launch.verl_settings(load(None, settings), Path("runs"), theirs)


def test_the_block_spear_holds_settings_of_ours_over_those_of_its_file(tmp_path):
    (tmp_path / "a.toml").write_text('[algorithm]\nname = "spear-grpo"\ninvalid_penalty = 0.5\n')
    config = launch.config_of({"file": str(tmp_path / "a.toml"), "algorithm": {"invalid_penalty": 0.2}})
    assert (config.algorithm.name, config.algorithm.invalid_penalty) == ("spear-grpo", 0.2)


def test_a_run_without_the_block_is_told_how_to_add_it():
    with pytest.raises(ConfigError, match=r"\+spear\.algorithm\.name"):
        launch.config_of(None)


@pytest.mark.parametrize("covariance", [{"replay": "kl"}, {"on_policy": "clip"}])
def test_what_verl_cannot_do_is_refused(covariance):
    with pytest.raises(ConfigError, match="replay is clip or none"):
        launch.config_of({"algorithm": {"covariance": covariance}})


def test_the_task_files_name_every_task_once(tmp_path):
    config = load("lookup", ["engine.model=some/model", "eval.tasks=3"])
    launch.write_files(config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["extra_info"]["index"] for line in lines] == list(range(64))
    assert {line["agent_name"] for line in lines} == {"spear"}
    assert len((tmp_path / "validation.jsonl").read_text().splitlines()) == 3
    assert launch.config_of({"file": str(tmp_path / "config.toml")}) == config


def installed(monkeypatch, version: str | None) -> None:
    found = [] if version is None else [SimpleNamespace(version=version)]
    monkeypatch.setattr(requirements.metadata, "distributions", lambda name: found)


def test_a_missing_extra_is_one_sentence(monkeypatch):
    installed(monkeypatch, None)
    with pytest.raises(MissingExtraError, match=r"^verl is not installed: pip install 'spear-rl\[verl\]'$"):
        launch.checked()


@pytest.mark.parametrize("version", ["0.8.9", "0.9.0", "0.10.0", "1.0"])
def test_a_wrong_version_is_one_sentence(monkeypatch, version):
    installed(monkeypatch, version)
    with pytest.raises(ConfigError, match=rf"^verl {version} is not supported: pip install 'verl>=0\.9\.1,<0\.10'$"):
        launch.checked()


@pytest.mark.parametrize("version", ["0.9.1", "0.9.2.dev1", "0.9.10"])
def test_a_right_version_is_taken(monkeypatch, version):
    installed(monkeypatch, version)
    assert requirements.require_version("verl", (0, 9, 1), (0, 10)) == version


def test_names_that_are_gone_are_named():
    requirements.require_names("torch", ["torch.nn.Module.forward", "json.dumps"])
    with pytest.raises(ConfigError, match=r"torch .* has no json\.no_such, no_such_package\.x: pip install"):
        requirements.require_names("torch", ["json.dumps", "json.no_such", "no_such_package.x"])


def test_the_command_line_checks_and_complains(spear, monkeypatch):
    if any(metadata.distributions(name="verl")):
        pytest.skip("verl is here")
    assert spear("verl", "--check") == (2, "error: verl is not installed: pip install 'spear-rl[verl]'\n")
    code, said = spear("verl", "lookup", "engine.model=a/b", "sft.episodes=0", "--", "trainer.nnodes=3")
    assert code == 2
    assert "do not divide" in said


def test_the_command_line_becomes_verl_with_its_words_after_ours(spear, monkeypatch, tmp_path):
    started = []

    def become(program, arguments):
        started.append(arguments)
        sys.exit(0)

    monkeypatch.setattr(launch, "checked", lambda: "fine")
    monkeypatch.setattr(launch.os, "execv", become)
    ours = ["lookup", "engine.model=a/b", "sft.episodes=0", f"run.dir={tmp_path}"]
    code, said = spear("verl", *ours, "--", "trainer.n_gpus_per_node=2", "+new.key=[1]", "--cfg", "job")
    assert (code, said) == (0, "fine\n")
    [[_, flag, module, *words]] = started
    assert (flag, module) == ("-m", "verl.trainer.main_ppo")
    assert {"trainer.n_gpus_per_node=2", "+new.key=[1]", "--cfg", "job", 'actor_rollout_ref.model.path="a/b"'} <= {
        *words
    }
    assert words.index("--cfg") + 1 == words.index("job")
    assert (tmp_path / "train.jsonl").exists()
