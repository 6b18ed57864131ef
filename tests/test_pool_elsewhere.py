"""Environments from another virtual environment, with packages that this one does not have."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import partial

import pytest

from spear_rl.errors import ConfigError
from spear_rl.rollout import ChatRenderer, collect_groups, demonstration, growing_chat
from spear_rl.rollout.workers.other_venv import tasks_from_other_venv
from spear_rl.rollout.workers.pool import Pool
from spear_rl.testing import check_environment
from test_stream import Digits

GAME = '''
import sys
from functools import partial
from spear_rl.rollout import Observation, StepResult, Task

class Mine(Observation):
    """A class that only this virtual environment knows."""

class Game:
    def __init__(self, number):
        self._number, self._taken = number, 0
    def reset(self):
        return Mine("red code %d" % self._number, state_key="0")
    def step(self, action):
        if self._taken >= self._number:
            raise RuntimeError("over")
        self._taken += action == "look"
        done = self._taken == self._number
        return StepResult(Mine("code %d" % self._taken, state_key=str(self._taken)), float(done), done)
    def close(self):
        pass

def demonstrated(number, seed):
    return ["look"] * number

def tasks(split, *, kinds=("a", "b")):
    assert "torch" not in sys.modules
    return [Task(f"mine/{split}/{n}", partial(Game, n), family=kinds[n % len(kinds)], instructions="Look.",
                 demonstrate=partial(demonstrated, n)) for n in (1, 2, 3)]
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """A virtual environment with one module of its own and nothing else."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text(GAME)
    return str(folder / "bin" / "python")


def test_tasks_of_another_virtual_environment_play_in_its_workers_as_if_they_were_here(python, tokenizer):
    with pytest.raises(ModuleNotFoundError):
        import only_there  # noqa: F401
    tasks = tasks_from_other_venv("train", python=python, name="only_there:tasks", kinds=["x", "y"])
    assert [(task.id, task.family, task.instructions) for task in tasks] == [
        ("mine/train/1", "y", "Look."),
        ("mine/train/2", "x", "Look."),
        ("mine/train/3", "y", "Look."),
    ]
    options = {"group_size": 2, "max_turns": 4, "step": 0, "layout": partial(growing_chat, detail="short")}
    options |= {"renderer": ChatRenderer(tokenizer)}
    with Pool(num_workers=2, python=python) as pool:
        groups = collect_groups(tasks, generator=Digits(tokenizer, random.Random(0)), envs=pool, **options)
    assert [len(trajectory.turns) for group in groups for trajectory in group.trajectories] == [4] * 6
    assert groups == collect_groups(tasks, generator=Digits(tokenizer, random.Random(1)), **options)


def test_its_experts_and_the_check_for_authors_work_from_here(python, tokenizer):
    tasks = tasks_from_other_venv("train", python=python, name="only_there:tasks")
    shown = demonstration(tasks[2], renderer=ChatRenderer(tokenizer), tagged=False, seed=0)
    assert (len(shown.turns), shown.reward) == (3, 1.0)
    assert check_environment(tasks) == []


def test_what_is_wrong_elsewhere_is_said_in_one_sentence(python):
    with pytest.raises(ConfigError, match="there is no module no_such_game"):
        tasks_from_other_venv("train", python=python, name="no_such_game:tasks")
    with pytest.raises(ConfigError, match="no environment worker can be started"):
        tasks_from_other_venv("train", python="/no/such/python", name="only_there:tasks")
