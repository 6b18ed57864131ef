"""Environments of other packages by name, against the real packages."""

import json
import subprocess
import sys
import urllib.request
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.app.build.rollout import tasks_of
from spear_rl.app.config import load
from spear_rl.envs import tasks_fn
from spear_rl.envs.adapters import ADAPTERS, manifest, openenv
from spear_rl.envs.adapters.shared import answered, best_random_play
from spear_rl.envs.adapters.spaces import plain_picture
from spear_rl.errors import ConfigError, UserError
from spear_rl.testing import check_tasks

NUMBERS = [str(number) for number in range(1, 21)]


@given(st.text(max_size=200))
def test_any_answer_is_an_action_or_has_a_reason(text):
    for said in (text, f"<action>{text}</action>", f"<think>{text}</think> left"):
        found = answered(said)
        assert bool(found.command) != bool(found.invalid)


def test_the_last_action_tag_is_the_answer_as_it_is_written():
    assert answered("<think>a</think><action>X</action> or <action> Go Left </action>").command == "Go Left"
    assert answered("<action>left").invalid == "unclosed_tag"
    assert answered("x" * 100_000).invalid == "too_long"


def test_coloured_characters_stand_in_brackets():
    assert plain_picture("\n\x1b[41mS\x1b[0mFF\n") == "[S]FF"
    assert plain_picture("\x1b[34;1mR\x1b[0m|\x1b[35mG\x1b[0m") == "(R)|{G}"


@pytest.mark.parametrize("prefix", ADAPTERS)
def test_a_prefix_without_an_id_and_a_missing_package_are_one_sentence(prefix, monkeypatch):
    for name in (prefix, f"{prefix}:"):
        with pytest.raises(ConfigError, match="needs what to play"):
            tasks_fn(name)
    for module in [name for name in sys.modules if name.split(".")[0] == prefix]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, prefix, None)
    with pytest.raises(UserError, match=rf"pip install 'spear-rl\[{prefix}\]'"):
        tasks_fn(f"{prefix}:X-v0")("train")


def test_an_unknown_environment_is_answered_with_the_known_prefixes():
    with pytest.raises(ConfigError, match=r"gymnasium:ID.*package\.module:function"):
        tasks_fn("no_such_game")


def panel(env, split="train", **options):
    config = load("tiny", [f"task.env={env}"])
    config.task.options = options
    return tasks_of(config, split)


# ---- Gymnasium


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


@pytest.mark.parametrize(
    ("env", "options"),
    [("FrozenLake-v1", {"is_slippery": False, "tries": 500}), ("FrozenLake-v1", {"tries": 500}), ("Blackjack-v1", {})],
)
def test_check_env_finds_no_fault_with_gymnasium(gymnasium, env, options):
    assert check_tasks(tasks_fn(f"gymnasium:{env}"), options=options, num_tasks=2) == []


@pytest.mark.parametrize("env", ["Taxi-v4", "CliffWalking-v1", "CartPole-v1", "MountainCar-v0", "Acrobot-v1"])
def test_a_game_of_gymnasium_is_played_by_its_choices(gymnasium, env):
    task = panel(f"gymnasium:{env}", expert="none", max_tasks=1)[0]
    game = task.make_env()
    first = game.reset()
    assert first.text
    assert first.choices
    result = game.step(f"<action>{first.choices[0].upper()}</action>")
    assert result.invalid == ""
    assert game.step("no such action").invalid == "inadmissible"
    game.close()


def test_a_game_named_with_its_module_is_explained_as_without(gymnasium):
    [told], [also_told] = (
        panel(f"gymnasium:{name}", max_tasks=1) for name in ("FrozenLake-v1", "gymnasium:FrozenLake-v1")
    )
    assert "over the ice" in told.instructions
    assert also_told.instructions == told.instructions.replace("FrozenLake", "gymnasium:FrozenLake", 1)


def test_a_walk_over_the_frozen_lake_is_solved_and_only_then(gymnasium):
    game = panel("gymnasium:FrozenLake-v1", is_slippery=False, max_tasks=1)[0].make_env()
    assert "[S]FFF" in game.reset().text
    results = [game.step(move) for move in ("down", "down", "right", "right", "down", "right")]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[-1].success
    with pytest.raises(RuntimeError):
        game.step("down")
    game.reset()
    results = [game.step(move) for move in ("right", "down")]
    assert results[-1].done
    assert not results[-1].success


