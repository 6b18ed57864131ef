"""Seconds of a piece of the quickstart by number of threads and way of waiting, beside 0, 1 and 10 busy processes.

python -m benchmarks.threads_under_load

A piece is 12 updates of the cold start and the rollouts of 32 episodes. Every arm is a process of its own that has
loaded everything; they take turns piece by piece, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}  # what the command line sets
ARMS: dict[str, tuple[int, dict[str, str]]] = {
    "1 thread": (1, PASSIVE),
    "2 threads that spin": (2, {}),  # torch as it comes
    "2 threads that sleep": (2, PASSIVE),
    "run.threads=0": (0, PASSIVE),
}


def work() -> None:
    """Do a piece with as many threads as each line of standard input says; 0 measures and chooses."""
    import torch

    from spear_rl.app.build.rollout import Player, tasks_of
    from spear_rl.app.build.threads import fastest_threads
    from spear_rl.app.build.training import engine_of
    from spear_rl.app.config import load
    from spear_rl.train.cold_start import cold_start

    config = load("quickstart", ["run.threads=1", "rollout.num_tasks=4"])
    engine, panel = engine_of(config), tasks_of(config, "train")
    with Player(config, engine.tokenizer) as player:
        episodes, rollouts = player.demonstrations(panel, 48), player.rollouts(panel, engine)
        print("ready", flush=True)
        for line in sys.stdin:
            threads = int(line) or fastest_threads(engine.model, 2)  # type: ignore[attr-defined]
            torch.set_num_threads(threads)
            begin, used = time.perf_counter(), time.process_time()
            cold_start(engine, episodes, epochs=1, batch_size=4, learning_rate=1e-3, rng=random.Random(0))
            rollouts(0)
            print(time.perf_counter() - begin, time.process_time() - used, threads, flush=True)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute without a pause."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Worker:
    """A process that does pieces."""

    def __init__(self, threads: int, variables: dict[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in UNSET} | variables
        command = [sys.executable, "-m", "benchmarks.threads_under_load", "--work"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._threads = threads

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def piece(self) -> tuple[float, float, int]:
        """(seconds, processor seconds, threads)."""
        assert self._process.stdin is not None
        print(self._threads, file=self._process.stdin, flush=True)
        seconds, used, threads = self.answer().split()
        return float(seconds), float(used), int(threads)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 1, 10], help="busy processes")
    parser.add_argument("--seconds", type=float, default=90.0, help="per load, at least")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    if options.work:
        work()
        return
    workers = {name: Worker(*ARMS[name]) for name in options.arms}
    try:
        for worker in workers.values():
            worker.answer()
        print(f"| busy processes | load average | pieces | {' | '.join(options.arms)} |", flush=True)
        for count in options.loads:
            print(row(workers, count, options.seconds), flush=True)
    finally:
        for worker in workers.values():
            worker.close()


def row(workers: dict[str, Worker], num_busy: int, seconds: float) -> str:
    """Mean seconds of a piece per arm, as a multiple of the best, processor seconds, threads chosen."""
    taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in workers}
    end, order = time.monotonic() + seconds, list(workers)
    with busy(num_busy):
        while time.monotonic() < end or len(taken[order[0]]) < 2:
            for name in order:
                taken[name].append(workers[name].piece())
            order.reverse()
            load = os.getloadavg()[0]
    best = min(mean(piece[0] for piece in pieces) for pieces in taken.values())
    cells = [str(num_busy), f"{load:.1f}", str(len(taken[order[0]]))]
    for name, pieces in taken.items():
        wall, used = mean(piece[0] for piece in pieces), mean(piece[1] for piece in pieces)
        chosen = f", {mean(p[2] for p in pieces):.1f} threads" if ARMS[name][0] == 0 else ""
        cells.append(f"{wall:.2f} s ({wall / best:.2f}; CPU {used:.2f} s{chosen})")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
