"""Where the time of a real training step goes: a preset's own training with torch.profiler around rollout and update.

    python benchmarks/step_profile.py PRESET [--warmup 3] [--steps 2] [--json FILE] [SETTING ...]

On a GPU it counts kernels, those of replayed CUDA graphs too; on a CPU, as a rehearsal, operators by self CPU time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from spear_rl.app import config, train
from spear_rl.engines.device import chosen_device
from spear_rl.train import loop, step
from spear_rl.train.callbacks import Event
from spear_rl.types import Metrics

PHASES = ("rollout", "update")
OTHER = "other (elementwise, reductions, compiled)"
KINDS = {
    OTHER: r"^triton_(?!tem)",  # torch.compile names a fused kernel for all its operators; a template is one operator
    "attention": r"flash|fmha|attend|attention|sdpa|^_(forward|backward_(queries|keys))",  # last: packed.tree_kernels
    "matrix products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|triton_tem|mkldnn|aten::\w*mm\b",
    "sampling": r"_sample(?!r)|multinomial|exponential",
    "optimizer": r"multi_tensor|adam|foreach",
    "copies and gathers": r"(?<!with_)index|gather|scatter|copy|memcpy|memset|\bcat",
}
"""Kind -> pattern of the names of its kernels or operators; the first that is found counts."""
Timed = Callable[[str, Metrics], AbstractContextManager[None]]


@dataclass
class Phase:
    """What ran in a phase, over all its profiled steps: kernels on a GPU, operators on a CPU."""

    seconds: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    busy: float = 0.0
    """Seconds in which at least one ran."""
    span: float = 0.0
    """Seconds from the start of the first to the end of the last."""

    def add(self, found: profile, *, on_gpu: bool) -> None:
        """Count a profile. On a GPU by its raw events: torch's own tables of 100,000s of kernels take minutes."""
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        raw = [event for event in found.profiler.kineto_results.events() if event.device_type() == device]
        events = [(event.name(), event.start_ns(), event.duration_ns()) for event in raw]
        if not events:
            print("warning: the profiler recorded nothing in a phase of a step", file=sys.stderr)
            return
        intervals = [(start, start + duration) for _, start, duration in events]
        self.busy += covered(intervals) / 1e9
        self.span += (max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e9
        operators = [] if on_gpu else [(o.key, o.self_cpu_time_total / 1e6, o.count) for o in found.key_averages()]
        for name, seconds, runs in operators or ((name, duration / 1e9, 1) for name, _, duration in events):
            self.seconds[name] += seconds
            self.runs[name] += runs

    def per_step(self, num_steps: int) -> dict[str, Any]:
        """Means over the steps; (seconds, share, runs) by kind and of the ten longest names."""
        total = sum(self.seconds.values()) or 1.0

        def row(names: Sequence[str]) -> tuple[float, float, float]:
            seconds, runs = (sum(counted[name] for name in names) for counted in (self.seconds, self.runs))
            return seconds / num_steps, seconds / total, runs / num_steps

        kinds = {kind: [name for name in self.seconds if kind_of(name) == kind] for kind in [*list(KINDS)[1:], OTHER]}
        means = {"busy": self.busy / num_steps, "span": self.span / num_steps, "runs": self.runs.total() / num_steps}
        longest = {name: row([name]) for name, _ in self.seconds.most_common(10)}
        return means | {"kinds": {kind: row(names) for kind, names in kinds.items()}, "longest": longest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them; the first two are in no mean")
    parser.add_argument("--steps", type=int, default=2, help="profiled steps")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    given = parser.parse_intermixed_args()
    if given.warmup < 3 or given.steps < 1:
        parser.error("--warmup must be at least 3 and --steps at least 1")
    phases, rows = {f"time/{name}": Phase() for name in PHASES}, list[Mapping[str, Any]]()

    def keep(event: Event) -> None:
        if event.kind == "step" and event.metrics:
            rows.append(event.metrics)

    with tempfile.TemporaryDirectory() as folder:
        # Kineto stops at 128 MB of records, which a rollout can exceed; it looks for this file at the first profile.
        limit = Path(folder, "kineto.conf")
        limit.write_text("ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=2000\n")
        os.environ.setdefault("KINETO_CONFIG", str(limit))
        own = [f"run.dir={folder}/run", f"run.steps={given.warmup + given.steps}", "run.trajectories_every=0"]
        settings = config.load(given.preset, [*given.settings, *own, "eval.tasks=0", "eval.every=0"])
        device = chosen_device(settings.engine.device)
        on_gpu = device.type == "cuda"
        device_name = torch.cuda.get_device_name(device) if on_gpu else f"cpu ({platform.machine()})"
        print(f"torch {torch.__version__}, {device_name}, {' '.join([given.preset, *given.settings])}\n", flush=True)
        step.timed = profiling(step.timed, given.warmup, phases, on_gpu=on_gpu)
        loop.Trainer.save = lambda trainer: None  # nobody resumes this run
        train.train_from(settings, [keep])
    plain = {name: fmean(row[f"time/{name}"] for row in rows[2 : given.warmup]) for name in (*PHASES, "step")}
    found = {name: phases[f"time/{name}"].per_step(given.steps) for name in PHASES}
    for name, phase in found.items():
        phase["seconds"] = fmean(row[f"time/{name}"] for row in rows[given.warmup :])
    print(tables(plain, found, "kernel" if on_gpu else "operator"))
    if given.json:
        about = {"torch": torch.__version__, "device": device_name, **vars(given), "json": str(given.json)}
        given.json.write_text(json.dumps(about | {"seconds": plain, "phases": found}, indent=1) + "\n")


def profiling(timed: Timed, warmup: int, phases: Mapping[str, Phase], *, on_gpu: bool) -> Timed:
    """A `timed` that, after a phase's `warmup` first times, also profiles it; the profiler's own work is not timed."""
    begun = Counter[str]()

    @contextmanager
    def profiled(name: str, metrics: Metrics) -> Iterator[None]:
        begun[name] += 1
        if begun[name] <= warmup:
            with timed(name, metrics):
                yield
            return
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        synchronize = torch.cuda.synchronize if on_gpu else lambda: None
        synchronize()
        with profile(activities=[activity]) as found, timed(name, metrics):
            yield
            synchronize()
        phases[name].add(found, on_gpu=on_gpu)

    return profiled


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of intervals (start, end)."""
    total, reached = 0, -math.inf
    for start, end in sorted(intervals):
        if end > reached:
            total += end - int(max(start, reached))
            reached = end
    return total


def tables(plain: Mapping[str, float], found: Mapping[str, Mapping[str, Any]], word: str) -> str:
    """Markdown: the phases; then of each the kinds and the longest of its kernels (or operators)."""
    rows = [[n, plain[n], p["seconds"], p["busy"], p["span"], f"{p['runs']:,.0f}"] for n, p in found.items()]
    rows.append(["rest of the step", plain["step"] - sum(plain[name] for name in found), "", "", "", ""])
    columns = ["phase", "s per step", "s under the profiler", f"s any {word} ran", "s from first to last", f"{word}s"]
    parts = [table(columns, rows)]
    for name, phase in found.items():
        for title, key in ((f"{name}: kind of {word}", "kinds"), (f"{name}: longest {word}s", "longest")):
            rows = [[label, s, f"{share:.1%}", f"{runs:,.0f}"] for label, (s, share, runs) in phase[key].items()]
            parts.append(table([title, "s per step", "share", f"{word}s"], rows))
    return "\n\n".join(parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | float]]) -> str:
    cells = [[f"{x:.4f}" if isinstance(x, float) else x[:110].replace("|", "/") for x in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *cells])


if __name__ == "__main__":
    main()
