"""What SPEAR and each switch of it cost: CPU time per training step and peak memory of a `quickstart` run.

    python benchmarks/switch_overhead.py [--steps 10] [--repeats 2] [SETTING ...]

All runs start from one cold start and do not learn (a learning rate of 1e-12), so that every one of them plays the
same episodes, unless the switch is about which are played. Each run is a process of its own; in every repetition all of
them run once and are compared with the paper's run of that repetition. CPU time, not the clock: on a busy machine a
clock measures the others. It still varies with what else runs, by more than a switch costs; so the time in SPEAR's own
code is counted apart: storing, drawing, the choice of tasks, wins that join, the loss. The first two steps warm up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.recording_overhead import counted

from spear_rl.algorithms.base import Algorithm, SelfImitation
from spear_rl.app import config, train
from spear_rl.functional.losses import ClippedSurrogate
from spear_rl.replay.priorities import PRIORITIES
from spear_rl.rollout.choice import TaskChoice
from spear_rl.train import loop
from spear_rl.train import step as step_module

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
OWN = [
    *((SelfImitation, name) for name in ("observe", "draw", "keep")),
    *((TaskChoice, name) for name in ("chosen", "noted")),
    (step_module, "joined"), (Algorithm, "observed"), (ClippedSurrogate, "__call__"),
]  # fmt: skip
"""What SPEAR, a switch or a base adds to a step: functions that do not call each other."""
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
        measured: dict[str, list[Cost]] = {name: [] for name in RUNS}
        for repeat in range(given.repeats):
            for place, (name, own) in enumerate(RUNS.items()):
                settings = [*shared, *own, f"run.dir={folder}/{repeat}_{place}"]
                with spawned.Pool(1) as pool:
                    measured[name].append(pool.apply(measure, (settings,)))
    paper = measured["SPEAR as in the paper"]
    print("| run | CPU ms per step | of it in SPEAR's own code and the loss | beside SPEAR as in the paper | peak MB |")
    print("|---|---|---|---|---|")
    for name, found in measured.items():
        step, own, peak = (statistics.median(values) for values in zip(*found, strict=True))
        beside = [cost.step / base.step - 1 for cost, base in zip(found, paper, strict=True)]
        middle = f"{statistics.median(beside):+.1%} ({min(beside):+.1%} to {max(beside):+.1%})"
        print(f"| {name} | {1e3 * step:.0f} | {1e3 * own:.1f} | {middle} | {peak:.0f} |")


class Cost(NamedTuple):
    """Of a training step in the mean."""

    step: float
    """CPU seconds."""
    own: float
    """CPU seconds in what SPEAR and its switches add to a step, the loss included."""
    peak: float
    """Peak memory of the process in MB."""


def cold_start(folder: str, settings: list[str]) -> None:
    """The policy that all runs start from."""
    train.sft_from(config.load("quickstart", [*settings, f"run.dir={folder}/cold", "eval.tasks=0"]))


def measure(settings: list[str]) -> Cost:
    """What a run costs, in a process of its own."""
    steps, own = list[float](), list[float]()
    for owner, name in OWN:
        setattr(owner, name, counted(getattr(owner, name), own))
    loop.train_step = marked(counted(loop.train_step, steps), own, begins := list[int]())
    train.train_from(config.load("quickstart", settings))
    spent = sum(own[begins[2] :]) / len(steps[2:])
    return Cost(statistics.fmean(steps[2:]), spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


def marked(work: Callable[..., Any], times: list[float], begins: list[int]) -> Callable[..., Any]:
    """`work`, which notes in `begins` how long `times` is when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        begins.append(len(times))
        return work(*arguments, **options)

    return call


if __name__ == "__main__":
    main()
