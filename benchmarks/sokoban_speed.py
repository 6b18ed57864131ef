"""Steps a second of Sokoban on one core, for every kind of observation; generation and solving of levels.

python benchmarks/sokoban_speed.py
"""

from __future__ import annotations

import random
import time
from importlib.util import find_spec

from spear_rl.envs import sokoban
from spear_rl.envs.sokoban.experts import optimal_moves, quick_moves
from spear_rl.envs.sokoban.generator import LEVELS, generated_level
from spear_rl.envs.sokoban.rules import DIRECTIONS, is_solved, moved

NUM_STEPS = 40_000


def steps_per_second(num_steps: int, **options: object) -> float:
    """Random play through the environment, resets included."""
    rng = random.Random(0)
    said = [f"<action>{rng.choice(DIRECTIONS)}</action>" for _ in range(num_steps)]
    envs = [task.make_env() for task in sokoban.tasks("train", max_tasks=50, **options)]  # type: ignore[arg-type]
    start, taken, number = time.process_time(), 0, 0
    while number < num_steps:
        for env in envs:
            env.reset()
            for action in said[number : number + 30]:
                taken += 1
                if env.step(action).done:
                    break
            number += 30
    return taken / (time.process_time() - start)


def bare_moves_per_second(num_steps: int) -> float:
    """The rules alone."""
    level = generated_level(LEVELS["easy"], 0)
    rng = random.Random(0)
    directions = [rng.randrange(4) for _ in range(num_steps)]
    state = level.start
    start = time.process_time()
    for direction in directions:
        state, _ = moved(level.room, state, direction)
        if is_solved(level.room, state):
            state = level.start
    return num_steps / (time.process_time() - start)


def main() -> None:
    print(f"rules alone            {bare_moves_per_second(NUM_STEPS):12,.0f} moves/s")
    for grid in ("compact", "spaced", "words"):
        print(f"text, {grid:8}         {steps_per_second(NUM_STEPS, grid=grid):12,.0f} steps/s")
    if find_spec("PIL"):
        print(f"image, 28 pixels       {steps_per_second(1500, observation='image'):12,.0f} steps/s")
    for name, shape in LEVELS.items():
        count = 100 if name != "hard" else 30
        start = time.process_time()
        levels = [generated_level(shape, seed) for seed in range(count)]
        made = time.process_time()
        for level in levels:
            (quick_moves if name == "hard" else optimal_moves)(level)
        solved = time.process_time()
        kind = "quick" if name == "hard" else "optimal"
        print(f"{name:8} level: made in {1000 * (made - start) / count:6.2f} ms, ", end="")
        print(f"solved ({kind}) in {1000 * (solved - made) / count:6.2f} ms")


if __name__ == "__main__":
    main()
