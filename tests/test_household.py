"""The household's rules and its environment, by random play against what must always hold."""

from __future__ import annotations

import pickle
import random
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from household_worlds import twin_of, write_problem
from spear_rl.envs import ENVIRONMENTS, household
from spear_rl.envs.household.env import HouseholdEnv
from spear_rl.envs.household.families import SENTENCES, TaskSpec, parsed_task
from spear_rl.envs.household.generator import LEVELS, generated_problem
from spear_rl.envs.household.rules.game import Game, display_names, grounded_game
from spear_rl.envs.household.rules.pddl import read_problem, task_sentence
from spear_rl.envs.household.rules.wording import NOTHING_HAPPENS, listed
from spear_rl.envs.household.rules.world import World
from spear_rl.envs.shared.answer_tags import parsed_answer
from spear_rl.rollout.env import INADMISSIBLE

READING = ("look", "inventory", "help", "examine")
games = st.builds(
    lambda level, seed: grounded_game(generated_problem(level, seed)),
    st.sampled_from(list(LEVELS)),
    st.integers(0, 10**6),
)


def wandered(game: Game, seed: int, num_turns: int) -> World:
    """A world after some random turns that mostly change it."""
    rng, world = random.Random(seed), World(game)
    for _ in range(num_turns):
        doing = [command for command in world.commands() if not command.startswith(("go to", *READING))]
        world.act(rng.choice(doing if doing and rng.random() < 0.7 else world.commands()))
    return world


@settings(max_examples=60, deadline=None)
@given(games, st.integers(0, 10**6), st.integers(0, 60))
def test_every_offered_command_does_something_and_nothing_else_does(game: Game, seed: int, num_turns: int) -> None:
    world = wandered(game, seed, num_turns)
    commands = world.commands()
    assert list(commands) == sorted(set(commands))
    assert {"look", "inventory", "help"} <= set(commands)
    key = world.state_key()
    for command in commands:
        twin = twin_of(world)
        assert twin.act(f"  {command} ") != NOTHING_HAPPENS
        if command.startswith(READING):
            assert twin.state_key() == key
    for command in ("", "dance", commands[0].upper(), "go to", "take", "use desklamp", f"{commands[0]}x"):
        assert world.act(command) == NOTHING_HAPPENS
    assert world.state_key() == key


@settings(max_examples=60, deadline=None)
@given(games, st.integers(0, 10**6), st.integers(0, 80))
def test_no_object_is_ever_lost_or_doubled(game: Game, seed: int, num_turns: int) -> None:
    world = wandered(game, seed, num_turns)
    found = [o for inside in world.contents for o in inside] + ([world.held] if world.held >= 0 else [])
    assert sorted(found) == list(range(len(game.object_names)))
    for place, lying in enumerate(world.lying):
        assert sorted(lying) == sorted(o for r in game.receptacles_at[place] for o in world.contents[r])
    for receptacle, inside in enumerate(world.contents):
        assert set(inside) - set(game.start_contents[receptacle]) <= game.accepts[receptacle]


@settings(max_examples=60, deadline=None)
@given(games, st.integers(0, 10**6), st.integers(0, 60))
def test_the_texts_tell_the_truth(game: Game, seed: int, num_turns: int) -> None:
    world = wandered(game, seed, num_turns)
    carried = re.fullmatch(r"You are carrying: a (\w+ \d+)\.", world.act("inventory"))
    takes = [c for c in world.commands() if c.startswith("take ")]
    moves = [c for c in world.commands() if c.startswith("move ")]
    assert not (takes and carried)
    assert all(carried and command.startswith(f"move {carried.group(1)} to ") for command in moves)
    for command in world.commands():
        if not command.startswith("go to "):
            continue
        twin, name = twin_of(world), command.removeprefix("go to ")
        text = twin.act(command)
        assert text == f"You arrive at {name}. {twin.act(f'examine {name}')}"
        is_closed = text.endswith(f"The {name} is closed.")
        assert is_closed == (f"open {name}" in twin.commands())
        assert not (f"open {name}" in twin.commands() and f"close {name}" in twin.commands())
        shown = set() if is_closed else set(re.findall(r"a (\w+ \d+)", text.split("you see ")[1]))
        offered = {
            c[5:].split(" from ")[0] for c in twin.commands() if c.startswith("take ") and c.endswith(f" from {name}")
        }
        assert offered <= shown
        if is_closed:
            assert "is open. In it, you see" in twin.act(f"open {name}")


