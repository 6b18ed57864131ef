"""How long a call of the sandboxed interpreter takes. python benchmarks/sandbox_speed.py [--calls 300]

With --beside OTHER/src the calls of this version and of another checkout alternate, so that both see the same load.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from spear_rl.sandbox import Interpreter, Limits, SandboxUnavailable

ROUNDS = 6
SOLVE = "import sympy\nx = sympy.Symbol('x')\nsympy.solve(x**2 - 5*x + 6, x)"


def milliseconds(call: Callable[[], object], num_calls: int) -> str:
    """Median and 95 % of a call."""
    took = []
    for _ in range(num_calls):
        started = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - started))
    return f"{statistics.median(took):8.2f} {statistics.quantiles(took, n=20)[-1]:8.2f}"


def answer(backend: str) -> None:
    """Make the calls that are asked for on stdin and say how many milliseconds each took."""
    with Interpreter(Limits(seconds=60), backend=backend) as pool, pool.session() as session:
        pool.run("1")
        session.run(SOLVE)
        for name in sys.stdin:
            code, place = (SOLVE, pool) if "solve" in name else ("1 + 1", session if "session" in name else pool)
            started = time.perf_counter()
            place.run(code)
            print(1000 * (time.perf_counter() - started), flush=True)


def compare(other: str, num_calls: int) -> None:
    """Print the quartile and the median of this version and of another one, whose calls take turns.

    The processes are started afresh several times: which core they land on matters more than the versions do.
    """
    here = next(path for path in sys.path if os.path.isdir(f"{path}/spear_rl"))
    names = ("one-off, `1 + 1`", "one-off, sympy.solve", "next call of a session, `1 + 1`")
    print(f"{num_calls} calls each, in turn; milliseconds at 25 % and at the median: other, this")
    for backend in ("namespaces", "landlock"):
        took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
        for _ in range(ROUNDS):
            workers = [_worker(backend, source) for source in (other, here)]
            for name in names:
                for number in range(2 * num_calls // ROUNDS):
                    which = number % 2 if number // 2 % 2 else 1 - number % 2  # neither is always first
                    took[name][which].append(_asked(workers[which], name))
            for worker in workers:
                worker.communicate()
        for name, both in took.items():
            low, middle = (
                [statistics.quantiles(each, n=4)[0] for each in both],
                [statistics.median(each) for each in both],
            )
            figures = " ".join(f"{a:8.2f} {b:8.2f} ({b / a:.2f})" for a, b in (low, middle))
            print(f"  {f'{backend}, {name}':<46} {figures}", flush=True)


def _worker(backend: str, source: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--answer", backend]
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _asked(worker: subprocess.Popen[str], name: str) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(name, file=worker.stdin, flush=True)
    return float(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--beside", metavar="OTHER/src")
    parser.add_argument("--answer", metavar="BACKEND", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    num_calls = arguments.calls
    if arguments.answer:
        answer(arguments.answer)
        return
    load = os.getloadavg()[0]
    print(f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, "
          f"user {os.getuid()}, Python {platform.python_version()}")  # fmt: skip
    if arguments.beside:
        compare(arguments.beside, num_calls)
        return
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
