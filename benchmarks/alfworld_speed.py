"""ALFWorld's real games in one run: the backends `fast` and `textworld` beside alfworld's own batched wrapper.

    ALFWORLD_DATA=... python benchmarks/alfworld_speed.py

Lines of the stock engine are left out where textworld and alfworld are not installed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spear_rl.envs import alfworld
from spear_rl.envs.alfworld.games import real_game
from spear_rl.rollout.env import Task

NUM_GAMES = 300
BATCH = 2
DATA = os.environ.get("ALFWORLD_DATA", "")  # importing alfworld sets the variable


def main() -> None:
    if "--memory" in sys.argv:
        print(resident_growth(group_size=int(sys.argv[-1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPEAR_RL_CACHE"] = f"{folder}/cache"
        report("panel of train, first time", f"{seconds(alfworld.tasks, 'train', data=DATA):.2f} s")
        report(
            "panel of train, after that", f"{min(seconds(alfworld.tasks, 'train', data=DATA) for _ in range(3)):.3f} s"
        )
        tasks = alfworld.tasks("train", data=DATA)
        report("fast: new game ready", spread(ready(tasks[:NUM_GAMES])))
        real_game.cache_clear()
        report("fast: seen game ready, from disk", spread(ready(tasks[:NUM_GAMES])))
        report("fast: seen game ready, in memory", spread(ready(tasks[:NUM_GAMES])))
        report("fast: steps", rate(*random_play(tasks[:NUM_GAMES], num_turns=100)))
        for size in (1, 8):
            grown = subprocess.run(
                [sys.executable, __file__, "--memory", str(size)], capture_output=True, text=True, check=True
            )
            report(f"fast: 1,000 environments in groups of {size}", f"{float(grown.stdout):.0f} MB")
        if not all(map(find_spec, ("textworld", "alfworld", "fast_downward"))):
            return
        # Before the backend textworld is used: it makes the engine quicker for the whole process.
        official(tasks[:BATCH], Path(folder) / "official")
        tasks = alfworld.tasks("train", data=DATA, backend="textworld", max_tasks=6)
        report("textworld, memoised: new game ready", spread(ready(tasks)))
        report("textworld, memoised: seen game ready", spread(ready(tasks)))
        report("textworld, memoised: steps", rate(*random_play(tasks, num_turns=50)))


def official(tasks: Sequence[Task], folder: Path) -> None:
    """alfworld's AlfredTWEnv on the games of `tasks`, one process a game."""
    for number, task in enumerate(tasks):
        game = folder / str(number)
        game.mkdir(parents=True)
        shutil.copy(task.make_env.args[0], game)  # type: ignore[attr-defined]
        # The wrapper only plays games that this file of the full data set lies beside.
        (game / "traj_data.json").write_text(json.dumps({"task_type": task.family}))
    config: dict[str, Any] = {
        "dataset": {"eval_id_data_path": str(folder), "num_eval_games": -1},
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False}
        | {"expert_type": "handcoded"},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }
    with open(os.devnull, "w") as quiet, redirect_stdout(quiet):
        wrapper = import_module("alfworld.agents.environment.alfred_tw_env").AlfredTWEnv(config, "eval_in_distribution")
        env = wrapper.init_env(batch_size=len(tasks))
        start = time.perf_counter()
        _, infos = env.reset()
        ready_after = time.perf_counter() - start
        rng, num_turns = random.Random(0), 30
        start = time.perf_counter()
        for _ in range(num_turns):
            _, _, _, infos = env.step([rng.choice(commands) for commands in infos["admissible_commands"]])
        spent = time.perf_counter() - start
        env.close()
    report(f"official wrapper, {len(tasks)} processes: new games ready", f"{1000 * ready_after:,.0f} ms")
    report(f"official wrapper, {len(tasks)} processes: steps", f"{len(tasks) * num_turns / spent:9,.0f} a second")


def ready(tasks: Sequence[Task]) -> list[float]:
    """Seconds from task to first observation, of each."""
    with no_collection():
        out = []
        for task in tasks:
            start = time.perf_counter()
            env = task.make_env()
            env.reset()
            out.append(time.perf_counter() - start)
            env.close()
        return out


def random_play(tasks: Sequence[Task], *, num_turns: int) -> tuple[int, float, float]:
    """Steps, seconds by the clock and seconds on the core; choosing the action is among them."""
    envs = [task.make_env() for task in tasks]
    firsts = [env.reset() for env in envs]
    rng, steps, clock, core = random.Random(0), 0, time.perf_counter(), time.process_time()
    for env, observation in zip(envs, firsts, strict=True):
        for _ in range(num_turns):
            result = env.step(rng.choice(observation.choices))
            steps, observation = steps + 1, result.observation
            if result.done:
                break
    out = steps, time.perf_counter() - clock, time.process_time() - core
    for env in envs:
        env.close()
    return out


def resident_growth(*, group_size: int) -> float:
    """Megabytes that a thousand environments under way add to a process."""
    tasks = alfworld.tasks("train", data=DATA)
    gc.collect()
    before = resident()
    envs = [tasks[number // group_size].make_env() for number in range(1000)]
    for env in envs:
        observation = env.reset()
        for choice in observation.choices[:3]:
            env.step(choice)
    return resident() - before


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def no_collection() -> Iterator[None]:
    """A collection of the whole process's garbage says nothing about the game it happens to fall on."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds(function: Any, *arguments: Any, **options: Any) -> float:
    start = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - start


def spread(times: list[float]) -> str:
    ms = sorted(1000 * t for t in times)
    high = ms[int(0.95 * (len(ms) - 1))]
    return f"{statistics.median(ms):9.3f} ms median, {high:.3f} at 95 %, {ms[-1]:.3f} at most, of {len(ms)}"


def rate(steps: int, clock: float, core: float) -> str:
    return f"{steps / clock:9,.0f} a second by the clock, {steps / core:,.0f} a second of a core's time"


def report(what: str, figure: str) -> None:
    print(f"{what:50s} {figure}", flush=True)


if __name__ == "__main__":
    main()
