"""From nothing to an environment, algorithm and settings of one's own: `spear init`, presets, warnings."""

from __future__ import annotations

import itertools
import json
import keyword
import os
import string
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.app.build.cautions import STEPS, RewardWatch, cautions
from spear_rl.app.build.rollout import tasks_of
from spear_rl.app.config import load, presets
from spear_rl.app.init import begin
from spear_rl.envs import ENVIRONMENTS
from spear_rl.errors import ConfigError, UserError
from spear_rl.train.callbacks import Event
from spear_rl.train.checkpoint import MANIFEST

SHORT = ["run.steps=1", "sft.episodes=8", "eval.tasks=4", "rollout.num_tasks=2", "rollout.group_size=2", "eval.every=0"]
NUMBERS = itertools.count()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.fixture
def name():
    """A module name that no other test has imported."""
    return f"my_thing_{next(NUMBERS)}"


# -- init ---------------------------------------------------------------------------------------------------------


def test_a_new_environment_passes_its_check_and_trains_as_it_is(folder, name, spear):
    code, text = spear("init", "environment", name)
    assert code == 0
    assert f"spear check-env {name}:tasks" in text
    assert f"spear train tiny task.env={name}:tasks run.dir=runs/{name}" in text
    assert "my_game" not in (folder / f"{name}.py").read_text()
    code, text = spear("check-env", f"{name}:tasks")
    assert code == 0, text
    assert "no fault found" in text
    assert "note:" not in text
    code, text = spear("train", "tiny", f"task.env={name}:tasks", f"run.dir=runs/{name}", *SHORT)
    assert code == 0, text
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    assert summary["env"] == f"{name}:tasks"
    metrics = json.loads((folder / "runs" / name / "metrics.jsonl").read_text().splitlines()[0])
    assert "rollout/questions" in metrics


def test_the_game_of_a_new_environment_uses_all_that_the_protocol_offers(folder, name):
    begin("environment", name)
    tasks = {split: load_tasks(name, split) for split in ("train", "validation", "test")}
    assert all(task.unfinished_reward < 0 and task.demonstrate and task.family for task in tasks["train"])
    answers = {task.id: "" for panel in tasks.values() for task in panel}
    assert len(answers) == sum(map(len, tasks.values()))
    for task in tasks["validation"][:50]:
        env = task.make_env()
        keys = [env.reset().state_key]
        low, high = 1, 10
        while low < high:
            middle = (low + high) // 2
            result = env.step(f"ask {middle}")
            keys.append(result.observation.state_key)
            assert (result.used_tool, result.reward, result.done) == (True, 0.0, False)
            hint = result.observation.text.split()[-1]
            low, high = {"higher": (middle + 1, high), "lower": (low, middle - 1), "yes": (middle, middle)}[hint]
        assert len(set(keys)) == len(keys)
        same = env.step("what?")
        assert (same.invalid, same.observation.state_key, same.reward) == ("no_action", keys[-1], 0.0)
        last = env.step(f"say {low}")
        assert (last.reward, last.done, last.success, last.used_tool) == (1.0, True, True, False)
        assert last.metrics == {"questions": len(keys) - 1}
        wrong = task.make_env()
        wrong.reset()
        assert wrong.step(f"say {low % 10 + 1}").reward == task.unfinished_reward


def load_tasks(name: str, split: str):
    return list(tasks_of(load(None, [f"task.env={name}:tasks"]), split))


@pytest.mark.parametrize("wrappers", ["", "spear-", "spear-dr-bot-"])
def test_a_new_algorithm_trains_alone_and_under_every_wrapper(folder, name, spear, wrappers):
    assert spear("init", "algorithm", name)[0] == 0
    code, text = spear("train", "lookup", f"algorithm.name={wrappers}{name}:algorithm", "run.dir=runs/a", *SHORT)
    assert code == 0, text
    assert json.loads((folder / "runs" / "a" / "summary.json").read_text())["algorithm"].endswith(f"{name}:algorithm")


def test_a_new_plan_is_the_preset_tiny_for_a_toy_and_trains(folder, name, spear):
    code, text = spear("init", "plan", name)
    assert code == 0
    assert f"spear train {name}.toml" in text
    tiny, plan = load("tiny"), load(f"{name}.toml")
    assert (plan.task.env, plan.run.dir) == ("lookup", f"runs/{name}")
    plan.task.env, plan.run.dir = tiny.task.env, tiny.run.dir
    assert plan == tiny
    code, text = spear("train", f"{name}.toml", *SHORT)
    assert code == 0, text


@pytest.mark.parametrize("kind", ["environment", "algorithm", "plan"])
def test_what_is_there_is_not_overwritten(folder, name, spear, kind):
    path = folder / (f"{name}.toml" if kind == "plan" else f"{name}.py")
    path.write_text("mine")
    code, text = spear("init", kind, name)
    assert code == 2
    assert text == f"error: init: {path.name} exists already: choose another name, or move it away\n"
    path.unlink()
    path.symlink_to("nowhere")
    assert spear("init", kind, name)[0] == 2
    assert not (folder / "nowhere").exists()


