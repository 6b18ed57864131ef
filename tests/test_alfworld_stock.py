"""ALFWorld's own games on both backends: the same texts, commands, score and end as the stock engine's."""

from __future__ import annotations

import json
import os
import random
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from household_worlds import write_problem
from spear_rl.envs import alfworld
from spear_rl.envs.alfworld.gamefile import read_game_file
from spear_rl.envs.alfworld.stock import stock_env
from spear_rl.envs.household.experts import searched_commands
from spear_rl.envs.household.generator import generated_problem
from spear_rl.envs.household.rules.game import grounded_game
from spear_rl.rollout.env import Environment, Observation, StepResult, Task

# Importing alfworld sets the variable to a default of its own.
REAL_DATA = os.environ.get("ALFWORLD_DATA", "")

textworld = pytest.importorskip("textworld")
pytest.importorskip("alfworld")
pytest.importorskip("fast_downward")

needs_data = pytest.mark.skipif(not REAL_DATA, reason="ALFWORLD_DATA does not point at ALFWorld's games")
GAMES_PER_TYPE = int(os.environ.get("STOCK_GAMES_PER_TYPE", "50"))


def packaged(name: str) -> str:
    return (resources.files("alfworld") / "data" / name).read_text()


def write_game(folder: Path, seed: int, **changes: str) -> Path:
    problem = generated_problem("medium", seed)
    fields: dict[str, Any] = {
        "pddl_domain": packaged("alfred.pddl"),
        "grammar": packaged("alfred.twl2").replace("UNKNOWN GOAL.", problem.task),
        "pddl_problem": write_problem(problem),
        "solvable": True,
        "walkthrough": searched_commands(grounded_game(problem)),
    }
    folder.mkdir(parents=True)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(fields | changes))
    return path


class Pair:
    """Plays one task on both backends and compares everything a policy or a trainer can see."""

    def __init__(self, fast: Task, stock: Task) -> None:
        assert (fast.id, fast.family) == (stock.id, stock.family)
        self.fast, self.stock, self.name = fast.make_env(), stock.make_env(), fast.id
        self.keys: dict[str, str] = {}
        first, second = self.fast.reset(), self.stock.reset()
        self.compare(first, second, "at the start")
        self.choices = first.choices

    def step(self, action: str) -> StepResult:
        one, two = self.fast.step(action), self.stock.step(action)
        said = f"{self.name}: {action!r}"
        self.compare(one.observation, two.observation, said)
        for field in ("reward", "done", "success", "invalid", "used_tool"):
            assert getattr(one, field) == getattr(two, field), said
        if not one.invalid:
            assert self._engine_score(self.stock) == bool(one.success), said
        self.choices = one.observation.choices
        return one

    def compare(self, one: Observation, two: Observation, said: str) -> None:
        assert one.text == two.text, said
        assert one.choices == two.choices, said
        # What is one state to `fast` is one to the stock engine. Not the reverse: its list of facts does not notice
        # that a lamp is off again.
        assert self.keys.setdefault(one.state_key, two.state_key) == two.state_key, said

    def close(self) -> None:
        self.fast.close()
        self.stock.close()

    @staticmethod
    def _engine_score(env: Environment) -> int:
        return env._episode._state["score"]  # type: ignore[attr-defined,no-any-return]


def tasks_on_both(split: str, **options: Any) -> list[tuple[Task, Task]]:
    fast, stock = (alfworld.tasks(split, backend=backend, **options) for backend in alfworld.BACKENDS)
    return list(zip(fast, stock, strict=True))


def test_the_packaged_grammar_and_rules_are_known_as_published(tmp_path: Path) -> None:
    assert read_game_file(write_game(tmp_path / "game", 0)).is_published


