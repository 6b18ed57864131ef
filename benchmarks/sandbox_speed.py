"""How long a call of the sandboxed interpreter takes. python benchmarks/sandbox_speed.py [--calls 300]"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from spear_rl.sandbox import Interpreter, Limits, SandboxUnavailable

SOLVE = "import sympy\nx = sympy.Symbol('x')\nsympy.solve(x**2 - 5*x + 6, x)"


def milliseconds(call: Callable[[], object], num_calls: int) -> str:
    """Median and 95 % of a call."""
    took = []
    for _ in range(num_calls):
        started = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - started))
    return f"{statistics.median(took):8.2f} {statistics.quantiles(took, n=20)[-1]:8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    num_calls = parser.parse_args().calls
    load = os.getloadavg()[0]
    print(f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, "
          f"user {os.getuid()}, Python {platform.python_version()}")  # fmt: skip
    print(f"{num_calls} calls each; milliseconds{'median':>26} {'95 %':>8}")
    for backend in ("namespaces", "landlock", "unsafe-subprocess"):
        started = time.perf_counter()
        try:
            pool = Interpreter(Limits(seconds=60), backend=backend)
        except SandboxUnavailable as error:
            print(f"{backend}: {error}")
            continue
        with pool, pool.session() as session:
            print(f"{backend}: start {1000 * (time.perf_counter() - started):.0f}")
            pool.run("1")
            session.run(SOLVE)
            print(f"  one-off, `1 + 1`                        {milliseconds(partial(pool.run, '1 + 1'), num_calls)}")
            print(f"  one-off, sympy.solve                    {milliseconds(partial(pool.run, SOLVE), num_calls)}")
            print(f"  next call of a session, `1 + 1`         {milliseconds(partial(session.run, '1 + 1'), num_calls)}")
            started = time.perf_counter()
            with ThreadPoolExecutor(64) as threads:
                list(threads.map(pool.run, ["1 + 1"] * num_calls))
            rate = num_calls / (time.perf_counter() - started)
            print(f"  64 threads                              {rate:8.0f} calls a second")


if __name__ == "__main__":
    main()
