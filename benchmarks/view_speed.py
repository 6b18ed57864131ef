"""`spear view` of a long run: seconds of first views and filters over HTTP, CPU seconds of the server, its memory.

python benchmarks/episode_store.py --keep runs/million
python benchmarks/view_speed.py runs/million
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

REPEATS = 5


def main() -> None:
    folder = Path(sys.argv[1])
    command = [sys.executable, "-m", "spear_rl.cli", "view", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        address = re.search(r"http://\S+?/", server.stdout.readline())
        assert address
        measure(address[0], folder.name, server.pid)
    finally:
        server.terminate()
        server.wait()


def measure(address: str, run: str, pid: int) -> None:
    first = {"curves": {}, "episodes": {}, "groups": {}, "replays": {}}
    for page in first:
        before = cpu_seconds(pid)
        taken = [seconds(address, page, run)]
        report(f"first view: {page}, the server's CPU {cpu_seconds(pid) - before:.2f} s", taken)
    filters = [
        {"success": "no"}, {"family": "heat", "task": "7"}, {"step": "100-300"}, {"dropped": "flat_group"},
        {"replayed": "no"}, {"sort": "-reward"}, {"sort": "task"}, 
        {"sort": "-advantage", "success": "yes", "page": "500"},
    ]  # fmt: skip
    for query in filters:
        report(f"episodes: {query}", [seconds(address, "episodes", run, **query) for _ in range(REPEATS)])
    report("groups: failed", [seconds(address, "groups", run, success="no") for _ in range(REPEATS)])
    for step in (0, 1500):
        taken = [seconds(address, "episode", run, step=step, episode=place) for place in range(REPEATS)]
        report(f"one episode of step {step}", taken)
    status = Path(f"/proc/{pid}/status").read_text()
    for name, what in (("VmHWM", "memory at most"), ("VmRSS", "memory now")):
        kilobytes = re.search(rf"{name}:\s+(\d+)", status)
        print(f"{what:75s} {int(kilobytes[1]) / 1024 if kilobytes else float('nan'):.0f} MB", flush=True)


def seconds(address: str, page: str, run: str, /, **query: object) -> float:
    start = time.perf_counter()
    with urllib.request.urlopen(f"{address}{page}?{urlencode({'run': run} | query)}") as answer:
        answer.read()
    return time.perf_counter() - start


def cpu_seconds(pid: int) -> float:
    """Of all its threads; on a busy machine the clock measures the others, too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(what: str, taken: list[float]) -> None:
    print(f"{what:75s} {min(taken):.3f} to {max(taken):.3f} s", flush=True)


if __name__ == "__main__":
    main()