@settings(max_examples=80, deadline=None)
@given(games, st.integers(0, 10**6), st.integers(0, 60))
def test_won_means_what_the_task_sentence_says(game: Game, seed: int, num_turns: int) -> None:
    world = wandered(game, seed, num_turns)
    assert world.won == is_done(world)


def is_done(world: World) -> bool:
    """The task judged from the sentence and the names alone."""
    game, (family, thing, place) = world.game, parsed_task(world.game.task)
    things = {o for o, name in enumerate(game.object_names) if name.split()[0] == thing}
    if family == "look_at_obj_in_light":
        near = {o for r in game.receptacles_at[world.here] for o in world.contents[r]}
        lamps = {o for o in near & world.flags["istoggled"] if game.object_names[o].split()[0] == place}
        return bool(lamps) and world.held in things
    flag = {"clean": "isclean", "heat": "ishot", "cool": "iscool"}.get(family.split("_")[1])
    good = things & world.flags[flag] if flag else things
    wanted = 2 if family == "pick_two_obj_and_place" else 1
    homes = [r for r, name in enumerate(game.receptacle_names) if name.split()[0] == place]
    return any(len(good.intersection(world.contents[r])) >= wanted for r in homes)


@settings(max_examples=60, deadline=None)
@given(games, st.integers(0, 10**6), st.integers(0, 40))
def test_equal_states_have_equal_keys_however_they_were_reached(game: Game, seed: int, num_turns: int) -> None:
    world = wandered(game, seed, num_turns)
    key = world.state_key()
    for command in world.commands():
        twin = twin_of(world)
        if command.startswith("take "):
            thing, receptacle = command[5:].split(" from ")
            twin.act(command)
            assert twin.state_key() != key
            if f"move {thing} to {receptacle}" in twin.commands():
                twin.act(f"move {thing} to {receptacle}")
                assert twin.state_key() == key
        elif command.startswith("open "):
            twin.act(command)
            assert twin.state_key() != key
            twin.act(command.replace("open", "close"))
            assert twin.state_key() == key
    assert world.state_key() == key


def test_the_game_text_is_alfworlds() -> None:
    text = """(define (problem p) (:domain alfred)
    (:objects agent1 - agent loc_bar_0 loc_bar_1 loc_bar_2 - location Desk_bar_1 Fridge_bar_1 - receptacle
      Mug_bar_1 Mug_bar_2 Apple_bar_1 Knife_bar_1 - object
      DeskType FridgeType - rtype MugType AppleType KnifeType - otype)
    (:init (atLocation agent1 loc_bar_0) (canContain FridgeType AppleType) (canContain DeskType KnifeType)
      (receptacleAtLocation Desk_bar_1 loc_bar_1) (receptacleType Desk_bar_1 DeskType)
      (receptacleAtLocation Fridge_bar_1 loc_bar_2) (receptacleType Fridge_bar_1 FridgeType) (openable Fridge_bar_1)
      (objectType Mug_bar_1 MugType) (objectType Mug_bar_2 MugType) (objectType Apple_bar_1 AppleType)
      (objectType Knife_bar_1 KnifeType) (pickupable Knife_bar_1) (pickupable Apple_bar_1) (coolable Apple_bar_1)
      (sliceable Apple_bar_1) (objectAtLocation Apple_bar_1 loc_bar_1) (inReceptacle Apple_bar_1 Desk_bar_1)
      (inReceptacle Mug_bar_1 Desk_bar_1) (inReceptacle Mug_bar_2 Desk_bar_1) (inReceptacle Knife_bar_1 Desk_bar_1))
    (:goal (exists (?o - object ?r - receptacle) ; a comment
      (and (inReceptacle ?o ?r) (isSliced ?o) (isCool ?o) (receptacleType ?r FridgeType)))))"""
    world = World(grounded_game(read_problem(text, "put a cool sliced apple in fridge.")))
    assert world.intro() == (
        "You are in the middle of a room. Looking quickly around you, you see a desk 1, and a fridge 1.\n\n"
        "Your task is to: put a cool sliced apple in fridge."
    )
    assert world.commands() == ("go to desk 1", "go to fridge 1", "help", "inventory", "look")
    script = {
        "look": "You are in the middle of a room. Looking quickly around you, you see nothing.",
        "go to desk 1": "You arrive at desk 1. On the desk 1, you see a apple 1, a knife 1, a mug 2, and a mug 1.",
        "take knife 1 from desk 1": "You pick up the knife 1 from the desk 1.",
        "slice apple 1 with knife 1": "You sliced the apple 1 with the knife 1.",
        "move knife 1 to desk 1": "You move the knife 1 to the desk 1.",
        "take apple 1 from desk 1": "You pick up the apple 1 from the desk 1.",
        "examine apple 1": "This is a sliced apple 1.",
        "inventory": "You are carrying: a apple 1.",
        "go to fridge 1": "You arrive at fridge 1. The fridge 1 is closed.",
        "cool apple 1 with fridge 1": "You cool the apple 1 using the fridge 1.",
        "examine  apple 1": NOTHING_HAPPENS,
        "examine apple 1 ": "This is a cool sliced apple 1.",
        "move apple 1 to fridge 1": NOTHING_HAPPENS,
        "open fridge 1": "You open the fridge 1. The fridge 1 is open. In it, you see nothing.",
        " look": "You are facing the fridge 1. Next to it, you see nothing.",
        " move apple 1 to fridge 1 ": "You move the apple 1 to the fridge 1.",
    }
    for command, answer in script.items():
        assert not world.won
        assert world.act(command) == answer
    assert world.won


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(LEVELS)), st.integers(0, 10**6))
def test_a_game_survives_being_written_as_pddl(level: str, seed: int) -> None:
    problem = generated_problem(level, seed)
    again = read_problem(write_problem(problem), problem.task)
    assert again.content_hash() == problem.content_hash()
    assert dict(again.entities) == dict(problem.entities)
    assert World(grounded_game(again)).intro() == World(grounded_game(problem)).intro()


