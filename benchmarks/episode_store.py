"""Episodes as parquet: what recording costs per step, and how quickly a long run is opened and filtered.

    python benchmarks/episode_store.py [--turns 1000000] [--keep FOLDER]

A step is as large as one of `quickstart`: 64 episodes of five turns. The mean time of writing includes merging.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spear_rl.io.episodes.index import Episodes, Filter
from spear_rl.io.episodes.parts import EpisodeWriter
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

GROUPS, SIBLINGS, TURNS = 8, 8, 5
THINGS = ("mug", "apple", "knife", "lamp", "plate", "soap bar", "credit card", "pencil")
FAMILIES = ("pick", "clean", "heat", "cool", "examine", "pick two")
DIFFERENT = 64
"""Steps that differ; a longer run repeats their texts with other numbers, as making them takes long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="folder to leave the generated run in")
    parser.add_argument("--read", type=Path, help="only open and filter the run in this folder")
    given = parser.parse_args()
    if given.read:
        reading(given.read)
        return
    with tempfile.TemporaryDirectory() as temporary:
        run = given.keep or Path(temporary) / "run"
        writing(run, given.turns)
        subprocess.run([sys.executable, __file__, "--read", str(run)], check=True)  # its memory is its own


def writing(run: Path, num_turns: int) -> None:
    rng = random.Random(0)
    steps = -(-num_turns // (GROUPS * SIBLINGS * TURNS))
    made = [step_of(rng, number) for number in range(min(DIFFERENT, steps))]
    writer = EpisodeWriter(run / "trajectories", 10**12, lambda ids: [f" token{number}" for number in ids])
    clock, cpu = list[float](), list[float]()
    for step in range(steps):
        groups, advantages, dropped = made[step % len(made)]
        start, busy = time.perf_counter(), time.process_time()
        writer.write(step, groups, advantages, dropped)
        clock.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    metrics(run, steps, rng)
    size = sum(path.stat().st_size for path in (run / "trajectories").iterdir())
    report("steps, turns", f"{steps}, {steps * GROUPS * SIBLINGS * TURNS}")
    report("writing, ms per step: median, mean", f"{1e3 * np.median(clock):.1f}, {1e3 * np.mean(clock):.1f}")
    report("writing, CPU ms per step: median, mean", f"{1e3 * np.median(cpu):.1f}, {1e3 * np.mean(cpu):.1f}")
    report("bytes per turn", f"{size / (steps * GROUPS * SIBLINGS * TURNS):.0f}")


def reading(run: Path) -> None:
    stored = Episodes(run / "trajectories")
    report("open: index of all episodes", seconds(stored.refresh))
    report("episodes", str(len(stored.table)))
    report("nothing new", seconds(stored.refresh))
    filters = {
        "failed": Filter(success=False),
        "family and task": Filter(family="heat", task="7"),
        "steps": Filter(step=(100, 300)),
        "dropped": Filter(dropped="flat_group"),
    }
    for name, wanted in filters.items():
        report(f"filter, sort, a page: {name}", seconds(lambda wanted=wanted: page(stored, wanted)))
    last = int(stored.numbers("step").max())
    report("one episode: oldest", seconds(lambda: stored.episode(0, 3)))
    report("one episode: newest", seconds(lambda: stored.episode(last, 3)))
    report("memory, MB at most", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")


def page(stored: Episodes, wanted: Filter) -> list[dict[str, object]]:
    return stored.rows(stored.ordered(stored.where(wanted), "reward", descending=True)[:100])


def step_of(rng: random.Random, number: int) -> tuple[list[Group], list[list[float]], list[list[str]]]:
    groups = [
        Group(
            f"household/train/{rng.randrange(5000):04d}", [episode(rng) for _ in range(SIBLINGS)], number, {"family": f}
        )
        for f in rng.choices(FAMILIES, k=GROUPS)
    ]
    advantages = [[rng.uniform(-1, 1)] * TURNS for _ in range(GROUPS * SIBLINGS)]
    dropped = [[rng.choice(["", "", "", "flat_group"])] * TURNS for _ in advantages]
    return groups, advantages, dropped


def episode(rng: random.Random) -> Trajectory:
    prompt, turns = [rng.randrange(400) for _ in range(150)], list[Turn]()
    success = rng.random() < 0.6
    for number in range(TURNS):
        seen = ", ".join(f"a {rng.choice(THINGS)} {rng.randrange(9)}" for _ in range(6))
        observation, ids = (
            f"You arrive at shelf {rng.randrange(9)}. On it you see {seen}.",
            rng.choices(range(400), k=9),
        )
        done = Completion(ids, [-rng.expovariate(3) for _ in ids], entropies=[rng.expovariate(2) for _ in ids])
        reward = float(success and number == TURNS - 1)
        text = f"take {rng.choice(THINGS)} {rng.randrange(9)} from shelf {rng.randrange(9)}"
        turns.append(Turn(prompt, done, reward, observation[:40], observation=observation, text=text))
        prompt = [*prompt, *ids, *rng.choices(range(400), k=50)]
    return Trajectory(turns, Stop.DONE if success else Stop.MAX_TURNS, 0.1 * rng.random(), success)


def metrics(run: Path, steps: int, rng: random.Random) -> None:
    """What makes a folder of episodes a run."""
    rows = [
        {"step": step, "rollout/success": rng.random(), "rollout/reward": rng.random(), "policy/entropy": rng.random()}
        for step in range(steps)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "config.toml").write_text("")
    with (run / "draws.jsonl").open("w") as file:
        for step in range(1, steps):
            file.write(json.dumps({"step": step, "draws": [draw(step, rng) for _ in range(GROUPS * SIBLINGS)]}) + "\n")


def draw(step: int, rng: random.Random) -> dict[str, object]:
    """As replay logs it."""
    played, number = max(step - rng.randint(1, 10), 0), rng.randrange(GROUPS * SIBLINGS)
    about = {"episode": f"{played}/{number}", "played": played, "age": step - played, "success": True, "reward": 1.0}
    about |= {"task": f"household/train/{rng.randrange(5000):04d}", "family": "pick", "group_success": 0.25}
    return about | {"advantage": rng.random(), "advantage_today": rng.random(), "turns": 5, "turns_replayed": 5}


def seconds(work: Callable[[], object]) -> str:
    start, busy = time.perf_counter(), time.process_time()
    work()
    return f"{time.perf_counter() - start:.3f} s, CPU {time.process_time() - busy:.3f} s"


def report(what: str, value: str) -> None:
    print(f"{what:45s} {value}", flush=True)


if __name__ == "__main__":
    main()