@settings(deadline=None)
@given(st.one_of(st.text(max_size=12), st.sampled_from([*keyword.kwlist, "a.b", "../x", "my-game", "x.py", "", "1a"])))
def test_only_names_that_python_can_import_are_taken(tmp_path_factory, name):
    if name.isidentifier() and name.isascii() and not keyword.iskeyword(name):
        return
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("names"))
    try:
        for kind in ("environment", "algorithm", "plan"):
            with pytest.raises(ConfigError, match="the name cannot be"):
                begin(kind, name)
        assert os.listdir() == []
    finally:
        os.chdir(before)


@pytest.mark.parametrize("taken", ["random", "sys", "torch", "spear_rl", "pytest"])
def test_a_module_that_python_has_is_not_hidden(folder, taken):
    with pytest.raises(ConfigError, match=f"Python already has a module {taken}"):
        begin("environment", taken)
    begin("plan", taken)  # no module


def test_a_package_in_this_folder_is_not_hidden_but_a_plain_folder_is_in_nobodys_way(folder, name):
    (folder / name).mkdir()
    begin("environment", name)
    assert load_tasks(name, "test")
    (folder / f"{name}_too").mkdir()
    (folder / f"{name}_too" / "__init__.py").touch()
    with pytest.raises(ConfigError, match="choose another name"):
        begin("environment", f"{name}_too")


