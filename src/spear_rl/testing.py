"""For authors: says what is wrong with an environment before a training does. Standard library and our types only."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence

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


def check_environment(tasks: Sequence[Task], *, num_tasks: int = 5, max_turns: int = 20) -> list[str]:
    """What is wrong with the environments of `tasks`, one sentence a fault; an empty list is a pass."""
    if not len(tasks):
        return ["there is no task at all"]
    faults = [f"the task id {name!r} occurs {n} times" for name, n in Counter(t.id for t in tasks).items() if n > 1]
    for task in tasks[:num_tasks]:
        try:
            pickle.dumps(task.make_env)
        except Exception as error:
            faults.append(f"{task.id}: make_env does not pickle, so no worker process can make it ({error})")
        try:
            faults += [f"{task.id}: {fault}" for fault in _faults(task, max_turns)]
        except Exception as error:
            faults.append(f"{task.id}: raised {type(error).__name__}: {error}")
    return faults


def _faults(task: Task, max_turns: int) -> list[str]:
    actions = [*(task.demonstrate(0) if task.demonstrate else []), *STRANGE][:max_turns]
    first, second = _transcript(task.make_env(), actions), _transcript(task.make_env(), actions)
    faults = [] if first == second else ["the same actions led to different answers: an episode must be deterministic"]
    for number, entry in enumerate(first):
        observation = entry.observation if isinstance(entry, StepResult) else entry
        if not isinstance(observation, Observation) or not isinstance(observation.text, str):
            faults.append(f"answer {number} holds no Observation with a text")
    for action in STRANGE:
        result = _transcript(task.make_env(), [action])[-1]
        if isinstance(result, StepResult) and result.reward > 0:
            faults.append(f"saying {action[:20]!r} at the start is rewarded")
    return faults


def _transcript(env: Environment, actions: Sequence[str]) -> list[Observation | StepResult]:
    out: list[Observation | StepResult] = [env.reset()]
    for action in actions:
        result = env.step(action)
        out.append(result)
        if result.done:
            break
    env.close()
    return out
