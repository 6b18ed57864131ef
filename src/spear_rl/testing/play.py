"""Playing a task to examine it: with an expert, with nonsense, at random; what is raised becomes a sentence."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from spear_rl.rollout.contract import ContractError, checked_actions, checked_reset, checked_step, with_location
from spear_rl.rollout.env import Environment, Observation, StepResult, Task

STRANGE = (
    "",
    "   ",
    "<action>",
    "<action></action>",
    "</action>",
    "\x00",
    "\u2603 \U0001f600",
    "no such action",
    "x" * 100_000,
)
"""Things a policy will say sooner or later."""


Heard = list[Observation | StepResult]
"""The first observation and the answers to all actions."""


@dataclass
class Timing:
    """How long resets and steps took, in seconds."""

    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def reset_ms(self) -> float:
        """Mean time of make_env and reset together."""
        return 1000 * math.fsum(self.resets) / max(len(self.resets), 1)

    @property
    def step_ms(self) -> float:
        return 1000 * math.fsum(self.steps) / max(len(self.steps), 1)


class BrokenError(Exception):
    """Nothing more can be said about a task."""


def expert_actions(task: Task, seed: int) -> list[str]:
    """What an expert says, in the words the task's instructions ask for; nothing where there is no expert."""
    if task.demonstrate is None:
        return []
    with _in_a_sentence(f"demonstrate({seed})"):
        actions = checked_actions(task.demonstrate(seed), f"demonstrate({seed})")
    return [task.answer_format.format(action=action) for action in actions]


@contextmanager
def _in_a_sentence(what: str) -> Iterator[None]:
    """Whatever is raised but Ctrl-C, also SystemExit, is a BrokenError."""
    try:
        yield
    except (KeyboardInterrupt, BrokenError):
        raise
    except ContractError as error:
        raise BrokenError(error.what) from error
    except BaseException as error:
        raise BrokenError(f"{what} raised {with_location(error)}") from error


class Play:
    """Plays a task, minds the clock and turns what is raised into a sentence."""

    def __init__(self, task: Task, max_turns: int, timing: Timing) -> None:
        self.task, self._max_turns, self._timing = task, max_turns, timing

    def made(self) -> Environment:
        with _in_a_sentence("make_env"):
            return self.task.make_env()

    def begun(self) -> tuple[Environment, Observation]:
        started = time.perf_counter()
        env = self.made()
        with _in_a_sentence("reset"):
            first = checked_reset(env)
        self._timing.resets.append(time.perf_counter() - started)
        return env, first

    def step(self, env: Environment, action: str) -> StepResult:
        started = time.perf_counter()
        with _in_a_sentence(f"told {action[:40]!r}, it"):
            result = checked_step(env, action)
        self._timing.steps.append(time.perf_counter() - started)
        return result

    def close(self, env: Environment) -> None:
        with _in_a_sentence("close"):
            env.close()

    def heard(self, actions: Sequence[str]) -> Heard:
        """All answers of an episode with these actions, as far as it goes."""
        env, first = self.begun()
        answers: Heard = [first]
        for action in actions[: self._max_turns]:
            result = self.step(env, action)
            answers.append(result)
            if result.done:
                break
        self.close(env)
        return answers

    @cached_property
    def scripts(self) -> list[list[str]]:
        """What is said in the episodes to compare: nonsense, choices at random, an expert's actions; never nothing."""
        scripts = list(STRANGE), self._random_choices(), expert_actions(self.task, 0)
        return [script for script in scripts if script]

    def _random_choices(self) -> list[str]:
        rng = random.Random(0)
        said: list[str] = []
        env, seen = self.begun()
        while seen.choices and len(said) < self._max_turns:
            said.append(self.task.answer_format.format(action=rng.choice(seen.choices)))
            result = self.step(env, said[-1])
            if result.done:
                break
            seen = result.observation
        self.close(env)
        return said