def test_seeds_differ_between_splits_and_a_task_is_the_same_game_again(gymnasium):
    firsts = {}
    for split in ("train", "validation", "test"):
        tasks = panel("gymnasium:Blackjack-v1", split, max_tasks=30)
        firsts[split] = [task.make_env().reset().text for task in tasks]
        assert firsts[split] == [task.make_env().reset().text for task in tasks]
    assert firsts["train"] != firsts["validation"] != firsts["test"]


def test_a_function_of_the_user_makes_a_map_per_seed(gymnasium, tmp_path, monkeypatch):
    (tmp_path / "maps_of_mine.py").write_text(
        "from gymnasium.envs.toy_text.frozen_lake import generate_random_map\n"
        "def lake(seed):\n    return {'desc': generate_random_map(size=4, seed=seed)}\n"
    )
    monkeypatch.chdir(tmp_path)
    tasks = panel("gymnasium:FrozenLake-v1", is_slippery=False, seeded="maps_of_mine:lake", max_tasks=20)
    assert len({task.make_env().reset().text for task in tasks}) > 10


def test_random_play_gives_the_best_of_its_tries(gymnasium):
    task = panel("gymnasium:FrozenLake-v1", is_slippery=False, max_tasks=1)[0]
    few, many = (best_random_play(task.make_env, tries, 100, (), 0) for tries in (1, 300))
    game = task.make_env()
    game.reset()
    assert [game.step(move) for move in many][-1].success
    assert few


def test_pictures_are_png_files(gymnasium):
    pytest.importorskip("pygame")
    game = panel("gymnasium:FrozenLake-v1", observation="image", is_slippery=False, max_tasks=1)[0].make_env()
    first, second = game.reset(), game.step("right").observation
    assert first.images[0].startswith(b"\x89PNG")
    assert first.images != second.images
    assert first.state_key != second.state_key


def test_a_manifest_tells_panels_apart_and_is_the_same_again(gymnasium, tmp_path, capsys):
    wanted = ["gymnasium:FrozenLake-v1", "test", "--tasks", "5"]
    assert manifest.main(wanted) == 0
    path = tmp_path / "manifest.json"
    path.write_text(capsys.readouterr().out)
    assert len(json.loads(path.read_text())["tasks"]) == 5
    assert manifest.main([*wanted, "--verify", str(path)]) == 0
    assert manifest.main([*wanted, "--options", '{"map_name": "8x8"}', "--verify", str(path)]) == 1
    assert manifest.main(["gymnasium:Nothing-v9", "test"]) == 2
    assert "has no environment" in capsys.readouterr().err


@pytest.mark.slow
def test_a_game_of_another_virtual_environment_is_the_same_game(gymnasium, tmp_path, monkeypatch):
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    paths = [str(Path(module.__file__).parents[1]) for module in map(import_module, ("gymnasium", "numpy", "spear_rl"))]
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join(paths))
    options = {"is_slippery": False, "tries": 50, "max_tasks": 2}
    there = tasks_fn("gymnasium:FrozenLake-v1", python=str(folder / "bin" / "python"))("test", **options)
    here = tasks_fn("gymnasium:FrozenLake-v1")("test", **options)
    assert [manifest.content_hash(task) for task in there] == [manifest.content_hash(task) for task in here]
    assert there[0].demonstrate(3) == here[0].demonstrate(3)


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        ("FrozenLak-v1", {}, "did you mean FrozenLake-v1"),
        ("no_such_module_x:Game-v0", {}, "has no environment"),
        ("Pendulum-v1", {}, "takes actions from Box"),
        ("FrozenLake-v1", {"is_slipery": True}, "is_slipery"),
        ("FrozenLake-v1", {"success": "won"}, "return>=NUMBER"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "has 4 actions"),
        ("Blackjack-v1", {"observation": "ansi"}, "cannot be rendered as ansi"),
        ("FrozenLake-v1", {"expert": "no_such_module_x:f"}, "there is no module"),
    ],
)
def test_what_gymnasium_cannot_do_is_one_sentence(gymnasium, env, options, said):
    with pytest.raises(UserError, match=said) as caught:
        panel(f"gymnasium:{env}", **options)
    assert "\n" not in str(caught.value)


def test_large_and_unbounded_observations_are_refused_with_a_way_out(gymnasium):
    spaces = gymnasium.spaces
    from spear_rl.envs.adapters.spaces import action_fault, observation_fault

    assert "numbers" in observation_fault(spaces.Box(0, 255, (64, 64, 3)))
    assert "not bounded" in observation_fault(spaces.Sequence(spaces.Discrete(3)))
    assert observation_fault(spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Text(5)]))) == ""
    assert action_fault(spaces.Box(-1, 1, (2,)))
    assert action_fault(spaces.Discrete(10**9))