def test_an_unknown_kind_a_missing_folder_and_a_name_too_long_are_one_sentence(folder, name, spear):
    code, text = spear("init", "enviroment", name)
    assert code == 2
    assert "did you mean environment?" in text
    code, text = spear("init", "plan", "x" * 300)
    assert code == 2
    assert "File name too long" in text
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()
    for kind in ("environment", "plan"):
        with pytest.raises(UserError, match="cannot be written: No such file or directory"):
            begin(kind, name)
    os.chdir(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_sentence(folder, name, spear):
    folder.chmod(0o500)
    try:
        code, text = spear("init", "environment", name)
    finally:
        folder.chmod(0o700)
    assert (code, text) == (2, f"error: {name}.py cannot be written: Permission denied\n")


# -- the presets for any environment ------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["train", "sft"])
@pytest.mark.parametrize("preset", ["tiny", "gpu"])
def test_a_preset_for_any_environment_asks_for_one(folder, spear, preset, verb):
    assert load(preset).task.env == ""
    assert load(preset).task.options == {}
    code, text = spear(verb, preset)
    assert code == 2
    assert text.startswith("error: task.env is empty: give your own, task.env=package.module:function")
    assert os.listdir(folder) == []
    code, text = spear("eval", "expert", "--config", preset)
    assert code == 2
    assert "task.env is empty" in text
    assert spear("show", preset)[0] == 0


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_bare_command_prints_its_help_and_starts_nothing(folder, spear, verb):
    code, text = spear(verb)
    assert code in (0, 2)
    assert "Usage:" in text
    assert "SECTION.KEY=VALUE" in text
    assert os.listdir(folder) == []


WITH_OPTIONS = [name for name in presets() if load(name).task.options]


@pytest.mark.parametrize("preset", WITH_OPTIONS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_another_environment_drops_the_presets_options_and_keeps_the_users(preset, data):
    own, options = load(preset).task.env, load(preset).task.options
    env = data.draw(st.sampled_from([*ENVIRONMENTS, "my_game:tasks"]))
    names = st.text(string.ascii_lowercase, min_size=1, max_size=5)
    given_options = data.draw(st.dictionaries(names, st.integers(0, 9), max_size=3))
    overrides = [f"task.options.{key}={value}" for key, value in given_options.items()]
    overrides.insert(data.draw(st.integers(0, len(overrides))), f"task.env={env}")
    config = load(preset, overrides)
    assert config.task.env == env
    assert config.task.options == (options if env == own else {}) | given_options
    config = load(preset, block={"task": {"env": env, "options": given_options}})
    assert config.task.options == (options if env == own else {}) | given_options


def test_a_preset_of_one_environment_plays_another_without_a_refusal(folder, spear):
    code, text = spear("train", "quickstart", "task.env=lookup", "run.dir=a", "engine.model=tiny-xs", *SHORT)
    assert code == 0, text
    code, text = spear("train", "quickstart", "task.env=lookup", "task.options.level=easy", "run.dir=b", *SHORT)
    assert code == 2
    assert "task.options.level: lookup has no such option" in text


def test_a_runs_options_do_not_follow_it_into_the_evaluation_on_another_environment(folder, name, spear):
    begin("environment", name)
    assert spear("train", "lookup", "run.dir=a", *SHORT)[0] == 0
    code, text = spear("eval", "a", "--env", f"{name}:tasks", "--tasks", 3)
    assert code == 0, text
    assert "mean questions" in text
    out = folder / "report.json"
    assert spear("eval", "a", "--tasks", 3, "--out", out)[0] == 0
    assert json.loads(out.read_text())["options"] == {"num_digits": 5}


# -- warnings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", presets())
def test_no_preset_warns_of_itself(preset):
    assert cautions(load(preset)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.learning_rate=1e-6"], ["optim.learning_rate=1e-06 is too small for it: set about 1e-3"]),
        (["optim.learning_rate=3e-5"], ["optim.learning_rate=3e-05"]),
        (["optim.learning_rate=0"], []),  # a frozen policy is a choice
        (["sft.learning_rate=1e-4"], ["sft.learning_rate=0.0001 is too small for it"]),
        (["sft.episodes=64"], ["sft.episodes=64 makes 16 updates, too few for it"]),
        (["sft.episodes=1"], ["makes 1 update, too few"]),
        (["sft.episodes=0", "sft.learning_rate=1e-4"], ["without a cold start"]),
        (["engine.model=smollm2", "optim.learning_rate=1e-6", "sft.episodes=0"], []),
        (["engine.model=tiny-xs", "optim.learning_rate=1e-6", "sft.episodes=0"], ["1e-06", "without a cold start"]),
    ],
)
def test_settings_that_cannot_work_with_random_weights_are_warned_of(overrides, words):
    found = cautions(load("tiny", overrides))
    assert len(found) == len(words)
    for sentence, word in zip(found, words, strict=True):
        assert word in sentence
        assert sentence.startswith("warning: engine.model=tiny")
        assert "\n" not in sentence


def test_a_vision_language_model_from_scratch_is_warned_of_with_its_own_preset():
    assert cautions(load("sokoban-vision-tiny")) == []
    [sentence] = cautions(load("sokoban-vision-tiny", ["optim.learning_rate=1e-6"]))
    assert "engine.model=tiny-vision begins with random weights" in sentence
    assert sentence.endswith("or begin with the preset sokoban-vision-tiny")


def test_a_cold_start_alone_is_not_warned_of_the_rate_of_rl():
    assert cautions(load("tiny", ["optim.learning_rate=1e-6"]), with_rl=False) == []


def test_a_run_from_scratch_with_the_default_rate_says_what_to_do(folder, name, spear):
    begin("environment", name)
    code, text = spear("train", f"task.env={name}:tasks", "sft.episodes=64", "run.steps=0", "eval.tasks=0", "run.dir=a")
    assert code == 0, text
    assert "optim.learning_rate=1e-06 is too small for it: set about 1e-3, or begin with the preset tiny" in text


def watched(rows: list[tuple[float, float]], *overrides: str) -> list[Event]:
    """Notes of a watch over steps of these mean rewards and success rates."""
    notes: list[Event] = []
    watch = RewardWatch(load("tiny", list(overrides)), [notes.append])
    for step, (reward, success) in enumerate(rows):
        metrics = {"rollout/reward": reward, "rollout/success": success, "rollout/episodes": 64.0}
        watch(Event("step", step, 50, metrics))
        watch(Event("checkpoint", step))
    return notes


@pytest.mark.parametrize("reward", [0.0, -0.2, -1 / 3])
def test_first_steps_without_success_and_with_one_reward_are_warned_of_once(reward):
    [note] = watched([(reward, 0.0)] * 30, "sft.episodes=0")
    assert (note.kind, note.step) == ("note", STEPS - 1)
    assert f"the first {STEPS} steps ({64 * STEPS} episodes)" in note.text
    assert "begin with a cold start (sft.episodes)" in note.text
    assert "sft.episodes" not in watched([(reward, 0.0)] * 30)[0].text


def test_first_steps_without_success_do_not_ask_a_cold_starts_model_for_a_cold_start(tmp_path):
    (tmp_path / MANIFEST).touch()
    [note] = watched([(0.0, 0.0)] * 30, "sft.episodes=0", f"engine.model={tmp_path}")
    assert "begin with an engine.model of a longer cold start" in note.text
    assert "sft.episodes" not in note.text


@settings(deadline=None)
@given(st.integers(0, STEPS - 1), st.floats(-1, 0))
def test_a_success_or_a_difference_in_reward_silences_the_warning(step, reward):
    success, spread = [[(reward, 0.0)] * 30 for _ in range(2)]
    success[step] = (reward, 1 / 64)
    spread[step] = (reward + 0.01, 0.0)
    assert watched(success) == []
    assert step == 0 or watched(spread) == []


def test_a_run_whose_game_never_pays_is_warned_of_on_the_console(folder, name, spear):
    begin("environment", name)
    path = folder / f"{name}.py"
    game = path.read_text().replace("1.0 if is_found else WRONG", "WRONG")
    path.write_text(game.replace("success=is_found", "success=False"))
    small = [*SHORT, f"run.steps={STEPS + 2}", "rollout.max_new_tokens=2"]
    code, text = spear("train", "tiny", f"task.env={name}:tasks", "run.dir=a", *small)
    assert code == 0, text
    assert text.count("nothing to learn from yet") == 1
