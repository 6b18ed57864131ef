"""One replay draw with the paper's sizes: a baseline of 10,240 group means and 2,048 stored episodes."""

from __future__ import annotations

import random
import statistics
import time

from spear_rl.algorithms import grpo, spear
from spear_rl.algorithms.base import Remembered
from spear_rl.types import Completion, Stop, Trajectory, Turn

HISTORY, EPISODES, TURNS, LIMIT_MS = 10_240, 2_048, 8, 20.0


def main() -> None:
    rng = random.Random(0)
    memory = spear(grpo(), imitation=1.0, capacity=EPISODES, history_size=HISTORY).imitation
    assert memory
    memory.history.add(rng.random() for _ in range(HISTORY))
    turn = Turn([1, 2], Completion([3], [-0.5]))
    played = Trajectory([turn] * TURNS, Stop.DONE)
    item = Remembered(played, [1.0] * TURNS, [""] * TURNS, [0.0] * TURNS)
    memory.buffer.add(((item, rng.random()) for _ in range(EPISODES)), 0)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        memory.draw(0, rng, num_played=EPISODES)
        seconds.append(time.perf_counter() - start)
    median, worst = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
    verdict = "within" if median < LIMIT_MS else "over"
    print(f"a draw takes {median:.1f} ms (median of {len(seconds)}; worst {worst:.1f}), {verdict} {LIMIT_MS:.0f} ms")


if __name__ == "__main__":
    main()
