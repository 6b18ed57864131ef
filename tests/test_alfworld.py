"""ALFWorld's games on the fast backend: panel, manifest, cache and errors, on game files of our own making."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from household_worlds import write_problem
from spear_rl.app.build.rollout import tasks_of
from spear_rl.app.config import load
from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.envs import ENVIRONMENTS, alfworld, household
from spear_rl.envs.alfworld import gamefile, games, manifest, panel, stock
from spear_rl.envs.alfworld.gamefile import read_game_file
from spear_rl.envs.household.experts import optimal_commands
from spear_rl.envs.household.generator import generated_problem
from spear_rl.envs.household.rules.game import game_tables, grounded_game
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.io import cache as store
from spear_rl.rollout import ChatRenderer, collect_groups
from spear_rl.rollout.choice import Start
from spear_rl.rollout.collect import demonstration
from spear_rl.rollout.rendering.renderer import LAYOUTS
from spear_rl.testing import check_environment

GRAMMAR = 'grammar :: """{"task": [{"rhs": "Your task is to: TASK"}]}""";'


def write_game(folder: Path, seed: int, **changes: Any) -> Path:
    """A game file of the real form, with a generated room."""
    problem = generated_problem("medium", seed)
    fields = {
        "pddl_domain": "(define (domain alfred))",
        "grammar": GRAMMAR.replace("TASK", problem.task),
        "pddl_problem": write_problem(problem),
        "solvable": True,
        "walkthrough": optimal_commands(grounded_game(problem)),
    }
    folder.mkdir(parents=True)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps({k: v for k, v in (fields | changes).items() if v is not None}))
    return path


@pytest.fixture(autouse=True)
def _fresh_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """No test sees another's games, nor the user's cache."""
    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    games.real_game.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a game file states rules")
        yield
    games.real_game.cache_clear()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with two games of every type in two splits, and some that the official loader leaves out."""
    folder = tmp_path / "data"
    for split in ("train", "valid_seen"):
        for number in range(12):
            family = household.FAMILIES[number % 6]
            write_game(folder / "json_2.1.1" / split / f"{family}-Thing-None-Place-{number}" / "trial_T1", number)
    train = folder / "json_2.1.1" / "train"
    write_game(train / "pick_and_place_with_movable_recep-Pen-Mug-Desk-1" / "trial_T1", 0)
    write_game(train / "pick_and_place_simple-AppleSliced-None-Fridge-1" / "trial_T1", 0)
    write_game(train / "pick_and_place_simple-Apple-None-Fridge-2" / "trial_unsolvable", 0, solvable=False)
    write_game(train / "pick_and_place_simple-Apple-None-Fridge-2" / "trial_unchecked", 0, solvable=None)
    (train / "pick_and_place_simple-Apple-None-Fridge-2" / "trial_without_game").mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    return folder


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").rglob("*.json") if path.parent.parent.name.startswith("games"))


def test_the_panel_has_the_games_the_official_loader_plays(data: Path) -> None:
    ids = [task.id for task in alfworld.tasks("train", order="sorted")]
    assert len(ids) == 12
    assert ids == sorted(ids)
    assert ids[0] == "alfworld/train/look_at_obj_in_light-Thing-None-Place-1/trial_T1"
    assert [t.id for t in alfworld.tasks("validation")] == [t.id for t in alfworld.tasks("valid_seen")]


def test_the_panel_takes_turns_in_the_types_whatever_the_folder_is_called(data: Path, tmp_path: Path) -> None:
    tasks = alfworld.tasks("train")
    assert [task.family for task in tasks] == 2 * list(alfworld.TYPES)
    assert [task.id for task in alfworld.tasks("train", max_tasks=5)] == [task.id for task in tasks[:5]]
    moved = tmp_path / "elsewhere"
    shutil.copytree(data, moved)
    assert [task.id for task in alfworld.tasks("train", data=str(moved))] == [task.id for task in tasks]


