"""How long a short quickstart takes by thread count and way of waiting, beside 0, 1 and 10 busy processes.

    python benchmarks/threads_under_load.py --rounds 2

The arms take turns within each round, so that what else the machine does meets all of them alike. Seconds are those of cold
start, steps and evaluations (`seconds` in summary.json), without the start of Python.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

SHORT = ["run.steps=1", "run.checkpoint_every=1000", "sft.episodes=300", "eval.tasks=20"]
SPINNING = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}  # the spin count of libgomp where nothing is set
ARMS: dict[str, tuple[int, dict[str, str]]] = {
    "1 thread": (1, {}),
    "2 threads that spin": (2, SPINNING),
    "2 threads that sleep": (2, {}),
    "chosen by the run": (0, {}),
}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute without a pause, at this process's priority."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds(threads: int, variables: dict[str, str]) -> tuple[float, float, int]:
    """(seconds of the training, processor seconds of the whole process, threads used) of one short run."""
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    with tempfile.TemporaryDirectory() as folder:
        settings = [*SHORT, f"run.dir={folder}/run", f"run.threads={threads}"]
        command = [sys.executable, "-m", "spear_rl.cli", "train", "quickstart", *settings]
        before = os.times()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    spent = sum(summary["seconds"][name] for name in ("sft", "step", "eval"))
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, used, summary["hardware"]["threads"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 1, 10], help="busy processes")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    print("| busy processes | load before | " + " | ".join(options.arms) + " |", flush=True)
    for count in options.loads:
        load, taken = os.getloadavg()[0], {arm: [] for arm in options.arms}
        with busy(count):
            time.sleep(0.5)
            for number in range(options.rounds):
                for arm in options.arms if number % 2 == 0 else options.arms[::-1]:
                    taken[arm].append(seconds(*ARMS[arm]))
        best = min(mean(wall for wall, _, _ in runs) for runs in taken.values())
        cells = []
        for runs in taken.values():
            wall, cpu = mean(run[0] for run in runs), mean(run[1] for run in runs)
            threads = ", ".join(str(run[2]) for run in runs)
            cells.append(f"{wall:.1f} s ({wall / best:.2f} x; CPU {cpu:.0f} s; threads {threads})")
        print(f"| {count} | {load:.1f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
