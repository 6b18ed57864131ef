"""Step advantages of one step of the papers' size: 16 tasks x 8 episodes x 50 turns, and four times as many turns."""

from __future__ import annotations

import random
import statistics
import time

from spear_rl.algorithms import g2po, gigpo, graphgpo, hgpo
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

TASKS, EPISODES, STATES, REPEATS = 16, 8, 40, 20


def played(turns: int) -> list[Group]:
    rng, answer = random.Random(0), Completion([3], [-0.5])
    groups = []
    for task in range(TASKS):
        episodes = []
        for _ in range(EPISODES):
            won = rng.random() < 0.3
            walk = [Turn([1], answer, state_key=str(rng.randrange(STATES))) for _ in range(turns - 1)]
            last = Turn([1], answer, reward=10.0 * won, state_key=str(rng.randrange(STATES)))
            episodes.append(Trajectory([*walk, last], Stop.DONE, success=won))
        groups.append(Group(str(task), episodes))
    return groups


def main() -> None:
    for turns in (50, 200):
        groups = played(turns)
        for make in (gigpo, hgpo, graphgpo, g2po):
            advantages, seconds = make().advantages, []
            for _ in range(REPEATS):
                start = time.process_time()
                advantages(groups)
                seconds.append(time.process_time() - start)
            took = f"{1e3 * statistics.median(seconds):.1f} ms (median of {REPEATS}; worst {1e3 * max(seconds):.1f})"
            print(f"{make.__name__}, {TASKS * EPISODES * turns} turns: {took}")


if __name__ == "__main__":
    main()
