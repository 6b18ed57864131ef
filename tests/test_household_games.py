"""Generated games, panels and experts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from household_worlds import twin_of
from spear_rl.envs.household import MANIFEST, recorded_seeds
from spear_rl.envs.household.experts import EXPERTS, clumsy_commands, optimal_commands, searched_commands
from spear_rl.envs.household.families import FAMILIES, parsed_task
from spear_rl.envs.household.generator import LEVELS, generated_problem
from spear_rl.envs.household.panel import rebuilt_manifest
from spear_rl.envs.household.rules.game import Game, grounded_game
from spear_rl.envs.household.rules.pddl import read_problem, task_sentence
from spear_rl.envs.household.rules.world import World
from spear_rl.envs.shared.generated_panels import SPLITS, content_split, panel_hash, recorded_manifest

REAL_DATA = os.environ.get("ALFWORLD_DATA", "")
levels = st.sampled_from(list(LEVELS))


@settings(max_examples=150, deadline=None)
@given(levels, st.integers(0, 10**9))
def test_a_generated_game_keeps_to_its_level(level: str, seed: int) -> None:
    wanted, problem = LEVELS[level], generated_problem(level, seed)
    game = grounded_game(problem)
    assert wanted.receptacles[0] <= len(game.receptacle_names) <= wanted.receptacles[1]
    assert wanted.objects[0] <= len(game.object_names) <= wanted.objects[1]
    assert len(game.openable) <= wanted.max_openable
    assert max(Counter(name.split()[0] for name in game.object_names).values()) <= wanted.max_of_kind
    assert parsed_task(problem.task).family == wanted.families[seed % len(wanted.families)]
    assert not World(game).won
    for receptacle, inside in enumerate(game.start_contents):
        assert set(inside) <= game.accepts[receptacle]


@settings(max_examples=150, deadline=None)
@given(levels, st.integers(0, 10**9), st.integers(0, 10**9))
def test_both_experts_win_every_game(level: str, seed: int, expert_seed: int) -> None:
    game = grounded_game(generated_problem(level, seed))
    lengths = {}
    for name, expert in EXPERTS.items():
        world, commands = World(game), expert(game, expert_seed)
        assert commands == expert(game, expert_seed)
        for command in commands:
            assert not world.won
            assert command in world.commands()
            world.act(command)
        assert world.won
        lengths[name] = len(commands)
    assert lengths["optimal"] <= lengths["search"] <= 2 * len(game.receptacle_names) + 16


def shortest_length(game: Game, limit: int) -> int | None:
    """How many commands the shortest win takes, by trying everything; None if it is `limit` or more."""
    world = World(game)
    seen, queue = {world.state_key()}, deque([(world, 0)])
    while queue:
        world, depth = queue.popleft()
        if world.won:
            return depth
        if depth + 1 >= limit:
            continue
        for command in world.commands():
            if not command.startswith(("look", "inventory", "help", "examine")):
                twin = twin_of(world)
                twin.act(command)
                key = twin.state_key()
                if key not in seen:
                    seen.add(key)
                    queue.append((twin, depth + 1))
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_optimal_expert_is_as_short_as_trying_everything(family: str) -> None:
    for number in range(20):
        game = grounded_game(generated_problem("easy", 6 * number + FAMILIES.index(family)))
        length = len(optimal_commands(game))
        assert shortest_length(game, length + 1) == length


def test_the_searching_expert_uses_only_what_it_was_told() -> None:
    for seed in range(12):
        game = grounded_game(generated_problem("hard", seed))
        known = World(game).intro()
        world = World(game)
        for command in searched_commands(game, seed):
            if command.startswith("take "):
                assert command[5:].split(" from ")[0] in known
            elif command.startswith("use "):
                assert command[4:] in known
            known += world.act(command)


def test_another_seed_searches_in_another_order() -> None:
    game = grounded_game(generated_problem("hard", 0))
    assert len({tuple(searched_commands(game, seed)) for seed in range(10)}) > 1


def test_a_seed_gives_the_same_game_in_every_process() -> None:
    code = (
        "from spear_rl.envs.household.generator import LEVELS, generated_problem\n"
        "from spear_rl.envs.household.experts import EXPERTS\n"
        "from spear_rl.envs.household.rules.game import Game, grounded_game\n"
        "for level in LEVELS:\n"
        "    for seed in range(12):\n"
        "        problem = generated_problem(level, seed)\n"
        "        game = grounded_game(problem)\n"
        "        print(problem.content_hash(), problem.task, [e(game, 7) for e in EXPERTS.values()])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("0", "1", "4242")
    }
    assert len(said) == 1


def test_games_are_varied() -> None:
    problems = [generated_problem("easy", seed) for seed in range(300)]
    assert len({problem.content_hash() for problem in problems}) >= 299
    asked = {parsed_task(problem.task) for problem in problems}
    assert len(asked) > 150
    assert len({task.thing for task in asked}) > 30
    assert len({task.place for task in asked}) > 12


@pytest.mark.parametrize("level", LEVELS)
def test_panels_are_as_recorded_balanced_and_disjoint(level: str) -> None:
    families = LEVELS[level].families
    contents: dict[str, list[str]] = {}
    for split, size in SPLITS.items():
        seeds, digest = recorded_seeds(level, split), recorded_manifest(MANIFEST)[level]["sha256"][split]
        assert size <= len(seeds) < size + len(families)
        assert [seed % len(families) for seed in seeds] == [n % len(families) for n in range(len(seeds))]
        contents[split] = [generated_problem(level, seed).content_hash() for seed in seeds]
        assert panel_hash(contents[split]) == digest
        assert {content_split(content) for content in contents[split]} == {split}
    everything = [content for panel_contents in contents.values() for content in panel_contents]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize("level", LEVELS)
def test_both_experts_win_a_sample_of_every_panel(level: str) -> None:
    for split in SPLITS:
        for seed in random.Random(level + split).sample(recorded_seeds(level, split), 36):
            game = grounded_game(generated_problem(level, seed))
            assert 0 < len(optimal_commands(game)) <= len(searched_commands(game, seed)) <= 50


@pytest.mark.slow
def test_the_manifest_is_what_the_generator_gives() -> None:
    for level, rebuilt in rebuilt_manifest(["tiny", "easy"]).items():
        assert rebuilt == recorded_manifest(MANIFEST)[level]


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA, reason="ALFWORLD_DATA does not point at ALFWorld's games")
@pytest.mark.parametrize("family", FAMILIES)
def test_alfworlds_own_games_are_read_and_won(family: str) -> None:
    paths = sorted(Path(REAL_DATA).glob(f"json_2.1.1/*/{family}*/*/game.tw-pddl"))
    for path in random.Random(family).sample(paths, min(20, len(paths))):
        data = json.loads(path.read_text())
        game = grounded_game(read_problem(data["pddl_problem"], task_sentence(data["grammar"])))
        world = World(game)
        for command in data["walkthrough"]:
            world.act(command)
        assert world.won
        assert len(optimal_commands(game)) <= len(data["walkthrough"])
        assert searched_commands(game, 0)


@settings(max_examples=60, deadline=None)
@given(level=levels, seed=st.integers(0, 500), demonstration_seed=st.integers(0, 10**6))
def test_the_clumsy_demonstrator_wins_or_only_looks_around(level: str, seed: int, demonstration_seed: int) -> None:
    game = grounded_game(generated_problem(level, seed))
    commands = clumsy_commands(game, demonstration_seed)
    assert commands == clumsy_commands(game, demonstration_seed)
    world = World(game)
    for command in commands:
        assert not world.won
        if command in world.commands():
            world.act(command)
        else:
            assert command.startswith("take "), "its only mistake is to reach for what is not there"
    idle = ("go to ", "examine ", "look", "inventory")
    assert world.won or (len(commands) == 4 and all(command.startswith(idle) for command in commands))


def test_the_clumsy_demonstrator_shows_both_mistakes_and_wins() -> None:
    games = [grounded_game(generated_problem("easy", seed)) for seed in range(120)]
    demonstrations = [clumsy_commands(game, number) for number, game in enumerate(games)]
    wins, mistakes = 0, 0
    for game, commands in zip(games, demonstrations, strict=True):
        world = World(game)
        for command in commands:
            mistakes += command not in world.commands()
            if command in world.commands():
                world.act(command)
        wins += world.won
    assert 0.5 < wins / len(games) < 0.9
    assert mistakes > 30
