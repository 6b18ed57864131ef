"""What a newcomer types first: other programs' options, the wrong kind of environment, missing games."""

import os
import subprocess
import sys

import pytest

from spear_rl.app.config import Config, flat, load
from spear_rl.errors import ConfigError
from spear_rl.settings.fields import OTHER_NAMES, meant

KEYS = list(flat(Config()))

GYM = """
class Game:
    metadata = {}
    def reset(self, *, seed=None, options=None):
        return 0, {}
    def step(self, action):
        return 0, 1.0, True, False, {}

class Own:
    def reset(self): ...
    def step(self, action): ...

game = Game()
"""


def test_every_name_from_another_program_leads_to_a_setting_that_exists():
    assert set(OTHER_NAMES.values()) <= set(KEYS)
    assert not set(OTHER_NAMES) & set(KEYS)


@pytest.mark.parametrize("key", sorted({key.split(".")[-1] for key in KEYS if not key.startswith("task.options")}))
def test_the_last_word_of_a_setting_alone_leads_to_it(key):
    if key not in OTHER_NAMES:
        assert any(f"{k}" in meant(key, KEYS) for k in KEYS if k.split(".")[-1] == key)
        assert meant(key.replace("_", "-"), KEYS) == meant(key, KEYS)


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["--seed", "1"], "run.seed"),
        (["--seed=1"], "run.seed"),
        (["--lr", "1e-4"], "optim.learning_rate"),
        (["--learning-rate=1"], "optim.learning_rate or algorithm.ppo.learning_rate or sft.learning_rate"),
        (["-n", "4"], "rollout.group_size"),
        (["lr=1e-4"], "optim.learning_rate"),
        (["optim.lr=1e-4"], "optim.learning_rate"),
        (["env=lookup"], "task.env"),
        (["model=tiny"], "engine.model"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "sft", "doctor"])
def test_an_option_of_another_program_is_answered_with_our_setting(spear, verb, words, right):
    code, text = spear(verb, "lookup", *words)
    assert code == 2
    assert f"did you mean {right}?" in text
    assert "Traceback" not in text


def test_an_unknown_option_says_how_settings_are_written(spear):
    code, text = spear("train", "lookup", "--qqqq")
    assert code == 2
    assert "there is no option --qqqq: settings are written section.key=value" in text


def test_help_is_still_help(spear):
    code, text = spear("train", "--help")
    assert code == 0
    assert "spear train quickstart run.seed=1" in text


@pytest.mark.parametrize("name", ["Game", "Own", "game"])
@pytest.mark.parametrize("command", [["check-env"], ["train"]])
def test_an_environment_class_in_place_of_its_tasks_is_one_sentence(spear, tmp_path, monkeypatch, command, name):
    (tmp_path / "gym_like.py").write_text(GYM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "gym_like", raising=False)
    target = f"gym_like:{name}"
    code, text = spear(*command, target if command == ["check-env"] else f"task.env={target}")
    assert code == 2
    assert "Traceback" not in text
    assert ("def tasks(split)" if name != "game" else "is no function but Game") in text
    assert ("a Gymnasium environment" in text) == (name == "Game")


def test_the_doctor_says_that_the_games_are_missing_and_how_to_get_them(spear, monkeypatch, tmp_path):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    code, text = spear("doctor", "alfworld-smollm2", "engine.device=cpu")
    assert code == 0
    assert "no tasks to play" in text
    assert "ALFWORLD_DATA" in text
    code, text = spear("doctor", "lookup")
    assert code == 0
    assert "no tasks to play" not in text
    assert "lookup: 64 train, 16 validation" in text


def test_verl_with_the_readmes_placeholder_says_what_a_model_is():
    from spear_rl.integrations.verl.launch import verl_settings

    with pytest.raises(ConfigError, match="'FOLDER' is no folder"):
        verl_settings(load("paper-alfworld", ["engine.model=FOLDER"]), None, {})


@pytest.mark.parametrize(
    ("words", "offered"),
    [("train quick", "quickstart"), ("train run.se", "run.seed="), ("doctor engine.mod", "engine.model=")],
)
def test_a_shell_completes_presets_and_settings(words, offered):
    code = "import sys; sys.argv = ['spear']; from spear_rl.cli import main; main()"
    asked = {"_SPEAR_COMPLETE": "complete_bash", "COMP_WORDS": f"spear {words}", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, timeout=120
    )
    assert offered in done.stdout.split()
