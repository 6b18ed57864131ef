"""The household against the engine ALFWorld runs on (textworld, alfworld): same texts, same commands, same end."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from household_worlds import write_problem
from spear_rl.envs.household.experts import optimal_commands, searched_commands
from spear_rl.envs.household.families import FAMILIES
from spear_rl.envs.household.generator import LEVELS, generated_problem
from spear_rl.envs.household.rules.game import Game, grounded_game
from spear_rl.envs.household.rules.pddl import read_problem, task_sentence
from spear_rl.envs.household.rules.world import World

# Importing alfworld sets the variable to a default of its own.
REAL_DATA = os.environ.get("ALFWORLD_DATA", "")

textworld = pytest.importorskip("textworld")
pytest.importorskip("alfworld")
fast_downward = pytest.importorskip("fast_downward")

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"


@pytest.fixture(scope="module", autouse=True)
def _memoised_engine() -> Iterator[None]:
    """The stock engine translates and parses the same texts over and over; remembering them only saves time."""
    import textworld.logic
    from textworld.envs.pddl import textgen

    patch = pytest.MonkeyPatch()
    translate = fast_downward.pddl2sas
    # The optimised translation only serves the engine's own planner, which nobody asks here.
    memoised = functools.cache(lambda domain, problem: translate(domain, problem, False, False))
    patch.setattr(
        fast_downward, "pddl2sas", lambda domain, problem, verbose=False, optimize=False: memoised(domain, problem)
    )
    parse_query = textworld.logic.Rule.parse_conjunctive_query
    patch.setattr(textworld.logic.Rule, "parse_conjunctive_query", staticmethod(functools.cache(parse_query)))
    parse_text = textgen._parse_and_convert
    parsed = functools.cache(lambda text, rule_name: parse_text(text, rule_name=rule_name))
    patch.setattr(
        textgen,
        "_parse_and_convert",
        lambda text, rule_name="symbols", **_: copy.deepcopy(parsed(text, rule_name)),
    )

    def copied_context(context: dict[str, Any]) -> dict[str, Any]:
        return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}

    def copied_symbol(symbol: Any, context: dict[str, Any]) -> Any:
        twin = copy.copy(symbol)
        twin.context = copied_context(context)
        return twin

    patch.setattr(textgen, "copy_context", copied_context)
    patch.setattr(textgen.Symbol, "copy", copied_symbol)
    yield
    patch.undo()


def stock_game(data: dict[str, str], path: Path) -> Any:
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    path.write_text(json.dumps(data))
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    return textworld.start(str(path), infos, wrappers=[AlfredDemangler(shuffle=False)])


def packaged(name: str) -> str:
    return (resources.files("alfworld") / "data" / name).read_text()


def assert_same(stock: Any, world: World, text: str, said: str) -> None:
    assert stock.feedback == text, said
    assert list(stock.admissible_commands) == list(world.commands()), said
    assert bool(stock.won) == world.won, said


def play_both(stock: Any, game: Game, next_command: Callable[[World, int], str | None]) -> World:
    world = World(game)
    assert_same(stock.reset(), world, BANNER + world.intro(), "at the start")
    turn = 0
    while (command := next_command(world, turn)) is not None:
        state, _, _ = stock.step(command)
        assert_same(state, world, world.act(command), f"turn {turn}: {command!r}")
        turn += 1
    return world


def scripted(commands: list[str]) -> Callable[[World, int], str | None]:
    return lambda world, turn: commands[turn] if turn < len(commands) else None


def erratic(seed: int, num_turns: int) -> Callable[[World, int], str | None]:
    """Random play that prefers whatever changes the world, with a slip of the tongue now and then."""
    rng = random.Random(seed)

    def next_command(world: World, turn: int) -> str | None:
        if turn >= num_turns:
            return None
        if rng.random() < 0.04:
            return rng.choice(["", "dance", "Look", "go to nowhere 1", "take all", "examine fridge", "look "])
        by_verb: dict[str, list[str]] = {}
        for command in world.commands():
            by_verb.setdefault(command.split()[0], []).append(command)
        weights = [{"go": 6.0, "help": 0.1, "inventory": 0.3, "look": 1.0}.get(verb, 2.0) for verb in by_verb]
        command = rng.choice(by_verb[rng.choices(list(by_verb), weights)[0]])
        return f" {command}  " if rng.random() < 0.05 else command

    return next_command


CASES = [(level, family) for level in LEVELS for family in LEVELS[level].families]


@pytest.mark.parametrize(("level", "family"), CASES)
def test_generated_games_play_as_in_the_stock_engine(level: str, family: str, tmp_path: Path) -> None:
    families = LEVELS[level].families
    for number in range(2):
        seed = 600 * (number + 1) + families.index(family)
        problem = generated_problem(level, seed)
        game = grounded_game(problem)
        grammar = packaged("alfred.twl2").replace("UNKNOWN GOAL.", problem.task)
        data = {"pddl_domain": packaged("alfred.pddl"), "grammar": grammar, "pddl_problem": write_problem(problem)}
        stock = stock_game(data, tmp_path / f"{number}.tw-pddl")
        assert play_both(stock, game, scripted(optimal_commands(game))).won
        assert play_both(stock, game, scripted(searched_commands(game, seed))).won
        play_both(stock, game, erratic(seed, 60))


ODD_ROOM = """
(define (problem odd) (:domain alfred)
(:objects agent1 - agent
  loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 loc_bar_4 - location
  drawer_bar_1 drawer_bar_2 counter_bar_1 fridge_bar_1 microwave_bar_1 sink_bar_1_bar_sinkbasin - receptacle
  apple_bar_1 apple_bar_2 bread_bar_1 knife_bar_1 butterknife_bar_1 mug_bar_1 pen_bar_1 pencil_bar_1 lamp_bar_1
  lamp_bar_2 egg_bar_1 egg_bar_1_bar_cracked spoon_bar_1 unused_bar_1 nameless - object
  drawertype countertype fridgetype microwavetype sinkbasintype - rtype
  appletype breadtype knifetype butterknifetype mugtype pentype penciltype lamptype eggtype spoontype - otype)
(:init (atlocation agent1 START) (receptacleatlocation drawer_bar_1 loc_bar_1)
  (receptacleatlocation drawer_bar_2 loc_bar_1) (receptacleatlocation counter_bar_1 loc_bar_1)
  (receptacleatlocation fridge_bar_1 loc_bar_2) (receptacleatlocation microwave_bar_1 loc_bar_2)
  (receptacleatlocation sink_bar_1_bar_sinkbasin loc_bar_3) (receptacletype drawer_bar_1 drawertype)
  (receptacletype drawer_bar_2 drawertype) (receptacletype counter_bar_1 countertype)
  (receptacletype fridge_bar_1 fridgetype) (receptacletype microwave_bar_1 microwavetype)
  (receptacletype sink_bar_1_bar_sinkbasin sinkbasintype) (openable drawer_bar_1) (openable drawer_bar_2)
  (opened drawer_bar_2) (openable fridge_bar_1) (openable microwave_bar_1) (objecttype apple_bar_1 appletype)
  (objecttype apple_bar_2 appletype) (objecttype bread_bar_1 breadtype) (objecttype knife_bar_1 knifetype)
  (objecttype butterknife_bar_1 butterknifetype) (objecttype mug_bar_1 mugtype) (objecttype pen_bar_1 pentype)
  (objecttype pencil_bar_1 penciltype) (objecttype lamp_bar_1 lamptype) (objecttype lamp_bar_2 lamptype)
  (objecttype egg_bar_1 eggtype) (objecttype spoon_bar_1 spoontype) CONTAINS
  (inreceptacle apple_bar_1 counter_bar_1) (inreceptacle apple_bar_1 drawer_bar_2)
  (inreceptacle apple_bar_2 fridge_bar_1) (inreceptacle bread_bar_1 drawer_bar_1)
  (inreceptacle knife_bar_1 counter_bar_1) (inreceptacle butterknife_bar_1 drawer_bar_2)
  (inreceptacle mug_bar_1 counter_bar_1) (inreceptacle mug_bar_1 microwave_bar_1)
  (inreceptacle pen_bar_1 drawer_bar_2) (inreceptacle pencil_bar_1 counter_bar_1)
  (inreceptacle lamp_bar_1 drawer_bar_1) (inreceptacle lamp_bar_2 counter_bar_1)
  (inreceptacle egg_bar_1_bar_cracked fridge_bar_1) (inreceptacle spoon_bar_1 sink_bar_1_bar_sinkbasin)
  (objectatlocation apple_bar_1 loc_bar_1) (objectatlocation apple_bar_1 loc_bar_3)
  (objectatlocation apple_bar_2 loc_bar_4) (objectatlocation bread_bar_1 loc_bar_1)
  (objectatlocation egg_bar_1 loc_bar_2) (objectatlocation spoon_bar_1 loc_bar_3)
  (objectatlocation knife_bar_1 loc_bar_1) (objectatlocation mug_bar_1 loc_bar_1)
  (objectatlocation pencil_bar_1 loc_bar_1) (pickupable apple_bar_1) (pickupable apple_bar_2)
  (pickupable bread_bar_1) (pickupable knife_bar_1) (pickupable butterknife_bar_1) (pickupable mug_bar_1)
  (pickupable pencil_bar_1) (pickupable lamp_bar_2) (pickupable egg_bar_1_bar_cracked) (pickupable spoon_bar_1)
  (toggleable lamp_bar_1) (toggleable lamp_bar_2) (isreceptacleobject mug_bar_1)
  (inreceptacleobject spoon_bar_1 mug_bar_1) (inreceptacleobject pen_bar_1 mug_bar_1) (sliceable apple_bar_1)
  (sliceable apple_bar_2) (sliceable bread_bar_1) (sliceable egg_bar_1) (cleanable apple_bar_1)
  (cleanable apple_bar_2) (cleanable mug_bar_1) (cleanable spoon_bar_1) (cleanable knife_bar_1)
  (heatable apple_bar_1) (heatable apple_bar_2) (heatable bread_bar_1) (coolable apple_bar_1) (coolable apple_bar_2)
  (coolable bread_bar_1) (coolable mug_bar_1) (heatable mug_bar_1) (iscool apple_bar_2) (iscool mug_bar_1))
(:goal GOAL))
"""
ODD_GOALS = [
    "(exists (?r - receptacle ?o - object) (and (inreceptacle ?o ?r) (objecttype ?o pentype)))",
    "(forall (?o - object) (imply (sliceable ?o) (or (issliced ?o) (not (pickupable ?o)))))",
    "(and (not (exists (?o - object) (inreceptacle ?o counter_bar_1))) (opened drawer_bar_1)"
    " (not (opened drawer_bar_2)))",
    "(or (ison lamp_bar_1) (and (ishot bread_bar_1) (isclean apple_bar_1)) (holds agent1 spoon_bar_1))",
    "(exists (?l - location) (and (atlocation agent1 ?l) (objectatlocation knife_bar_1 ?l) (not (holdsany agent1))"
    " (not (= ?l loc_bar_1))))",
    "(and (issliced apple_bar_1) (not (ison lamp_bar_2)) (istoggled lamp_bar_2))",
    "(exists (?o1 ?o2 - object) (and (not (= ?o1 ?o2)) (inreceptacle ?o1 microwave_bar_1)"
    " (inreceptacle ?o2 sink_bar_1_bar_sinkbasin)))",
]


def tour() -> list[str]:
    """A way through the odd room that brings every object into every state, and tidies up in the end."""
    treatments = {"clean": "sinkbasin 1", "heat": "microwave 1", "cool": "fridge 1"}
    commands = ["look", "go to counter 1", "examine counter 1", "open drawer 2", "use lamp 2", "use lamp 1", "look"]
    for thing, home, states in (
        ("apple 2", "counter 1", "slice clean heat cool heat"),
        ("apple 1", "fridge 1", "heat cool clean cool heat slice cool"),
        ("bread 1", "drawer 2", "heat cool slice heat cool"),
        ("mug 1", "microwave 1", "slice cool clean"),
        ("knife 1", "counter 1", "clean"),
    ):
        commands += [f"go to {home}", f"open {home}", f"take {thing} from {home}", "look", f"examine {thing}"]
        for verb in states.split():
            appliance = treatments.get(verb, "counter 1")
            commands += [f"go to {appliance}", f"{verb} {thing} with {appliance}"]
            if verb == "slice":
                commands += [f"move {thing} to drawer 1", "look", f"take {thing} from drawer 1"]
                commands += [f"move {thing} to counter 1", "look", "take knife 1 from counter 1"]
                commands += [f"slice {thing} with knife 1", "move knife 1 to counter 1", f"take {thing} from counter 1"]
            commands.append(f"examine {thing}")
        commands += ["go to counter 1", f"move {thing} to drawer 2", "look", "inventory"]
    commands += ["take lamp 1 from counter 1", "examine lamp 1", "use lamp 1", "move lamp 1 to drawer 2", "use lamp 1"]
    commands += ["take lamp 1 from drawer 2", "move lamp 1 to counter 1", "use lamp 1", "look"]
    for receptacle in ("drawer 2", "drawer 1"):
        for thing in ("knife 1", "pencil 1", "mug 1", "lamp 1", "apple 2"):
            commands += [f"take {thing} from counter 1", f"examine {thing}", f"move {thing} to {receptacle}", "look"]
    commands += ["close drawer 1", "go to sinkbasin 1", "take spoon 1 from sinkbasin 1", "examine spoon 1", "help"]
    commands += ["go to microwave 1", "move spoon 1 to microwave 1", "go to counter 1", "take knife 1 from drawer 2"]
    return [*commands, "go to sinkbasin 1", "move knife 1 to sinkbasin 1", "look", "examine sinkbasin 1"]


@pytest.mark.parametrize("number", range(len(ODD_GOALS)))
def test_an_odd_room_plays_as_in_the_stock_engine(number: int, tmp_path: Path) -> None:
    kinds = ("apple", "bread", "knife", "butterknife", "mug", "pencil", "lamp", "egg", "spoon")
    places = ("drawer", "counter", "fridge", "microwave", "sinkbasin")
    contains = " ".join(f"(cancontain {place}type {kind}type)" for place in places for kind in kinds)
    start = f"loc_bar_{number % 4}"
    text = ODD_ROOM.replace("CONTAINS", contains).replace("GOAL", ODD_GOALS[number]).replace("START", start)
    task = "tidy up."
    data = {"pddl_domain": packaged("alfred.pddl"), "pddl_problem": text}
    data["grammar"] = packaged("alfred.twl2").replace("UNKNOWN GOAL.", task)
    stock = stock_game(data, tmp_path / "odd.tw-pddl")
    problem = read_problem(text, task)
    game = grounded_game(problem)
    won_at = []

    def guide(world: World, turn: int) -> str | None:
        won_at.extend([turn] * world.won)
        return scripted(tour())(world, turn)

    play_both(stock, game, guide)
    assert won_at
    play_both(stock, game, erratic(number, 100))
    assert read_problem(write_problem(problem), task).content_hash() == problem.content_hash()


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA, reason="ALFWORLD_DATA does not point at ALFWorld's games")
@pytest.mark.parametrize("family", FAMILIES)
def test_alfworlds_own_games_play_as_in_the_stock_engine(family: str, tmp_path: Path) -> None:
    paths = sorted(Path(REAL_DATA).glob(f"json_2.1.1/*/{family}*/*/game.tw-pddl"))
    for number, path in enumerate(random.Random(family).sample(paths, 4)):
        data = json.loads(path.read_text())
        game = grounded_game(read_problem(data["pddl_problem"], task_sentence(data["grammar"])))
        stock = stock_game(data, tmp_path / f"{number}.tw-pddl")
        assert play_both(stock, game, scripted(data["walkthrough"])).won
        play_both(stock, game, erratic(number, 40))
