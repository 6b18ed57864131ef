"""Steps a second of `household` on one core: parsing, rules, observation, state key and admissible commands."""

from __future__ import annotations

import random
import time

from spear_rl.envs import ENVIRONMENTS


def main() -> None:
    for level in ("starter", "easy", "medium", "hard"):
        tasks = ENVIRONMENTS["household"]("validation", level=level)[:50]
        rng, steps, seconds = random.Random(0), 0, 0.0
        for task in tasks:
            task.make_env().reset()  # a game's tables are made once
        for task in tasks:
            env = task.make_env()
            observation = env.reset()
            for _ in range(100):
                action = rng.choice(observation.choices)
                start = time.perf_counter()
                result = env.step(action)
                seconds += time.perf_counter() - start
                steps, observation = steps + 1, result.observation
                if result.done:
                    break
        print(f"{level:8s} {steps / seconds:9,.0f} steps/s  {1e6 * seconds / steps:5.1f} us a step")


if __name__ == "__main__":
    main()