@pytest.mark.parametrize("text", ["", "(define", "(define (problem p))", "())", "(define) (define)", "word"])
def test_what_is_no_problem_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="PDDL problem"):
        read_problem(text)


def test_a_goal_about_what_is_not_kept_track_of_is_refused() -> None:
    problem = generated_problem("tiny", 0)
    text = write_problem(problem).split("(:goal")[0] + "(:goal (checked loc_bar_01)))"
    with pytest.raises(ValueError, match="checked"):
        grounded_game(read_problem(text))


def test_names_number_downwards_in_the_order_of_identifiers() -> None:
    names = display_names(["mug_bar_a", "mug_bar_b", "sink_bar_x_bar_sinkbasin", "agent1"])
    assert names == {
        "mug_bar_a": "mug 2",
        "mug_bar_b": "mug 1",
        "sink_bar_x_bar_sinkbasin": "sinkbasin 1",
        "agent1": "agent1 ",
    }
    assert [listed([]), listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == [
        "nothing",
        "a",
        "a, and b",
        "a, b, and c",
    ]


def test_every_task_sentence_can_be_read_back() -> None:
    for family, sentences in SENTENCES.items():
        for sentence in sentences:
            assert parsed_task(sentence.format(thing="mug", place="desk")) == TaskSpec(family, "mug", "desk")
    with pytest.raises(ValueError, match="not a task sentence"):
        parsed_task("make me a sandwich.")
    assert task_sentence('"rhs": "Your task is to: put a mug in desk."') == "put a mug in desk."


@pytest.mark.parametrize(
    ("text", "command", "invalid"),
    [
        ("<think>the desk</think><action>Go to  Desk 1</action>", "go to desk 1", ""),
        ("go to desk 1", "go to desk 1", ""),
        ("<action>look</action> or <action> inventory\n</action> it is", "inventory", ""),
        ("<think><action>look</action></think><action>inventory</action>", "inventory", ""),
        ("<think><action>look</action></think>", "", "no_action"),
        ("<think>never closed <action>look</action>", "look", ""),
        ("<think>hm</think><action>go to desk 1", "", "unclosed_tag"),
        ("</action><action>", "", "unclosed_tag"),
        ("<action>   </action>", "", "no_action"),
        ("", "", "no_action"),
        ("first line\nsecond line", "", "no_action"),
        ("x" * 101, "", "no_action"),
        ("x" * 100, "x" * 100, ""),
    ],
)
def test_a_policys_text_means_one_command_or_says_why_not(text: str, command: str, invalid: str) -> None:
    assert parsed_answer(text) == (command, invalid)


def test_an_episode_pays_ten_for_winning_and_then_is_over() -> None:
    task = household.tasks("train", expert="optimal")[2]
    assert task.demonstrate is not None
    env = task.make_env()
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")
    first = env.reset()
    assert "Your task is to: " in first.text
    assert "Welcome" not in first.text
    assert "help" not in first.choices
    assert "look" in first.choices
    refused = env.step("<action>fly to the moon</action>")
    assert (refused.invalid, refused.observation.text, refused.used_tool) == (INADMISSIBLE, "Nothing happens.", False)
    assert refused.observation.state_key == first.state_key
    *before, last = [env.step(f"<think>so</think><action>{command}</action>") for command in task.demonstrate(0)]
    assert all((r.reward, r.done, r.used_tool, r.success, r.invalid) == (0.0, False, True, False, "") for r in before)
    assert (last.reward, last.done, last.used_tool, last.success) == (10.0, True, True, True)
    with pytest.raises(RuntimeError, match="over"):
        env.step("look")
    env.close()
    with pytest.raises(RuntimeError):
        env.step("look")


def test_ten_thousand_odd_answers_never_break_an_episode() -> None:
    rng = random.Random(0)
    pieces = [
        "<action>",
        "</action>",
        "<think>",
        "</think>",
        "go to",
        " desk 1",
        "look",
        "\n",
        "\0",
        "\ud800",
        "é",
        "İ",
        "🙂",
        " ",
    ]
    env = household.tasks("train")[0].make_env()
    env.reset()
    for turn in range(10_000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
        if turn % 3 == 0:
            text += "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(40)))
        result = env.step(text)
        assert result.invalid in ("", "no_action", "unclosed_tag", INADMISSIBLE)
        assert not result.done


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 300_000,
        "<action>" * 300_000,
        "</action>" * 300_000,
        "<think></think>" * 200_000,
        "<action>" + "a " * 1_000_000 + "</action>",
        " " * 5_000_000 + "<action>",
        "x" * 5_000_000,
        "\n" * 3_000_000,
    ],
)
def test_megabytes_of_answer_take_no_longer_than_reading_them(text: str) -> None:
    env = household.tasks("train")[0].make_env()
    env.reset()
    started = time.perf_counter()
    assert env.step(text).invalid
    assert time.perf_counter() - started < 2


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_is_answered(text: str) -> None:
    env = HouseholdEnv(grounded_game(generated_problem("tiny", 1)))
    env.reset()
    assert env.step(text).observation.text


