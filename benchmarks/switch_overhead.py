"""What SPEAR and each switch of it cost: CPU time per training step and peak memory of a `quickstart` run.

    python benchmarks/switch_overhead.py [--steps 40] [--skip 10] [SETTING ...]

All runs start from one cold start and do not learn (a learning rate of 1e-12), so that every one of them plays the
same episodes, unless the switch is about which are played. Each run is a process of its own, and they take their steps
in turn: step n of every run is a round, in which all of them meet the same machine. A step is compared with that of
another run in the same round. CPU time, not the clock; the time in SPEAR's own code is counted apart: storing, drawing,
the choice of tasks, wins that join, the loss. The first rounds, in which the buffer fills, do not count.

It needs 0.3 to 0.6 GB of memory per run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
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
    "our SPEAR": [],
    **{f"`{switch}`": [*PAPER, *switch.split()] for switch in SWITCHES},
}
PATIENCE = 900
"""Seconds to wait for one's turn: if it does not come, another run has failed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=10, help="first steps that do not count")
    parser.add_argument("settings", nargs="*", help="further settings of all runs")
    given = parser.parse_args()
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        shared = ["algorithm.name=spear-dr-bot-gigpo", "run.threads=1", *given.settings]
        with spawned.Pool(1) as pool:
            pool.apply(cold_start, (folder, shared))
        shared += [f"engine.model={folder}/cold/model", "sft.episodes=0", "optim.learning_rate=1e-12", "eval.tasks=0"]
        shared += [f"run.steps={given.steps}", "run.checkpoint_every=1000", "run.trajectories_every=0"]
        turns = [spawned.Semaphore(int(place == 0)) for place in range(len(RUNS))]
        with ProcessPoolExecutor(len(RUNS), spawned, initializer=take_turns, initargs=(turns,)) as pool:
            runs = [
                pool.submit(measure, place, [*shared, *own, f"run.dir={folder}/{place}"], given.skip)
                for place, own in enumerate(RUNS.values())
            ]
            measured = dict(zip(RUNS, (run.result() for run in runs), strict=True))
    none, paper = measured["no SPEAR"], measured["SPEAR as in the paper"]
    columns = (
        "CPU ms per step",
        "of it in SPEAR's own code and the loss",
        "beside no SPEAR",
        "beside the paper",
        "peak MB",
    )
    print(f"| run | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for name, cost in measured.items():
        step, own = (1e3 * statistics.median(values) for values in (cost.steps, cost.own))
        print(f"| {name} | {step:.0f} | {own:.1f} | {beside(cost, none)} | {beside(cost, paper)} | {cost.peak:.0f} |")


class Cost(NamedTuple):
    """What a run costs."""

    steps: list[float]
    """CPU seconds per step."""
    own: list[float]
    """CPU seconds per step in what SPEAR and its switches add to it, the loss included."""
    peak: float
    """Peak memory of the process in MB."""


def beside(cost: Cost, other: Cost) -> str:
    """Median difference of a step to the other run's step of the same round, with its 95 % interval by ranks."""
    if cost is other:
        return ""
    shares = sorted(a / b - 1 for a, b in zip(cost.steps, other.steps, strict=True))
    low = max(int((len(shares) - 1.96 * len(shares) ** 0.5) / 2), 0)
    return f"{statistics.median(shares):+.1%} ({shares[low]:+.1%} to {shares[-1 - low]:+.1%})"


def cold_start(folder: str, settings: list[str]) -> None:
    """The policy that all runs start from."""
    train.sft_from(config.load("quickstart", [*settings, f"run.dir={folder}/cold", "eval.tasks=0"]))


TURNS = list[Any]()
"""One semaphore per run, in a process that measures one."""


def take_turns(turns: list[Any]) -> None:
    TURNS[:] = turns


def measure(place: int, settings: list[str], skip: int) -> Cost:
    """The run at this place of the order, which takes each step when the one before has taken its own."""
    steps, own, begins = list[float](), list[float](), list[int]()
    for owner, name in OWN:
        setattr(owner, name, counted(getattr(owner, name), own))
    take_step = counted(loop.train_step, steps)

    def in_turn(*arguments: Any, **options: Any) -> Any:
        if not TURNS[place].acquire(timeout=PATIENCE):
            raise TimeoutError("another run did not take its step")
        begins.append(len(own))
        try:
            return take_step(*arguments, **options)
        finally:
            TURNS[(place + 1) % len(TURNS)].release()

    loop.train_step = in_turn
    train.train_from(config.load("quickstart", settings))
    spent = [sum(own[start:end]) for start, end in pairwise([*begins, len(own)])]
    return Cost(steps[skip:], spent[skip:], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


if __name__ == "__main__":
    main()
