"""Play a task to examine it, with an expert, nonsense or random choices; exceptions become sentences."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from spear_rl.rollout.contract import ContractError, checked_actions, with_location
from spear_rl.rollout.env import Environment, Observation, StepResult, Task
from spear_rl.rollout.workers.runner import checked_reset, checked_step

STRANGE = (
    *("", "   ", "<action>", "<action></action>", "</action>", "\x00", "\u2603 \U0001f600", "no such action"),
    "x" * 100_000,
)
"""Answers that a policy gives sooner or later."""


@dataclass
class Timing:
    """How long resets and steps took, in seconds, and what was seen on the way."""

    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    tool_turns: int = 0
    """Steps that used a tool."""

    @property
    def reset_ms(self) -> float:
        """Mean time of make_env and reset together."""
        return 1000 * math.fsum(self.resets) / max(len(self.resets), 1)

    @property
    def step_ms(self) -> float:
        return 1000 * math.fsum(self.steps) / max(len(self.steps), 1)


class BrokenError(Exception):
    """The task cannot be checked further."""


@contextmanager
def _as_broken(what: str) -> Iterator[None]:
    """Turn every exception but KeyboardInterrupt, also SystemExit, into a BrokenError."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except ContractError as error:
        raise BrokenError(error.what) from error
    except BaseException as error:
        raise BrokenError(f"{what} raised {with_location(error)}") from error


def expert_script(task: Task, seed: int) -> list[str]:
    """What an expert says, in the task's answer format; empty without an expert."""
    if task.demonstrate is None:
        return []
    with _as_broken(f"demonstrate({seed})"):
        actions = checked_actions(task.demonstrate(seed), f"demonstrate({seed})")
    return [task.answer_format.format(action=action) for action in actions]


class Play:
    """Plays a task and records the time it takes; raises BrokenError for whatever the environment raises."""

    def __init__(self, task: Task, max_turns: int, timing: Timing) -> None:
        self.task, self._max_turns, self._timing = task, max_turns, timing

    def make_env(self) -> Environment:
        with _as_broken("make_env"):
            return self.task.make_env()

    def start(self) -> tuple[Environment, Observation]:
        started = time.perf_counter()
        env = self.make_env()
        with _as_broken("reset"):
            first = checked_reset(env)
        self._timing.resets.append(time.perf_counter() - started)
        return env, first

    def step(self, env: Environment, action: str) -> StepResult:
        started = time.perf_counter()
        with _as_broken(f"told {action[:40]!r}, it"):
            result = checked_step(env, action)
        self._timing.steps.append(time.perf_counter() - started)
        self._timing.tool_turns += result.used_tool
        return result

    def close(self, env: Environment) -> None:
        with _as_broken("close"):
            env.close()

    def episode(self, actions: Sequence[str]) -> tuple[Observation, list[StepResult]]:
        """The first observation and the results of these actions, up to the episode's end."""
        env, first = self.start()
        results: list[StepResult] = []
        for action in actions[: self._max_turns]:
            results.append(self.step(env, action))
            if results[-1].done:
                break
        self.close(env)
        return first, results

    @cached_property
    def scripts(self) -> list[list[str]]:
        """Nonsense, random choices and an expert's actions, as far as there are any."""
        scripts = list(STRANGE), self._random_choices(), expert_script(self.task, 0)
        return [script for script in scripts if script]

    def answer(self, action: str) -> str:
        return self.task.answer_format.format(action=action)

    def _random_choices(self) -> list[str]:
        rng = random.Random(0)
        script: list[str] = []
        env, seen = self.start()
        while seen.choices and len(script) < self._max_turns:
            script.append(self.answer(rng.choice(seen.choices)))
            result = self.step(env, script[-1])
            if result.done:
                break
            seen = result.observation
        self.close(env)
        return script
