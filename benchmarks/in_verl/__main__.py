"""Tables of verl's logs: steps and seconds of each, and how far two of them differ that had the same answers.

python -m benchmarks.in_verl spear.log resumed.log --same off.log plain.log --steps 3
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import median

Step = dict[str, float]
_NUMBER = re.compile(r"(\S+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan)\)?(?= - |\s*$)")
_SHOWN = {
    "step": "training/global_step",
    "success": "spear/rollout/success",
    "reward": "spear/rollout/reward",
    "replayed": "spear/replay/trajectories",
    "buffer": "spear/replay/buffer_size",
    "baseline": "spear/replay/baseline",
    "ratio": "spear/replay/ratio",
    "gap to sampler": "training/rollout_probs_diff_mean",
    "seconds": "timing_s/step",
}
_TIMES = ("step", "gen", "old_log_prob", "update_actor")


def steps_of(log: Path) -> list[Step]:
    """The metrics of every step that a log tells of."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8", errors="replace"))
    return [{k: float(v) for k, v in _NUMBER.findall(line)} for line in re.findall(r"step:\d+ - .*", text)]


def differences(mine: list[Step], theirs: list[Step]) -> list[tuple[float, str]]:
    """Largest first: how far metrics of actor, critic and lengths differ (relative above 1, else absolute)."""
    found = []
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True), 1):
        for name, value in there.items():
            if name.startswith(("actor/", "critic/", "response_length/", "prompt_length/")) and "/perf/" not in name:
                gap = abs(here[name] - value) / max(abs(value), 1)
                found.append((gap, f"{name}, step {number}: {here[name]:.9g} and {value:.9g}"))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_verl", description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="*", type=Path, help="logs of runs with SPEAR, step by step")
    parser.add_argument("--same", nargs=2, type=Path, metavar="LOG", default=(), help="two runs with the same answers")
    parser.add_argument("--steps", type=int, default=3, help="for how many steps they had them")
    given = parser.parse_args()
    for log in given.logs:
        print(f"\n{log}\n" + " | ".join(_SHOWN))
        for step in steps_of(log):
            print(" | ".join(f"{step.get(key, float('nan')):.6g}" for key in _SHOWN.values()))
    print("\nmedian seconds, first two steps of a run left out\nlog | steps | " + " | ".join(_TIMES))
    for log in [*given.logs, *given.same]:
        later = steps_of(log)[2:]
        times = [median(step[f"timing_s/{name}"] for step in later) for name in _TIMES] if later else []
        print(f"{log} | {len(later)} | " + " | ".join(f"{seconds:.2f}" for seconds in times))
    if given.same:
        found = differences(*(steps_of(log)[: given.steps] for log in given.same))
        print(f"\n{len(found)} metrics of {given.steps} steps; the largest differences:")
        print("\n".join(f"{gap:.1e} {what}" for gap, what in found[:10]))


if __name__ == "__main__":
    main()
