"""What the check for authors finds, and what it lets pass."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from spear_rl.envs import ENVIRONMENTS
from spear_rl.envs.lookup import LookupEnv
from spear_rl.rollout import Observation, Task
from spear_rl.testing import check_environment


@pytest.mark.parametrize("env", ENVIRONMENTS)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_our_environments_pass(env, split):
    assert check_environment(ENVIRONMENTS[env](split)) == []


class Moody(LookupEnv):
    mood = itertools.count()

    def reset(self):
        super().reset()
        return Observation(f"mood {next(self.mood)}")


class Fragile(LookupEnv):
    def step(self, action):
        return super().step(action.encode("ascii").decode())


@pytest.mark.parametrize(
    ("tasks", "fault"),
    [
        ([], "no task at all"),
        ([Task("a", partial(LookupEnv, "red", "1"))] * 2, "occurs 2 times"),
        ([Task("a", lambda: LookupEnv("red", "1"))], "does not pickle"),
        ([Task("a", partial(Moody, "red", "1"))], "deterministic"),
        ([Task("a", partial(Fragile, "red", "1"))], "UnicodeEncodeError"),
    ],
)
def test_a_fault_is_named(tasks, fault):
    assert any(fault in found for found in check_environment(tasks))
