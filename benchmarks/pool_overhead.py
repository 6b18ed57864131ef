"""Environment steps per second in this process and in pools of one and two workers, for quick and slow games.

python -m benchmarks.pool_overhead
"""

from __future__ import annotations

import random
import time
from functools import partial

from spear_rl.envs import ENVIRONMENTS
from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.runner import EnvRunner, InProcess

NUM_TURNS = 30


class Busy:
    """A game that computes for a fixed time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def reset(self) -> Observation:
        return Observation("go")

    def step(self, action: str) -> StepResult:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return StepResult(Observation("on"))

    def close(self) -> None:
        pass


def rate(runner: EnvRunner, tasks: list[Task]) -> float:
    """Steps a second, all episodes side by side, actions chosen at random among those that work."""
    rng = random.Random(0)
    for key, task in enumerate(tasks):
        runner.open(key, task)
    choices = {key: getattr(answer, "choices", ()) for key, answer in runner.answers(len(tasks))}
    start, steps = time.perf_counter(), 0
    for _ in range(NUM_TURNS):
        for key in sorted(choices):
            runner.step(key, f"<action>{rng.choice(choices[key] or ('look',))}</action>")
        for key, answer in runner.answers(len(choices)):
            assert isinstance(answer, StepResult)
            steps += 1
            choices[key] = answer.observation.choices
            if answer.done:
                del choices[key]
    seconds = time.perf_counter() - start
    for key in range(len(tasks)):
        runner.close(key)
    return steps / seconds


def main() -> None:
    from benchmarks.pool_overhead import Busy as Importable  # a worker cannot import what only __main__ has

    games = {"household, easy": list(ENVIRONMENTS["household"]("train", level="easy")[:64])}
    for milliseconds in (0.1, 0.3, 1.0):
        make = partial(Importable, milliseconds / 1000)
        games[f"{milliseconds} ms per step"] = [Task(f"busy/{number}", make) for number in range(32)]
    for name, tasks in games.items():
        best = {"in this process": max(rate(InProcess(), tasks) for _ in range(3))}
        for count in (1, 2):
            with Pool(num_workers=count) as pool:
                best[f"pool of {count}"] = max(rate(pool, tasks) for _ in range(3))
        print(f"{name:18s}", "  ".join(f"{kind} {value:8,.0f}" for kind, value in best.items()), "steps/s")


if __name__ == "__main__":
    main()