# ---- TextArena


@pytest.fixture
def textarena():
    return pytest.importorskip("textarena")


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("GuessTheNumber-v0", {"max_turns": 5, "actions": NUMBERS, "tries": 50}),
        ("FrozenLake-v0", {"actions": ["up", "down", "left", "right"], "tries": 100, "reward": "win"}),
        ("TowerOfHanoi-v0", {}),
    ],
)
def test_check_env_finds_no_fault_with_textarena(textarena, env, options):
    assert check_tasks(tasks_fn(f"textarena:{env}"), options=options, num_tasks=2) == []


def test_a_number_is_guessed_by_halves_and_an_invalid_move_is_never_paid(textarena):
    for task in panel("textarena:GuessTheNumber-v0", max_tasks=5):
        game, low, high, result = task.make_env(), 1, 20, None
        game.reset()
        while result is None or not result.done:
            middle = (low + high) // 2
            result = game.step(f"<action>{middle}</action>")
            low, high = (middle + 1, high) if "higher" in result.observation.text else (low, middle - 1)
        assert result.success
        assert result.reward == 1.0
    game.reset()
    game.step("1")
    results = [game.step("nonsense"), game.step("nonsense")]
    assert results[0].invalid
    assert results[-1].reward <= 0


def test_a_game_leaves_the_global_random_stream_alone(textarena):
    import random

    game = panel("textarena:GuessTheNumber-v0", max_tasks=1)[0].make_env()
    random.seed(5)
    before = random.getstate()
    game.reset()
    game.step("3")
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        ("NoGame-v0", {}, "has no game"),
        ("TicTacToe-v0", {}, "opponent=my_module:function"),
        ("TicTacToe-v0", {"num_players": 2}, "needs one"),
        ("GuessTheNumber-v0", {"colour": 1}, "colour"),
        ("GuessTheNumber-v0", {"player": 1}, "players are 0 to 0"),
    ],
)
def test_what_textarena_cannot_do_is_one_sentence(textarena, env, options, said):
    with pytest.raises(UserError, match=said) as caught:
        panel(f"textarena:{env}", **options)
    assert "\n" not in str(caught.value)


def test_a_game_without_its_word_list_says_how_to_get_it_and_prints_nothing_else(textarena, monkeypatch, capfd):
    monkeypatch.setattr("nltk.data.path", [])
    monkeypatch.setattr("nltk.download", lambda *a, **k: print("[nltk_data] Error loading"))
    with pytest.raises(UserError, match=r"python -m nltk\.downloader words"):
        panel("textarena:Hangman-v0")
    assert capfd.readouterr() == ("", "")


# ---- OpenEnv

SERVER = """
import random
from typing import Literal
from pydantic import Field
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    number: int = Field(ge=1, le=10)

class Seen(Observation):
    hint: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **_):
        self.number, self.turns = random.Random(seed).randint(1, 10), 0
        return Seen(hint="from 1 to 10")
    def step(self, action, timeout_s=None, **_):
        self.turns += 1
        won = action.number == self.number
        hint = "right" if won else "higher" if action.number < self.number else "lower"
        return Seen(hint=hint, reward=float(won), done=won or self.turns == 4)
    @property
    def state(self):
        return State()

app = create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=100)
"""


CHATTY = """
import sys
async def app(scope, receive, send):
    sys.stderr.write("a warning\\n" * 100_000)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
"""