def scene_of(task: Any) -> int:
    return int(task.id.split("/")[2].rpartition("-")[2])


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Training games in three scenes of each type of room, two in the first of them, and a validation game."""
    folder = tmp_path / "rooms"
    for number, scene in enumerate([1, 2, 30, 201, 202, 230, 301, 302, 330, 401, 402, 430]):
        family = household.FAMILIES[number % 6]
        for trial in range(1 + (scene % 100 == 1)):
            task = folder / "json_2.1.1" / "train" / f"{family}-Thing-None-Place-{scene}"
            write_game(task / f"trial_T{trial}", number)
    write_game(folder / "json_2.1.1" / "valid_seen" / "pick_two_obj_and_place-Thing-None-Place-1" / "trial_T9", 3)
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    return folder


@pytest.mark.parametrize("chosen", [[1], [430, 201], [2, 2, 301], (302,), 1, 2])
@pytest.mark.parametrize("order", ["turns", "sorted"])
def test_train_and_held_out_share_the_training_games_by_scene(chosen: Any, order: str, rooms: Path) -> None:
    everything = {task.id: task.make_env().reset() for task in alfworld.tasks("train")}
    train = alfworld.tasks("train", hold_out_scenes=chosen, order=order)
    held_out = alfworld.tasks("held_out", hold_out_scenes=chosen, order=order)
    assert sorted(task.id for task in [*train, *held_out]) == sorted(everything)
    assert {task.id: task.make_env().reset() for task in [*train, *held_out]} == everything
    scenes = {scene_of(task) for task in held_out}
    assert scenes.isdisjoint(scene_of(task) for task in train)
    if isinstance(chosen, int):
        assert sorted(scene // 100 for scene in scenes) == sorted([0, 2, 3, 4] * chosen)
        assert train
    else:
        assert scenes == set(chosen)


def test_held_out_scenes_by_number_grow_and_do_not_depend_on_types(rooms: Path) -> None:
    one, two = ({scene_of(t) for t in alfworld.tasks("held_out", hold_out_scenes=n)} for n in (1, 2))
    assert one < two
    for family in alfworld.TYPES:
        assert {scene_of(t) for t in alfworld.tasks("held_out", hold_out_scenes=2, types=[family])} <= two
        assert two.isdisjoint(scene_of(t) for t in alfworld.tasks("train", hold_out_scenes=2, types=[family]))


def test_other_splits_do_not_know_of_held_out_scenes(rooms: Path) -> None:
    whole = [task.id for task in alfworld.tasks("valid_seen")]
    assert [task.id for task in alfworld.tasks("validation", hold_out_scenes=[1])] == whole
    for off in (0, [], ()):
        assert len(alfworld.tasks("train", hold_out_scenes=off)) == 16


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 3], "no training game is in scene 3; there is 1-2, 30, 201-202, 230, 301-302, 330, 401-402, 430"),
        (3, "too many: the training games have 3 .* scenes, and one must be left"),
        (301, r"for scene 301 alone write \[301\]"),
        ([1, 2, 30, 201, 202, 230, 301, 302, 330, 401, 402, 430], "leaves no game to train on"),
        ("5,301", r"takes a number, or a list of numbers, e.g. hold_out_scenes=\[1, 2\]; got '5,301'"),
        (["1"], "takes a whole number"),
        ([True], "takes a whole number"),
        (-1, "must be 0 or more"),
        (1.5, "takes a whole number"),
    ],
)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_scenes_that_cannot_be_held_out_are_refused_in_one_sentence(
    split: str, value: Any, message: str, rooms: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tasks_of(load(None, ["task.env=alfworld"], block={"task": {"options": {"hold_out_scenes": value}}}), split)
    assert str(caught.value).startswith("task.options")


def test_held_out_needs_scenes_and_an_environment_that_has_it(rooms: Path) -> None:
    for env in ("alfworld", "lookup", "household"):
        with pytest.raises(ConfigError, match=f"^eval.split cannot be 'held_out' with {env}: "):
            tasks_of(load(None, [f"task.env={env}", "eval.split=held_out"]), "held_out", key="eval.split")


def test_the_manifest_knows_held_out_scenes(rooms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("2", "[301, 1]"):
        assert manifest.main(["held_out", "--hold-out-scenes", value]) == 0
        written = json.loads(capsys.readouterr().out)
        held_out = alfworld.tasks("held_out", hold_out_scenes=json.loads(value), order="sorted")
        assert (written["split"], list(written["games"])) == ("held_out", [task.id for task in held_out])
    assert manifest.main(["held_out"]) == 2


REAL = Path(os.environ.get("ALFWORLD_DATA", "")) / "json_2.1.1" / "train"


@pytest.mark.skipif(not REAL.is_dir(), reason="needs ALFWorld's games in $ALFWORLD_DATA")
def test_the_real_training_games_have_27_scenes_of_each_type_of_room() -> None:
    data = str(REAL.parent.parent)
    train = alfworld.tasks("train", data=data, hold_out_scenes=4)
    held_out = alfworld.tasks("held_out", data=data, hold_out_scenes=4)
    assert (len(train), len(held_out), len({scene_of(task) for task in held_out})) == (3078, 475, 16)
    assert len({scene_of(task) for task in train}) == 4 * 23


def test_types_can_be_chosen(data: Path) -> None:
    tasks = alfworld.tasks("train", types=["pick_heat_then_place_in_recep", "pick_two_obj_and_place"])
    assert {task.family for task in tasks} == {"pick_heat_then_place_in_recep", "pick_two_obj_and_place"}
    assert len(tasks) == 4


def test_it_is_an_environment_like_any_other(data: Path) -> None:
    tasks = ENVIRONMENTS["alfworld"]("train")
    assert check_environment(tasks, num_tasks=12, max_turns=60) == []
    for task in tasks:
        twin = pickle.loads(pickle.dumps(task))
        assert twin.make_env().reset() == task.make_env().reset()
        assert twin.demonstrate(3) == task.demonstrate(3)


@pytest.mark.parametrize("expert", ["search", "walkthrough", "mixed", "optimal"])
def test_every_expert_wins_every_game(expert: str, data: Path) -> None:
    for task in alfworld.tasks("train", expert=expert, reward=3.0):
        assert task.demonstrate is not None
        env = task.make_env()
        env.reset()
        results = [env.step(f"<think>so</think><action>{action}</action>") for action in task.demonstrate(4)]
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert (results[-1].reward, results[-1].success) == (3.0, True)
        with pytest.raises(RuntimeError, match="over"):
            env.step("look")


def test_the_mixed_expert_shows_both_ways(data: Path) -> None:
    task = alfworld.tasks("train", expert="mixed")[0]
    assert task.demonstrate is not None
    walkthrough = list(games.real_game(*task.demonstrate.args[:3]).walkthrough)  # type: ignore[attr-defined]
    shown = [task.demonstrate(seed) for seed in range(12)]
    assert 0 < sum(actions == walkthrough for actions in shown) < 12


def test_the_short_prompt_asks_for_no_thoughts(data: Path) -> None:
    paper, short = (alfworld.tasks("train", prompt=prompt)[0] for prompt in ("paper", "short"))
    assert "<think>" in paper.instructions
    assert "<action>" in paper.instructions
    assert "think" not in short.instructions
    assert "<action>" in short.instructions
    assert len(short.instructions) < len(paper.instructions) / 3
    assert short.answer_format == paper.answer_format == "<action>{action}</action>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "dev"}, "unknown split 'dev': there is train, validation, test, valid_seen, valid_unseen"),
        ({"split": "test"}, "no split valid_unseen .there is train, valid_seen.*alfworld-download"),
        ({"types": ["pick"]}, "unknown type 'pick': there is pick_and_place_simple"),
        ({"expert": "oracle"}, "unknown expert 'oracle': there is search"),
        ({"backend": "slow"}, "unknown backend 'slow': there is fast, textworld"),
        ({"prompt": "long"}, "unknown prompt 'long': there is paper, short"),
        ({"order": "random"}, "unknown order 'random': there is turns, sorted"),
        ({"data": "/nowhere"}, "no ALFWorld games in /nowhere .json_2.1.1 is missing.*alfworld-download"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_sentence(options: dict[str, Any], message: str, data: Path) -> None:
    with pytest.raises(ValueError, match=message):
        alfworld.tasks(**options)


def test_without_data_one_is_told_how_to_get_it() -> None:
    with pytest.raises(ValueError, match=r"json_2\.1\.1 is missing.*alfworld-download.*ALFWORLD_DATA"):
        alfworld.tasks("train")


def test_a_split_without_a_playable_game_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-A-None-B-1" / "trial").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no playable game"):
        alfworld.tasks("train", data=str(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 100_000, '{"pddl_domain": 1}', "\x00\xff"])
def test_a_damaged_game_file_is_named_when_the_panel_is_read(content: str, data: Path) -> None:
    path = next(data.glob("*/train/pick_two*/*/game.tw-pddl"))
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is damaged .*alfworld-download"):
        alfworld.tasks("train")


@pytest.mark.parametrize(
    "problem",
    [
        "",
        "(define",
        "(define (:objects) (:init) (:goal))",
        "(define (:objects) (:init (inreceptacle a b)) (:goal (x)))",
    ],
)
def test_a_game_file_without_a_game_in_it_is_named_when_it_is_played(problem: str, tmp_path: Path) -> None:
    folder = tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-A-None-B-1" / "trial"
    path = write_game(folder, 0, pddl_problem=problem)
    (task,) = alfworld.tasks("train", data=str(tmp_path))
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        task.make_env()


def test_a_game_file_that_changes_under_a_running_panel_is_refused(data: Path) -> None:
    task = alfworld.tasks("train")[0]
    path = Path(task.make_env.args[0])  # type: ignore[attr-defined]
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match="has changed since the panel was read"):
        task.make_env()
    assert alfworld.tasks("train")[0].make_env().reset()


def test_foreign_rules_are_warned_of(data: Path) -> None:
    task = alfworld.tasks("train")[0]
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"not ALFWorld 0.4's"):
            task.make_env()
        games.real_game.cache_clear()


def test_manifests_tell_whether_two_machines_have_the_same_games(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert manifest.main(["valid_seen"]) == 0
    kept = tmp_path / "manifest.json"
    kept.write_text(capsys.readouterr().out)
    written = json.loads(kept.read_text())
    assert written["split"] == "valid_seen"
    assert list(written["games"]) == sorted(written["games"])
    for name, digest in written["games"].items():
        path = data / "json_2.1.1" / name.removeprefix("alfworld/") / "game.tw-pddl"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert manifest.main(["validation", "--verify", str(kept)]) == 0
    assert f"the same 12 games, {written['sha256']}" in capsys.readouterr().out

    names = list(written["games"])
    changed = data / "json_2.1.1" / names[0].removeprefix("alfworld/") / "game.tw-pddl"
    changed.write_text(changed.read_text() + "\n")
    shutil.rmtree(data / "json_2.1.1" / names[1].removeprefix("alfworld/"))
    assert manifest.main(["validation", "--verify", str(kept)]) == 1
    assert capsys.readouterr().out == f"{names[0]}: another content\n{names[1]}: missing here\n"
    kept.write_text("{}")
    assert manifest.main(["validation", "--verify", str(kept)]) == 2
    assert "error" in capsys.readouterr().err


def test_a_panel_is_read_once_and_then_remembered(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = panel.playable_games("train")
    monkeypatch.setattr(panel, "read_game_file", lambda path: pytest.fail(f"{path} was read again"))
    assert panel.playable_games("train") == first
    monkeypatch.undo()
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    path = Path(first[0].path)
    path.write_text(path.read_text() + " ")
    assert [entry.id for entry in panel.playable_games("train") if entry not in first] == [first[0].id]


def test_a_game_seen_before_comes_from_the_cache_in_another_process_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = alfworld.tasks("train")
    before = [task.make_env().reset() for task in tasks]
    assert len(cache_files(tmp_path)) == 12
    games.real_game.cache_clear()
    monkeypatch.setattr(games, "read_game_file", lambda path, **_: pytest.fail(f"{path} was read again"))
    assert [task.make_env().reset() for task in tasks] == before


def test_a_cached_game_plays_as_a_new_one(data: Path) -> None:
    rng = random.Random(0)
    for task in alfworld.tasks("train"):
        new = task.make_env()
        games.real_game.cache_clear()
        cached = task.make_env()
        observation = new.reset()
        assert cached.reset() == observation
        for _ in range(60):
            action = rng.choice([*observation.choices, "dance", ""])
            result = new.step(action)
            assert cached.step(action) == result
            observation = result.observation
            if result.done:
                break


@pytest.mark.parametrize("damage", ["empty", "half", "one_byte", "not_json", "other_json", "wrong_tables"])
def test_a_damaged_cache_entry_is_made_anew(damage: str, data: Path, tmp_path: Path) -> None:
    task = alfworld.tasks("train")[0]
    before = task.make_env().reset()
    (entry,) = cache_files(tmp_path)
    whole = entry.read_bytes()
    if damage in ("other_json", "wrong_tables"):
        value = json.loads(whole.partition(b"\n")[2])
        store.store(
            entry, [1] if damage == "other_json" else value | {"tables": {**value["tables"], "accepts": [10**6]}}
        )
    else:
        flipped = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
        kept = {"empty": b"", "half": whole[: len(whole) // 2], "one_byte": flipped, "not_json": b"x\nx"}
        entry.write_bytes(kept[damage])
    games.real_game.cache_clear()
    assert task.make_env().reset() == before
    assert entry.read_bytes() == whole


def test_a_damaged_panel_index_is_made_anew(data: Path, tmp_path: Path) -> None:
    first = panel.playable_games("train")
    (index,) = (tmp_path / "cache").rglob("panel-*.json")
    whole = index.read_bytes()
    index.write_bytes(whole[: len(whole) // 2])
    assert panel.playable_games("train") == first
    assert index.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(data: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    task = alfworld.tasks("train", cache=str(blocker / "cache"))[0]
    assert task.make_env().reset().choices


def test_the_cache_is_where_one_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder("here") == Path("here")
    assert store.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SPEAR_RL_CACHE")
    assert store.cache_folder() == tmp_path / "xdg" / "spear_rl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_folder() == tmp_path / "home" / ".cache" / "spear_rl"


def _write_for_ever(path: Path) -> None:
    number = 0
    while True:
        number += 1
        store.store(path, {"number": number, "ballast": "x" * 200_000})


def test_readers_never_see_a_part_while_writers_write_and_die(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    num_read = 0
    for number in range(6):
        writers = [context.Process(target=_write_for_ever, args=(path,)) for _ in range(2)]
        for writer in writers:
            writer.start()
        stop = time.monotonic() + 0.15 + 0.02 * number
        while time.monotonic() < stop:
            if path.exists():
                value = store.stored(path)
                assert value is not None
                assert len(value["ballast"]) == 200_000
                num_read += 1
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        # Whenever they were killed, what is there is whole.
        assert store.stored(path) is not None
    assert num_read


def test_processes_that_start_at_once_fill_one_cache_together(data: Path, tmp_path: Path) -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from spear_rl.envs import alfworld\n"
        "print([t.make_env().reset().state_key for t in alfworld.tasks('train')])"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate()[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(said) == 1
    assert len(cache_files(tmp_path)) == 12
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_the_shape_of_the_cached_tables_is_known() -> None:
    # Whoever changes what the tables hold has to raise games.FORMAT, or old caches would be read as new ones.
    tables = json.dumps([game_tables(generated_problem("hard", seed)) for seed in range(6)], sort_keys=True)
    digest = hashlib.sha256(tables.encode()).hexdigest()
    assert (games.FORMAT, digest[:16]) == (1, "8300671faa27b812")


EVIL = "{__import__('os').system('touch PWNED')}"


@pytest.mark.parametrize(
    "grammar",
    [
        GRAMMAR.replace("TASK", f"put a mug in shelf. {EVIL}"),
        GRAMMAR.replace("TASK", EVIL),
        GRAMMAR.replace('"task"', '"intro": [{"rhs": "' + EVIL + '"}], "task"'),
        "",
    ],
)
def test_the_stock_backend_refuses_a_grammar_that_is_not_alfworlds(
    grammar: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_game(tmp_path / "game", 0, grammar=grammar.replace("PWNED", str(tmp_path / "PWNED")))
    env = stock.stock_env(str(path), "", 10.0)
    with pytest.raises(ValueError, match="would run the code in it, so it is refused"):
        env.reset()
    assert not (tmp_path / "PWNED").exists()


def test_a_sentence_with_code_in_it_is_no_published_wording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skeleton = GRAMMAR.replace("TASK", "")
    monkeypatch.setattr(gamefile, "PUBLISHED_GRAMMARS", {hashlib.sha256(skeleton.encode()).hexdigest()})
    monkeypatch.setattr(gamefile, "PUBLISHED_DOMAINS", {hashlib.sha256(b"(define (domain alfred))").hexdigest()})
    tasks = {
        "put a mug in shelf.": True,
        "Rinse the mug; then, put it (upright) on John's shelf!": True,
        EVIL: False,
        "put #intro# in shelf": False,
        "put [x] in shelf": False,
        r"put \u007bx\u007d in shelf": False,
    }
    for number, (task, is_published) in enumerate(tasks.items()):
        grammar = GRAMMAR.replace("TASK", task)
        assert read_game_file(write_game(tmp_path / str(number), 0, grammar=grammar)).is_published is is_published, task
    twice = GRAMMAR.replace("TASK", "put a mug in shelf.") + f'"Your task is to: {EVIL}"'
    assert not read_game_file(write_game(tmp_path / "twice", 0, grammar=twice)).is_published


@pytest.mark.skipif(find_spec("textworld") is not None, reason="textworld is installed")
def test_without_textworld_the_stock_backend_says_what_to_install(data: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"needs textworld.*spear-rl\[alfworld\].*or use the backend fast"):
        alfworld.tasks("train", backend="textworld")


def test_a_thousand_environments_share_their_games(data: Path) -> None:
    tasks = alfworld.tasks("train")
    envs = [tasks[number % 12].make_env() for number in range(1000)]
    observations = [env.reset() for env in envs]
    assert len({id(env._new_episode.args[0]) for env in envs}) == 12  # type: ignore[attr-defined]
    assert len(set(observations)) == 12


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("layout", ["chat", "turns"])
def test_a_game_begins_within_a_win_as_it_went(layout: str) -> None:
    tokenizer = tiny_tokenizer(["".join(map(chr, range(32, 127)))])
    renderer, lay_out = ChatRenderer(tokenizer), LAYOUTS[layout]
    for task in alfworld.tasks("train", max_tasks=4):
        win = demonstration(task, renderer=renderer, layout=lay_out, tagged=True, seed=0)
        assert win.success
        for num_given in range(1, len(win.turns)):
            rest = iter([turn.completion for turn in win.turns[num_given:]])
            generator = SimpleNamespace(generate=lambda prompts, rest=rest: [next(rest) for _ in prompts])
            start = Start(tuple(replace(turn, prompt_ids=[]) for turn in win.turns), num_given)
            [group] = collect_groups(
                [task],
                group_size=1,
                generator=generator,
                renderer=renderer,
                layout=lay_out,
                max_turns=len(win.turns),
                step=0,
                starts=[start],
            )
            [again] = group.trajectories
            assert again == replace(win, num_given=num_given)
