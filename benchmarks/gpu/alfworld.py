"""A whole RL step on real ALFWorld through the preset alfworld-smollm2: 16 tasks x 8 episodes, 20 turns.

The cold start comes first, because an untrained model writes no actions; then a few steps to warm up, then those that
count. Needs ALFWORLD_DATA.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

from benchmarks.gpu.machine import forget_peak, median, parser, peak_gib, report, sized, synchronize

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"steps": 6, "warmups": 4},
    "cpu": {"steps": 1, "warmups": 1},
}
SMALL = [
    "engine.model=tiny", "rollout.num_tasks=2", "rollout.group_size=2", "rollout.max_turns=3", "sft.episodes=2",
    "sft.epochs=1",
]  # fmt: skip
"""What a rehearsal without a GPU changes."""


def main() -> None:
    from spear_rl.app import config as configuration
    from spear_rl.app.build.training import Player, algorithm_of, engine_of, tasks_of
    from spear_rl.train.cold_start import cold_start
    from spear_rl.train.step import train_step

    asked = parser(__doc__)
    asked.add_argument("--engine", choices=["ours"], default="ours")
    for name in ("steps", "warmups"):
        asked.add_argument(f"--{name}", type=int)
    asked.add_argument("--option", action="append", default=[], help="SECTION.KEY=VALUE")
    arguments = sized(asked.parse_args(), SIZES)
    own = [f"engine.model={arguments.model}"] if arguments.device == "cuda" else SMALL
    config = configuration.load("alfworld-smollm2", [*own, *arguments.option])
    start = time.perf_counter()
    engine = engine_of(config)
    panel, algorithm, rng = tasks_of(config, "train"), algorithm_of(config), random.Random(0)
    measured: list[dict[str, float]] = []
    with Player(config, engine.tokenizer) as player:
        collect = player.rollouts(panel, engine)
        loaded = time.perf_counter()
        engine.reset_optimizer(config.sft.learning_rate)
        cold_start(
            engine,
            player.demonstrations(panel, config.sft.episodes),
            epochs=config.sft.epochs,
            batch_size=config.sft.batch_size,
            learning_rate=config.sft.learning_rate,
            rng=random.Random(f"sft/{config.run.seed}"),
        )
        engine.reset_optimizer(config.optim.learning_rate)
        synchronize(arguments.device)
        taught = time.perf_counter()
        for step in range(arguments.warmups + arguments.steps):
            if step == arguments.warmups:
                forget_peak(arguments.device)
            began = time.perf_counter()
            metrics = train_step(
                step,
                collect=collect,
                algorithm=algorithm,
                engine=engine,
                rng=rng,
                num_minibatches=config.optim.num_minibatches,
            )
            synchronize(arguments.device)
            measured.append({"seconds": time.perf_counter() - began} | metrics)
    counted = measured[arguments.warmups :]
    of = partial(_median, counted)
    report(
        {
            "part": "alfworld",
            "engine": "ours",
            "sizes": {"steps": arguments.steps, "warmups": arguments.warmups},
            "results": {
                "ours": {
                    "seconds": of("seconds"),
                    "rollout_s": of("time/rollout"),
                    "update_s": of("time/update"),
                    "turns": of("rollout/turns"),
                    "turns_trained": of("policy/turns_trained"),
                    "sampler_gap": of("policy/sampler_gap"),
                    "first_steps_s": [round(m["seconds"], 2) for m in measured[: arguments.warmups]],
                    "all_s": [round(m["seconds"], 2) for m in counted],
                    "load_s": loaded - start,
                    "cold_start_s": taught - loaded,
                    "peak_gib": peak_gib(arguments.device),
                }
            },
        },
        arguments.out,
    )


def _median(measured: list[dict[str, float]], name: str) -> float:
    return median([m[name] for m in measured if name in m] or [0.0])


if __name__ == "__main__":
    main()