def test_generated_games_play_alike_on_both_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    for seed, family in enumerate(alfworld.TYPES):
        write_game(tmp_path / "json_2.1.1" / "valid_unseen" / f"{family}-A-None-B-1" / "trial", seed)
    arguments = list(sys.argv)
    for number, (fast, stock) in enumerate(tasks_on_both("test", data=str(tmp_path), expert="walkthrough")):
        assert fast.demonstrate is not None
        for actions in (fast.demonstrate(0), _erratic(number)):
            pair = Pair(fast, stock)
            results = [pair.step(action if isinstance(action, str) else action(pair.choices)) for action in actions]
            assert isinstance(actions, list) is bool(results[-1].success)
            pair.close()
    assert sys.argv == arguments


def test_a_grammar_with_code_in_it_is_refused_though_the_engine_would_run_it(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = f"{{__import__('pathlib').Path('{mark}').touch() or 'Hello'}}"
    banner = "-= Welcome to TextWorld, ALFRED! =-"
    grammar = packaged("alfred.twl2").replace(banner, f"{code} {banner}")
    assert code in grammar
    path = write_game(tmp_path / "game", 0, grammar=grammar)
    env = stock_env(str(path), "", 10.0)
    with pytest.raises(ValueError, match="would run the code in it, so it is refused"):
        env.reset()
    sentence = packaged("alfred.twl2").replace("UNKNOWN GOAL.", code)
    hidden = stock_env(str(write_game(tmp_path / "hidden", 0, grammar=sentence)), "", 10.0)
    with pytest.raises(ValueError, match="would run the code in it, so it is refused"):
        hidden.reset()
    assert not mark.exists()
    textworld.start(str(path)).reset()
    assert mark.exists()


def test_an_environment_can_be_reset_and_closed_again_and_again(tmp_path: Path) -> None:
    path = str(write_game(tmp_path / "game", 3))
    for _ in range(10):
        env = stock_env(path, "", 10.0)
        first = env.reset()
        env.step("<action>" + first.choices[0] + "</action>")
        assert env.reset() == first
        env.close()
        env.close()
        with pytest.raises(RuntimeError, match="over"):
            env.step("look")


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("family", alfworld.TYPES)
def test_every_walkthrough_of_valid_seen_wins_on_both_backends(family: str) -> None:
    for fast, stock in tasks_on_both("valid_seen", data=REAL_DATA, types=[family], expert="walkthrough"):
        assert stock.demonstrate is not None
        pair = Pair(fast, stock)
        results = [pair.step(action) for action in stock.demonstrate(0)]
        assert (results[-1].success, results[-1].reward, results[-1].done) == (True, 10.0, True), fast.id
        pair.close()


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("family", alfworld.TYPES)
def test_random_play_is_the_same_on_both_backends(family: str) -> None:
    both = tasks_on_both("train", data=REAL_DATA, types=[family], max_tasks=GAMES_PER_TYPE)
    assert len(both) == GAMES_PER_TYPE
    for number, (fast, stock) in enumerate(both):
        pair = Pair(fast, stock)
        for next_action in _erratic(number):
            if pair.step(next_action(pair.choices)).done:
                break
        pair.close()


def _erratic(seed: int, num_turns: int = 30) -> Any:
    """Random play that prefers whatever changes the world, with a slip of the tongue now and then."""
    rng = random.Random(seed)

    def next_action(choices: tuple[str, ...]) -> str:
        if rng.random() < 0.06:
            return rng.choice(
                ["", "dance", "Look", "help", "go to nowhere 1", "<action>look", "a\nb", "examine fridge"]
            )
        by_verb: dict[str, list[str]] = {}
        for command in choices:
            by_verb.setdefault(command.split()[0], []).append(command)
        weights = [{"go": 5.0, "inventory": 0.3, "look": 1.0}.get(verb, 2.0) for verb in by_verb]
        command = rng.choice(by_verb[rng.choices(list(by_verb), weights)[0]])
        return f"<think>hm</think><action>{command}</action>" if rng.random() < 0.5 else command

    return (next_action for _ in range(num_turns))
