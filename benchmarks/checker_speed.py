"""How long it takes to compare answers with math-verify: one after another, and 64 at once.

python benchmarks/checker_speed.py [--backend landlock] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from spear_rl.envs.tool_math.verification.checker import MathVerify

AT_ONCE = 64
SHAPES = (
    (r"\frac{{{n}}}{{7}}", "{n}/7", True),
    (r"\frac{{1}}{{{n}}}", r"\frac{{1}}{{{m}}}", False),
    (r"{n}\sqrt{{3}}", r"\sqrt{{3 \cdot {n}^2}}", True),
    (r"\left( {n}, \frac{{\pi}}{{2}} \right)", r"({n}, \pi/2)", True),
    ("x^2 - {n}^2", "(x-{n})(x+{n})", True),
    ("{n} - 5i", "-5i + {m}", False),
    (r"[{n}, \infty)", r"\left[ {n}, \infty \right)", True),
    (r"\begin{{pmatrix}} {n} \\ 2 \end{{pmatrix}}", r"\begin{{bmatrix}} {n} \\ 2 \end{{bmatrix}}", True),
    (r"\{{1, {n}\}}", "{n}, 1", True),
    ("{n}x + 3y", "3y + {m}x", False),
    (r"{n}\pi r^2", r"\pi r^2 \cdot {n}", True),
    ("y = {n}x + 1", "y = 1 + {n}x", True),
    (r"\text{{Evelyn}}", r"\text{{Carla {n}}}", False),
    ("{n}.5", r"\frac{{{n}5}}{{10}}", True),
    (r"{n} \pm \sqrt{{2}}", r"{n}+\sqrt{{2}}, {n}-\sqrt{{2}}", True),
    (r"\sin \theta + {n}", r"{n} + \sin(\theta)", True),
)


def questions(first: int) -> list[tuple[str, str, bool]]:
    """As many as are asked at once, of every shape, with numbers that no earlier round had."""
    out = []
    for number in range(AT_ONCE):
        gold, given, same = SHAPES[number % len(SHAPES)]
        words = {"n": first + number, "m": first + number + 1}
        out.append((gold.format(**words), given.format(**words), same))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    checker = MathVerify(**({"backend": asked.backend} if asked.backend else {}))
    started = time.perf_counter()
    checker(r"\frac{1}{2}", "0.5")
    print(
        f"math-verify {version('math-verify')}, sympy {version('sympy')}, Python {platform.python_version()}, ", end=""
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ready after {time.perf_counter() - started:.1f} s")

    def timed(question: tuple[str, str, bool], since: float | None = None) -> float:
        begun = since or time.perf_counter()
        gold, given, same = question
        assert checker(gold, given) == same, question
        return time.perf_counter() - begun

    alone = [timed(question) for number in range(asked.rounds) for question in questions(1000 * number + 2)]
    report("one after another", alone, sum(alone))
    together: list[float] = []
    total = 0.0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(asked.rounds):
            begun = time.perf_counter()
            together += pool.map(lambda question: timed(question, begun), questions(1000 * number + 502))  # noqa: B023
            total += time.perf_counter() - begun
    report(f"{AT_ONCE} at once", together, total)
    checker.close()


def report(what: str, seconds: list[float], total: float) -> None:
    last = statistics.quantiles(seconds, n=20)[-1]
    print(
        f"{what}: median {1000 * statistics.median(seconds):.0f} ms, 95 % {1000 * last:.0f} ms, "
        f"{len(seconds) / total:.1f} checks per second"
    )


if __name__ == "__main__":
    main()
