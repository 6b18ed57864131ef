"""What SPEAR and each switch of it cost: CPU time per training step and peak memory of a `quickstart` run.

    python benchmarks/switch_overhead.py [--steps 10] [--repeats 2] [SETTING ...]

All runs start from one cold start and do not learn (a learning rate of 1e-12), so that every one of them plays the
same episodes, unless the switch is about which are played. Each run is a process of its own; in every repetition all of
them run once. CPU time, not the clock: on a busy machine a clock measures the others. The first two steps warm up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.recording_overhead import counted

from spear_rl.app import config, train
from spear_rl.replay.buffer import PRIORITIES
from spear_rl.train import loop

PAPER = ["algorithm.imitation.profile=paper", "algorithm.imitation.warm_steps=1", "algorithm.imitation.fraction=0.25"]
SWITCHES = [
    "algorithm.imitation.fraction=1",
    "algorithm.imitation.baseline=siblings",
    "algorithm.imitation.per_family=true",
    *(f'algorithm.imitation.priority=["{word}"]' for word in PRIORITIES),
    *(f"algorithm.imitation.schedule={word}" for word in ("success", "fading", "entropy")),
    "algorithm.imitation.max_second_moment=1.5",
    "algorithm.imitation.keep_step_part=true",
    "algorithm.bonus.mode=success",
    "algorithm.entropy_floor=0.3",
    "algorithm.covariance.on_policy=clip",
    "rollout.return_share=0.5",
    "rollout.return_share=0.5 algorithm.imitation.join_lost=true",
    "rollout.restart_share=0.25",
]
RUNS = {
    "no SPEAR": ["algorithm.bonus.mode=none", "algorithm.imitation.enabled=false"],
    "SPEAR as in the paper": PAPER,
    **{f"`{switch}`": [*PAPER, *switch.split()] for switch in SWITCHES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("settings", nargs="*", help="further settings of all runs")
    given = parser.parse_args()
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        shared = ["algorithm.name=spear-dr-bot-gigpo", "run.threads=1", *given.settings]
        with spawned.Pool(1) as pool:
            pool.apply(cold_start, (folder, shared))
        shared += [f"engine.model={folder}/cold/model", "sft.episodes=0", "optim.learning_rate=1e-12", "eval.tasks=0"]
        shared += [f"run.steps={given.steps}", "run.checkpoint_every=1000", "run.trajectories_every=0"]
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
        for repeat in range(given.repeats):
            for place, (name, own) in enumerate(RUNS.items()):
                settings = [*shared, *own, f"run.dir={folder}/{repeat}_{place}"]
                with spawned.Pool(1) as pool:
                    measured[name].append(pool.apply(measure, (settings,)))
    milliseconds = {name: 1e3 * min(seconds for seconds, _ in found) for name, found in measured.items()}
    paper = milliseconds["SPEAR as in the paper"]
    print("| run | CPU ms per step | beside SPEAR as in the paper | peak MB |\n|---|---|---|---|")
    for name, found in measured.items():
        peak = min(peak for _, peak in found)
        print(f"| {name} | {milliseconds[name]:.0f} | {milliseconds[name] / paper - 1:+.1%} | {peak:.0f} |")


def cold_start(folder: str, settings: list[str]) -> None:
    """The policy that all runs start from."""
    train.sft_from(config.load("quickstart", [*settings, f"run.dir={folder}/cold", "eval.tasks=0"]))


def measure(settings: list[str]) -> tuple[float, float]:
    """CPU seconds of a step, and the peak memory of the process in MB."""
    times = list[float]()
    loop.train_step = counted(loop.train_step, times)
    train.train_from(config.load("quickstart", settings))
    return statistics.fmean(times[2:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
