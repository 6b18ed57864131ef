"""Files that would run code: a pickle, or Python beside a model, in every place a run reads; none of it ever runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from spear_rl.algorithms import grpo, spear
from spear_rl.engines.models.load import model_by_name, model_in_folder
from spear_rl.engines.models.lora import adapter_base
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.errors import CheckpointError, ConfigError
from spear_rl.integrations.shared import state_file
from spear_rl.integrations.shared.episodes import from_json, to_json
from spear_rl.train.checkpoint import MANIFEST, STATE, checked_step
from spear_rl.train.stored_state import stored_state
from spear_rl.types import Completion, Stop, Trajectory, Turn

ROOT = Path(__file__).parent.parent


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._proof),)


@pytest.fixture
def proof(tmp_path) -> Path:
    """A folder that is there once code has run."""
    return tmp_path / "proof"


def bare(path: Path, payload: Payload) -> None:
    path.write_bytes(pickle.dumps({"algorithm": payload}))


def zipped(path: Path, payload: Payload) -> None:
    torch.save({"algorithm": {"imitation": payload}, "rng": payload, "weight": torch.zeros(2)}, path)


def legacy(path: Path, payload: Payload) -> None:
    torch.save({"spear": payload}, path, _use_new_zipfile_serialization=False)


def cut(path: Path, payload: Payload) -> None:
    zipped(path, payload)
    path.write_bytes(path.read_bytes()[:-30])


def scripted(path: Path, payload: Payload) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
        archive.writestr("archive/version", "3")


FORMS = [bare, zipped, legacy, cut, scripted]


def test_the_payload_would_run(tmp_path, proof):
    zipped(tmp_path / "x.pt", Payload(proof))
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert proof.exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_hostile_state_beside_a_frameworks_checkpoint_is_refused(tmp_path, proof, form):
    form(tmp_path / state_file.FILE, Payload(proof))
    with pytest.raises(CheckpointError, match=r"spear\.pt is not loaded"):
        state_file.restore(tmp_path, spear(grpo()), random.Random(0))
    assert not proof.exists()


@pytest.mark.parametrize("state", [[], {}, {"algorithm": 5, "rng": ()}, {"algorithm": {"imitation": {"buffer": 1}}}])
def test_a_state_that_is_plain_and_wrong_is_a_checkpoint_error_too(tmp_path, state):
    torch.save(state, tmp_path / state_file.FILE)
    with pytest.raises(CheckpointError, match=r"spear\.pt (does not fit this run|holds no state)"):
        state_file.restore(tmp_path, spear(grpo()), random.Random(0))


def test_what_was_saved_comes_back(tmp_path):
    algorithm, rng = spear(grpo()), random.Random(3)
    state_file.save(tmp_path, algorithm, rng)
    other = random.Random(4)
    state_file.restore(tmp_path, spear(grpo()), other)
    assert other.random() == rng.random()
    assert set(stored_state(tmp_path / state_file.FILE)) == {"algorithm", "rng"}


def resign(checkpoint: Path) -> None:
    """Whoever can change a checkpoint can change its digests."""
    files = sorted(path for path in checkpoint.iterdir() if path.name != MANIFEST)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    step = json.loads((checkpoint / MANIFEST).read_text())["step"]
    (checkpoint / MANIFEST).write_text(json.dumps({"step": step, "sha256": digests}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = ["run.steps=2", "run.checkpoint_every=1", "sft.episodes=0", "eval.tasks=0", "engine.model=tiny-xs"]
    said = command(
        "train", "lookup", f"run.dir={folder}", "algorithm.name=spear-grpo", "rollout.num_tasks=2", *settings
    )
    assert said.returncode == 0, said.stderr
    return folder


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spear_rl.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        timeout=500,
    )


def refused(*arguments: object) -> str:
    said = command(*arguments)
    assert said.returncode == 2, said.stdout + said.stderr
    assert "Traceback" not in said.stderr
    assert said.stderr.startswith("error: ")
    return said.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", [zipped, legacy])
def test_no_file_of_a_checkpoint_runs_code_when_a_run_is_resumed_or_evaluated(finished, tmp_path, proof, form):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    form(newest / STATE, Payload(proof))
    resign(newest)
    assert f"{STATE} is not loaded" in refused("train", f"run.dir={run}", "run.resume=true", "run.steps=3")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (newest / "model.safetensors").unlink(missing_ok=True)
        form(newest / name, Payload(proof))
        resign(newest)
        assert "does not load as a transformers model" in refused("eval", run, "--tasks", 1)
        (newest / name).unlink()
    assert not proof.exists()


@pytest.mark.slow
def test_a_resumed_state_that_is_plain_and_wrong_is_one_sentence(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    whole = torch.load(newest / STATE, weights_only=True)
    for broken in (
        whole | {"engine": {}},
        whole | {"rng": [1]},
        whole | {"algorithm": {"imitation": 3, "generators": []}},
    ):
        torch.save(broken, newest / STATE)
        resign(newest)
        assert "does not fit this run" in refused("train", f"run.dir={run}", "run.resume=true", "run.steps=3")


@pytest.mark.parametrize(
    "manifest",
    ["[]", "7", '{"step": 1}', '{"step": 1, "sha256": []}', '{"step": 1, "sha256": 5}', "[" * 100_000,
     '{"step": 1, "sha256": {"/dev/zero": "0"}}', '{"step": 1, "sha256": {"../x": "0"}}',
     '{"step": "x", "sha256": {}}'],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_hostile_manifest_is_a_checkpoint_error(tmp_path, manifest):
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "x").write_text("")
    (tmp_path / "step_000001" / MANIFEST).write_text(manifest)
    with pytest.raises(CheckpointError, match="is damaged"):
        checked_step(tmp_path / "step_000001")


@pytest.fixture
def model_folder(tmp_path, tokenizer) -> Path:
    folder = tmp_path / "model"
    tiny_model("tiny-xs", tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_hostile_weights_of_a_model_do_not_run(model_folder, proof, form, name):
    (model_folder / "model.safetensors").unlink()
    form(model_folder / name, Payload(proof))
    with pytest.raises(ConfigError, match="does not load as a transformers model"):
        model_in_folder(model_folder)
    assert not proof.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_hostile_weights_of_an_adapter_do_not_run(tmp_path, tokenizer, proof, form, name):
    settings = {"peft_type": "LORA", "base_model_name_or_path": "tiny-xs:0", "r": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(tmp_path)
    form(tmp_path / name, Payload(proof))
    with pytest.raises(ConfigError, match=r"the adapter in .* does not load"):
        model_by_name(str(tmp_path), texts=list, seed=0)
    assert not proof.exists()


def test_an_adapter_that_has_a_module_imported_or_lies_on_itself_is_refused(tmp_path):
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        settings = {"base_model_name_or_path": str(tmp_path / base), "r": 1}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="lies on itself"):
        model_by_name(str(tmp_path / "a"), texts=list, seed=0)
    (tmp_path / "a" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "tiny:0", "r": 1, "megatron_config": {"x": 1}, "megatron_core": "this"})
    )
    with pytest.raises(ConfigError, match="megatron_config"):
        adapter_base(tmp_path / "a")


CODE = """
import os
os.mkdir({proof!r})
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_kind"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_own_code(folder: Path, proof: Path) -> Path:
    (folder / "own.py").write_text(CODE.format(proof=str(proof)))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_kind",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_code_beside_a_model_is_refused_in_one_sentence_without_a_question(model_folder, proof):
    with_own_code(model_folder, proof)
    for arguments in (
        ["eval", model_folder, "--env", "lookup", "--tasks", 1],
        ["train", "lookup", f"engine.model={model_folder}", f"run.dir={proof}.run"],
        ["doctor", f"engine.model={model_folder}"],
    ):
        said = refused(*arguments)
        assert "brings Python code of its own" in said
        assert "engine.trust_remote_code=true" in said
    assert not proof.exists()


