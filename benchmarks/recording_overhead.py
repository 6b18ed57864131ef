"""What recording episodes costs of a training step: CPU time inside a real `quickstart` run, without its cold start.

    python benchmarks/recording_overhead.py [--steps 12] [--repeats 3]

Recording is the episodes of each step (parquet, merging included), the draws and the buffer's log. CPU time, not the
clock: on a busy machine a clock measures the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from spear_rl.app import config, train
from spear_rl.io.episodes.parts import EpisodeWriter
from spear_rl.train import loop
from spear_rl.train.episode_files import BufferLog, DrawLog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    given = parser.parse_args()
    spent = {"step": list[float](), "recording": list[float]()}
    loop.train_step = counted(loop.train_step, spent["step"])
    for kind in (EpisodeWriter, DrawLog, BufferLog):
        kind.write = counted(kind.write, spent["recording"])
    shares = []
    for seed in range(given.repeats):
        for times in spent.values():
            times.clear()
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"run.dir={folder}/run", f"run.steps={given.steps}", f"run.seed={seed}", "run.threads=1"]
            train.train_from(config.load("quickstart", [*settings, "eval.tasks=0", *given.settings]))
        step, recording = (sum(times) / given.steps for times in spent.values())
        shares.append(recording / step)
        print(
            f"seed {seed}: a step {1e3 * step:.0f} CPU ms, recording {1e3 * recording:.1f}: {shares[-1]:.2%}",
            flush=True,
        )
    print(f"median {statistics.median(shares):.2%} of a step")


def counted(work: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return work(*arguments, **options)
        finally:
            times.append(time.process_time() - start)

    return call


if __name__ == "__main__":
    main()
