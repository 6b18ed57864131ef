"""A content hash per task of any environment: `python -m spear_rl.envs.adapters.manifest ENV SPLIT` prints them, and
with `--verify FILE` compares them with another machine's.

A task's content is what its environment answers to a scripted episode: moves drawn from its choices by the task's id,
or else its demonstration with seed 0, or else one question mark.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

from spear_rl.envs import tasks_fn
from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.shared.manifests import contents_sha256, printed_or_verified
from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.tasks import panel_of

MAX_STEPS = 20
"""Of a scripted episode."""


def content_hash(task: Task) -> str:
    """The SHA-256 of the instructions, and of all that a scripted episode shows and pays."""
    found = hashlib.sha256(repr((task.instructions, task.tools)).encode("utf-8", "surrogatepass"))
    dice, env = Dice("manifest", task.id), task.make_env()
    try:
        seen = env.reset()
        found.update(_shown(seen))
        script = task.demonstrate(0)[:MAX_STEPS] if task.demonstrate and not seen.choices else ["?"]
        for number in range(MAX_STEPS if seen.choices else len(script)):
            result = env.step(dice.choice(seen.choices) if seen.choices else script[min(number, len(script) - 1)])
            seen = result.observation
            found.update(_shown(seen, result.reward, result.done, result.success, result.invalid))
            if result.done:
                break
    finally:
        env.close()
    return found.hexdigest()


def _shown(seen: Observation, *more: object) -> bytes:
    return repr((seen.text, seen.choices, seen.images, *more)).encode("utf-8", "surrogatepass")


def manifest_of(env: str, split: str, options: dict[str, Any], count: int | None = None) -> dict[str, Any]:
    """env, split, tasks (task id -> hash) and sha256 (of all lines `id hash`, in the order of the panel)."""
    panel = panel_of(tasks_fn(env), split, **options)
    tasks = {task.id: content_hash(task) for task in islice(panel, count)}
    return {"env": env, "split": split, "sha256": contents_sha256(tasks), "tasks": tasks}


def _options(text: str) -> dict[str, Any]:
    return {str(name): value for name, value in json.loads(text).items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spear_rl.envs.adapters.manifest", description=__doc__)
    parser.add_argument("env", help="as task.env")
    parser.add_argument("split")
    parser.add_argument("--options", type=_options, default={}, help="task.options, as a JSON object")
    parser.add_argument("--tasks", type=int, default=None, help="the first tasks only")
    parser.add_argument("--verify", metavar="FILE", help="a manifest to compare with")
    given = parser.parse_args(arguments)
    return printed_or_verified(
        lambda: manifest_of(given.env, given.split, given.options, given.tasks), given.verify, tasks="tasks"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