def test_an_openenv_app_may_write_much_to_standard_error(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    (tmp_path / "chatty_app_of_mine.py").write_text(CHATTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openenv, "START_SECONDS", 20.0)
    address = openenv._served("chatty_app_of_mine:app")
    for _ in range(3):
        with urllib.request.urlopen(f"{address}/health", timeout=20) as answer:
            assert answer.status == 200


def test_an_openenv_app_that_does_not_start_says_why(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    (tmp_path / "broken_app_of_mine.py").write_text("raise ValueError('no board')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="does not start: ValueError: no board"):
        openenv._served("broken_app_of_mine:app")


@pytest.mark.slow
def test_an_openenv_app_is_served_and_played(tmp_path, monkeypatch):
    pytest.importorskip("openenv")
    (tmp_path / "openenv_game_of_mine.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    tasks = panel("openenv:openenv_game_of_mine:app", max_tasks=3)
    for task in tasks:
        game, low, high, result = task.make_env(), 1, 10, None
        assert game.reset().text == "from 1 to 10"
        assert game.step("five").invalid == "inadmissible"
        assert game.step("11").invalid == "inadmissible", "the server refuses it, and the session goes on"
        while result is None or not result.done:
            middle = (low + high) // 2
            result = game.step(str(middle))
            low, high = (middle + 1, high) if "higher" in result.observation.text else (low, middle - 1)
        assert result.success
        game.close()
    numbers = [str(number) for number in range(1, 11)]
    assert check_tasks(tasks_fn("openenv:openenv_game_of_mine:app"), options={"actions": numbers}, num_tasks=2) == []


@pytest.mark.slow
def test_an_openenv_action_that_lists_its_values_has_choices_and_a_full_server_is_one_sentence(tmp_path, monkeypatch):
    pytest.importorskip("openenv")
    listed = SERVER.replace("number: int = Field(ge=1, le=10)", 'number: Literal["1", "2", "3"]')
    listed = listed.replace("max_concurrent_envs=100", "max_concurrent_envs=1")
    listed = listed.replace("action.number", "int(action.number)").replace("randint(1, 10)", "randint(1, 3)")
    (tmp_path / "openenv_choice_of_mine.py").write_text(listed)
    monkeypatch.chdir(tmp_path)
    task = panel("openenv:openenv_choice_of_mine:app", max_tasks=1)[0]
    game = task.make_env()
    assert game.reset().choices == ("1", "2", "3")
    assert game.step("4").invalid == "inadmissible"
    with pytest.raises(UserError, match="no free session"):
        task.make_env().reset()
    game.close()
    assert task.demonstrate is not None, "and its session waits until the last one has ended"
    assert set(task.demonstrate(0)) <= {"1", "2", "3"}


@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "no/such:image"])
def test_an_openenv_server_that_is_not_there_is_one_sentence(server):
    pytest.importorskip("openenv")
    with pytest.raises(UserError, match=r"task\.env") as caught:
        panel(f"openenv:{server}")
    assert "\n" not in str(caught.value)


# ---- verifiers

TASKSET = '''
import verifiers.v1 as vf

__all__ = EXPORTED

class Data(vf.TaskData):
    answer: int

class Tools(vf.Toolset):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds."""
        return a + b

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(100):
            yield Sum(Data(prompt=f"{number} + 1 = ?", answer=number + 1), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

class TwoTurns(vf.Env[vf.EnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            await interaction.turn(f"you said {segment.last_reply}; again?")

def expert(data, seed):
    return [str(data["answer"])]
'''


def taskset(folder, monkeypatch, name, exported):
    pytest.importorskip("verifiers.v1")
    (folder / f"{name}.py").write_text(TASKSET.replace("EXPORTED", repr(exported)))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return f"verifiers:{name}"


def test_a_taskset_of_verifiers_has_tools_rewards_and_metrics(tmp_path, monkeypatch):
    env = taskset(tmp_path, monkeypatch, "single_sums_of_mine", ["Sums"])
    task = panel(env, max_tasks=1)[0]
    assert '"add"' in task.tools[0]
    assert '"add"' in panel(env, max_tasks=1, calls="hermes")[0].instructions
    game = task.make_env()
    number = int(game.reset().text.split()[0])
    called = game.step(f"add(a={number}, b=1)")
    assert called.used_tool
    assert str(number + 1) in called.observation.text
    last = game.step(str(number + 1))
    assert last.done
    assert last.success
    assert last.reward == 2.0
    assert last.metrics == {"right": 1.0, "length": float(len(str(number + 1)))}


def test_an_environment_of_verifiers_takes_several_turns(tmp_path, monkeypatch):
    game = panel(taskset(tmp_path, monkeypatch, "double_sums_of_mine", ["Sums", "TwoTurns"]), max_tasks=1)[0].make_env()
    game.reset()
    second = game.step("7")
    assert second.observation.text == "you said 7; again?"
    assert not second.done
    assert game.step("0").done


@pytest.mark.slow
def test_check_env_finds_no_fault_with_verifiers(tmp_path, monkeypatch):
    env = taskset(tmp_path, monkeypatch, "checked_sums_of_mine", ["Sums"])
    options = {"expert": "checked_sums_of_mine:expert"}
    assert check_tasks(tasks_fn(env), options=options, num_tasks=2) == []


def test_an_unknown_taskset_and_setting_are_one_sentence(tmp_path, monkeypatch):
    env = taskset(tmp_path, monkeypatch, "refused_sums_of_mine", ["Sums"])
    for name, options in (("verifiers:no_such_taskset_x", {}), (env, {"colour": 1})):
        with pytest.raises(UserError, match="taskset") as caught:
            panel(name, **options)
        assert "\n" not in str(caught.value)
