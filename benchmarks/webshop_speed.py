"""`webshop` with 1,000 and 100,000 generated products: start-up, indexing, peak memory, and how long a step takes.

Every size runs in processes of its own: one that makes the shop, one that opens what the first one kept.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

SIZES = (1_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", type=int, nargs="*", default=SIZES)
    parser.add_argument("--part", choices=("make", "play"), help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        part = _made if given.part == "make" else _played
        print(json.dumps(part(given.products[0], given.cache)))
        return
    for num_products in given.products:
        with tempfile.TemporaryDirectory() as cache:
            made, played = _measured("make", num_products, cache), _measured("play", num_products, cache)
        print(
            f"{num_products:,} products: generating {made['generate']:.1f} s, "
            f"making the shop in all {made['make']:.1f} s, peak {made['peak_mib']:.0f} MiB; "
            f"opening it {1000 * played['open']:.0f} ms, "
            f"peak while playing {played['peak_mib']:.0f} MiB"
        )
        for name, (median, most) in played["steps"].items():
            print(f"  {name:13s} median {median:6.3f} ms, 95 % {most:6.3f} ms")


def _measured(part: str, num_products: int, cache: str) -> dict:
    command = [sys.executable, __file__, "--part", part, "--products", str(num_products), "--cache", cache]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _made(num_products: int, cache: str) -> dict:
    from spear_rl.envs.webshop import source_of
    from spear_rl.envs.webshop.data.shop import open_shop

    source = source_of(num_products=num_products)
    start = time.perf_counter()
    for _ in source.entries():
        pass
    generate = time.perf_counter() - start
    start = time.perf_counter()
    open_shop(source, cache)
    return {"generate": generate, "make": time.perf_counter() - start, "peak_mib": _peak_mib()}


def _played(num_products: int, cache: str, num_steps: int = 6_000) -> dict:
    """Random clicks, and searches with the instruction's words, as they come in episodes."""
    import random

    start = time.perf_counter()
    from spear_rl.envs.webshop import tasks
    from spear_rl.envs.webshop.experts import query_in

    panel = tasks("train", num_products=num_products, cache=cache)
    opened = time.perf_counter() - start
    rng, times, number = random.Random(0), {"new search": [], "search again": [], "click": []}, 0
    while sum(map(len, times.values())) < num_steps:
        env, number = panel[number % len(panel)].make_env(), number + 1
        seen, is_done = env.reset(), False
        query, is_new = query_in(seen.text.split(" [SEP] ")[2]), True
        while not is_done:
            action = rng.choice(seen.choices)
            name = action.partition("[")[0]
            if name == "search":
                name, action, is_new = "new search" if is_new else "search again", f"search[{query}]", False
            start = time.perf_counter()
            result = env.step(action)
            times[name].append(1000 * (time.perf_counter() - start))
            seen, is_done = result.observation, result.done
    times["all"] = [taken for group in times.values() for taken in group]
    return {"open": opened, "peak_mib": _peak_mib(), "steps": {name: _summary(taken) for name, taken in times.items()}}


def _summary(taken: list[float]) -> tuple[float, float]:
    taken = sorted(taken)
    return taken[len(taken) // 2], taken[int(len(taken) * 0.95)]


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