@pytest.mark.slow
def test_code_beside_a_model_runs_when_it_is_allowed_with_one_warning(model_folder, proof):
    with_own_code(model_folder, proof)
    allowed = ["--set", "engine.trust_remote_code=true", "--set", "rollout.max_new_tokens=2"]
    said = command("eval", model_folder, "--env", "lookup", "--tasks", 1, *allowed)
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("engine.trust_remote_code is on") == 1
    assert proof.exists()


def test_code_beside_a_tokenizer_does_not_run(model_folder, proof):
    settings = json.loads((model_folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (model_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (model_folder / "own.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n")
    with suppress(ConfigError):  # a version of transformers may take the plain tokenizer.json instead
        model_in_folder(model_folder)
    assert not proof.exists()


def test_an_episode_goes_to_verls_trainer_and_back_without_a_pickle():
    completion = Completion([1, 2], [-0.1, float("-inf")], True, [0.5, 1.0])
    turn = Turn([3], completion, 0.1, "\ud800key", True, "bad", "\x1bseen", "said", 0.25, (b"\x89PNG\x00",))
    episode = Trajectory([turn], Stop.OVERLONG, bonus=0.3, success=True, metrics={"m": 1.5})
    assert from_json(to_json("task", "family", episode)) == ("task", "family", episode)
    with pytest.raises(UnicodeDecodeError):
        from_json(pickle.dumps(("task", "family", episode)))


def test_no_line_of_ours_loads_a_pickle_that_others_may_have_written():
    """The exceptions: pipes of workers and agents, from the trainer that started them, and what checks this."""
    found = set()
    for path in (ROOT / "src" / "spear_rl").rglob("*.py"):
        text = path.read_text()
        if "pickle.load" in text:
            found.add(path.name)
        for word in (
            "weights_only=False",
            "allow_pickle=True",
            "joblib",
            "yaml.load",
            "marshal.load",
            "trust_remote_code=None",
        ):
            assert word not in text, path
        for number, line in enumerate(text.splitlines()):
            after = "".join(text.splitlines()[number : number + 6])
            if "torch.load(" in line:
                assert "weights_only=True" in after, path
            if (".from_pretrained(" in line and "Peft" not in line) or ".from_config(" in line:
                assert "trust_remote_code=" in after, path
    assert found == {"worker.py", "launcher.py", "checks.py"}


def test_pyarrow_is_one_that_runs_no_code():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = [need for needs in extras.values() for need in needs if need.startswith("pyarrow")]
    assert set(bounds) == {"pyarrow>=17"}  # safe from 14.0.1 on
