"""A user's own engine and model by name, and `check_engine` for their authors."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from conftest import logged
from outside_package import model as outside_model
from outside_package.engine import PlainEngine, half
from spear_rl.app.build.training import engine_of
from spear_rl.app.config import load
from spear_rl.cli.train import frozen_start
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.errors import ConfigError
from spear_rl.rollout import Sampling
from spear_rl.testing import check_engine
from spear_rl.train.callbacks import Event
from spear_rl.types import Completion

SMALL = ["lookup", "sft.episodes=8", "sft.epochs=1", "eval.tasks=4", "rollout.num_tasks=2", "run.checkpoint_every=1"]
SMALL += ["algorithm.bonus.steps=2"]  # of the whole run, also where it is cut in two
ENGINE, MODEL = "engine.name=outside_package.engine:make", "engine.model=outside_package.model:make"


@pytest.mark.parametrize("settings", [[ENGINE, "engine.model=tiny-xs"], [MODEL], [ENGINE, MODEL, "algorithm.kl=0.1"]])
def test_an_outside_package_brings_an_engine_and_a_model_and_trains_with_them(spear, tmp_path, settings):
    whole, run = tmp_path / "whole", tmp_path / "run"
    code, text = spear("train", *SMALL, f"run.dir={whole}", "run.steps=2", *settings)
    assert code == 0, text
    assert all(("policy/outside" in row) == (ENGINE in settings) for row in logged(whole))
    code, text = spear("train", *SMALL, f"run.dir={run}", "run.steps=1", *settings)
    assert code == 0, text
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=2")
    assert code == 0, text
    assert logged(run) == logged(whole), "resuming is exact"
    code, text = spear("eval", run, "--tasks", "2")
    assert code == 0, text


def test_a_model_from_outside_takes_an_adapter_and_resumes_with_it(spear, tmp_path):
    pytest.importorskip("peft")
    run = tmp_path / "run"
    settings = [*SMALL, f"run.dir={run}", "engine.lora_rank=2", "sft.episodes=0"]
    code, text = spear("train", *settings, "run.steps=1", MODEL)
    assert code == 0, text
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=2")
    assert code == 0, text
    assert len(logged(run)) == 2


def test_an_adapters_folder_cannot_name_code_to_run(spear, tmp_path):
    pytest.importorskip("peft")
    run, stolen = tmp_path / "run", tmp_path / "stolen"
    code, text = spear("train", *SMALL, f"run.dir={run}", "engine.lora_rank=2", "run.steps=1")
    assert code == 0, text
    (run / "checkpoints" / "step_000001").rename(stolen)
    (stolen / "checkpoint.json").unlink()
    config = json.loads((stolen / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "outside_package.model:make"
    (stolen / "adapter_config.json").write_text(json.dumps(config))
    code, text = spear("train", *SMALL, f"run.dir={tmp_path / 'other'}", f"engine.model={stolen}")
    assert code == 2, text
    assert "'outside_package.model:make' is no folder and no built-in model" in text


def test_garbage_is_not_collected_while_a_model_loads_and_is_again_also_if_that_fails(monkeypatch):
    found = []

    def raises():
        found.append(gc.isenabled())
        raise OSError("no disk")

    monkeypatch.setattr(outside_model, "raises", raises)
    with pytest.raises(ConfigError, match="no disk"):
        engine_of(load("lookup", ["engine.model=outside_package.model:raises"]))
    assert found == [False]
    assert gc.isenabled()


def test_what_the_first_step_leaves_is_not_collected_until_the_run_ends():
    with frozen_start() as freeze:
        freeze(Event("eval", 0))
        assert gc.get_freeze_count() == 0, "compilation is still to come"
        freeze(Event("step", 0))
        count = gc.get_freeze_count()
        assert count > 10_000
        later = [[] for _ in range(1000)]
        freeze(Event("step", 1))
        assert gc.get_freeze_count() <= count, f"not {len(later)} objects more"
    assert gc.get_freeze_count() == 0


WRONG = {
    "engine.name=vllm": "engine.name cannot be 'vllm'; it is one of: hf; or your own: package.module:function",
    "engine.name=outside_package.engine:no": "the module outside_package.engine has no no",
    "engine.name=outside_package.engine:raises": "calling it raised RuntimeError: no such cluster",
    "engine.name=outside_package.engine:half": "it returned Half, which lacks check_weights, evaluation_generator",
    "engine.model=outside_package.model:no": "the module outside_package.model has no no",
    "engine.model=no_such_package:make": "there is no module no_such_package",
    "engine.model=outside_package.model:raises": "raised OSError: the disk with the weights is not mounted",
    "engine.name=outside_package.engine:leaves": "calling it raised SystemExit",
    "engine.model=outside_package.model:leaves": "calling it raised SystemExit",
    "engine.model=outside_package.model:tensors": "it returned tuple, not (model, tokenizer) of transformers",
    "engine.model=outside_package.model:alone": "it returned OwnLlama, not (model, tokenizer)",
}


@pytest.mark.parametrize("setting", WRONG)
def test_what_is_wrong_with_an_outside_engine_or_model_is_one_sentence(spear, tmp_path, setting):
    code, text = spear("train", *SMALL, f"run.dir={tmp_path / 'run'}", "engine.model=tiny-xs", setting)
    assert code == 2
    assert WRONG[setting] in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_the_engine_of_a_run_cannot_change(spear, tmp_path):
    run = f"run.dir={tmp_path / 'run'}"
    assert spear("train", *SMALL, run, "run.steps=1", "engine.model=tiny-xs")[0] == 0
    code, text = spear("train", run, "run.resume=true", "run.steps=2", ENGINE)
    assert (code, "engine.name" in text) == (2, True)


def test_names_of_engines_are_known_without_importing_torch():
    script = "import sys; from spear_rl.engines import ENGINES; assert 'hf' in ENGINES; "
    script += "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_doctor_knows_a_model_from_outside(spear):
    code, text = spear("doctor", MODEL, "engine.device=cpu")
    assert code == 0, text


@pytest.fixture
def engine(tokenizer) -> PlainEngine:
    return PlainEngine(tiny_model("tiny-xs", tokenizer, seed=0), tokenizer, sampling=Sampling(max_new_tokens=4))


@pytest.mark.parametrize("packed", [False, True])
def test_our_engine_and_one_from_outside_pass_the_check(make_engine, engine, packed):
    assert check_engine(make_engine(packed=packed)) == []
    assert check_engine(engine) == []


def test_the_check_says_what_an_engine_lacks():
    assert "it lacks check_weights, evaluation_generator" in check_engine(half())[0]


FAULTS = {
    "generate: it returned 0 completions for 2 prompts": ("generate", lambda *_: []),
    "generate: it must return a list of Completion": ("generate", lambda *_: [1, 2]),
    "generate: a completion must have at least one token, and one log-probability per token": (
        "generate", lambda *_: [Completion([5], [-1.0]), Completion([5, 6], [-1.0])],
    ),
    "generate: log-probabilities must be finite and at most 0": (
        "generate", lambda *_: [Completion([5], [float("nan")]), Completion([5], [0.5])],
    ),
    "update: generate and scored give a token different log-probabilities": (
        "generate", lambda *_: [Completion([5], [-0.1]), Completion([6], [-0.1])],
    ),
    "update: the log-probability of the trained tokens did not rise": ("update", lambda *_: {"loss": 1.0}),
    "update: it must return finite numbers by name": ("update", lambda *_: {"loss": float("nan")}),
    "update raised RuntimeError: broken": ("update", lambda *_: (_ for _ in ()).throw(RuntimeError("broken"))),
    "save: it wrote nothing": ("save", lambda *_: None),
    "save raised": ("state_dict", lambda *_: {"engine": object()}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_every_fault(engine, monkeypatch, fault):
    name, method = FAULTS[fault]
    monkeypatch.setattr(engine, name, method)
    assert any(fault in found for found in check_engine(engine))