def test_tasks_are_named_picklable_and_in_a_fixed_order() -> None:
    tasks = household.tasks("validation", level="medium", max_tasks=12)
    assert [task.id for task in tasks][:2] == ["household/medium/validation/00000", "household/medium/validation/00001"]
    assert [task.family for task in tasks] == 2 * list(household.FAMILIES)
    for task in tasks:
        twin = pickle.loads(pickle.dumps(task))
        assert twin.make_env().reset() == task.make_env().reset()
        assert twin.demonstrate(3) == task.demonstrate(3)  # type: ignore[misc]
    heated = household.tasks("test", families=["pick_heat_then_place_in_recep"])
    assert {task.family for task in heated} == {"pick_heat_then_place_in_recep"}
    assert {task.id for task in heated} < {task.id for task in household.tasks("test")}


@pytest.mark.parametrize(
    "options",
    [
        {"split": "dev"},
        {"level": "easyy"},
        {"expert": "oracle"},
        {"families": ["pick"]},
        {"families": ["x"], "level": "tiny"},
    ],
)
def test_what_does_not_exist_is_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"unknown (split|level|expert|family) '.*': there is "):
        household.tasks(**options)  # type: ignore[arg-type]


def test_a_thousand_steps_take_a_fraction_of_a_second() -> None:
    rng = random.Random(0)
    env = household.tasks("train", level="hard")[0].make_env()
    observation = env.reset()
    started = time.perf_counter()
    for _ in range(1000):
        result = env.step(rng.choice(observation.choices))
        observation = env.reset() if result.done else result.observation
    assert time.perf_counter() - started < 1


def test_environments_load_without_torch() -> None:
    assert set(ENVIRONMENTS) >= {"household", "lookup"}
    code = "import sys, spear_rl.envs; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )
