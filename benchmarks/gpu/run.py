"""Every comparison in one run on one machine, each in a process of its own; prints one table, writes one JSON.

    python -m benchmarks.gpu                                            # everything, on the GPU
    python -m benchmarks.gpu --device cpu --model tiny                  # a rehearsal
    python -m benchmarks.gpu --vllm-path VLLM_SITE_PACKAGES             # vLLM wants another transformers than ours
    python -m benchmarks.gpu --only generation rl_step:trl
    python -m benchmarks.gpu --only training --size training:layout=log
    python -m benchmarks.gpu --join floor.json rollouts.json step.json  # one table per model of earlier runs

Programs beside this folder run one comparison each: agentic_rollouts.py, training_peers.py, rl_step_peers.py.
A part whose library is missing or that fails shows "-", and the reason stands below the table. Values are medians of
the repeats after the warm-ups; the spread is the smallest and the largest of them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

PARTS: dict[str, list[str]] = {
    "floor": ["floor"],
    "generation": ["ours", "transformers", "transformers-static", "vllm"],
    "agentic": ["ours", "vllm", "vllm-process"],
    "training": ["ours", "ours-roomy", "plain", "plain-flash", "plain-mixed", "trl"],
    "rl_step": ["base", "spear", "trl", "trl-vllm", "verl"],
    "alfworld": ["ours"],
}


WITH_VLLM = ("vllm", "vllm-process", "trl-vllm", "verl")
"""Engines that need vLLM on their import path."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Models are folders here: no library should wait for a network."""

VARIED = ("steps", "warmups", "repeats", "trl_rows", "longest")
"""Sizes that may differ between engines that have the same work."""

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    unit: str
    value: float | None
    whose: str = ""
    verdict: str = ""
    """How ours stands to it."""
    spread: tuple[float, float] | None = None
    """The smallest and the largest of what `value` is the median of."""


@dataclass(frozen=True)
class Figure:
    """A median, and the smallest and largest of what it is of."""

    value: float
    spread: tuple[float, float] | None = None


def main(defaults: Sequence[str] = (), description: str | None = None) -> None:
    """Runs with `defaults` before the words of the command line."""
    import torch
    from benchmarks.gpu.machine import MODELS

    asked = argparse.ArgumentParser(
        description=description or __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    asked.add_argument("--model", default="smollm2", help=MODELS)
    asked.add_argument("--only", nargs="+", metavar="PART[:ENGINE]", help=f"of {', '.join(PARTS)}")
    asked.add_argument("--without", nargs="+", metavar="PART[:ENGINE]", default=[])
    asked.add_argument("--vllm-path", help="folder with vLLM and its transformers, put first on vLLM's import path")
    asked.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM")
    asked.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL")
    asked.add_argument("--option", action="append", default=[], help="PART:KEY=VALUE for our engine in that part")
    asked.add_argument("--vllm-option", action="append", default=[], help="KEY=VALUE for vLLM's LLM")
    asked.add_argument("--verl-option", action="append", default=[], help="KEY=VALUE for verl")
    asked.add_argument(
        "--size", action="append", default=[], help="PART:NAME=VALUE, an argument of that part's program"
    )
    asked.add_argument("--timeout", type=int, default=300, help="seconds a process may take")
    asked.add_argument("--total", type=int, default=86400, help="seconds after which no process goes on")
    asked.add_argument("--out", type=Path, default=Path("benchmarks_gpu.json"))
    asked.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="measure nothing: the tables of these runs")
    arguments = asked.parse_args([*defaults, *sys.argv[1:]])
    if arguments.join:
        models = joined(arguments.join)
        for model, found in models.items():
            print(f"## {model}\n\n{told(found)}\n")
            found["table"] = [asdict(line) for line in lines(found)]
        arguments.out.write_text(json.dumps(models, indent=1), "utf-8")
        return

    _adopt_orphans()
    about = {"command": shlex.join([sys.executable, *sys.argv]), "model": arguments.model, "device": arguments.device}
    end = time.monotonic() + arguments.total
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(arguments.model).absolute())
        if not Path(model).is_dir():
            model = f"{folder}/model"
            prepare = [sys.executable, "-m", "benchmarks.gpu.prepare", "--device", "cpu"]
            if error := _run([*prepare, "--model", arguments.model, model], arguments.total, {}):
                sys.exit(f"the model cannot be prepared: {error}")
        for part, engine in chosen(arguments):
            name, out = f"{part}:{engine}", Path(folder) / "result.json"
            out.unlink(missing_ok=True)
            start, before = time.perf_counter(), gpu_mib()
            left = min(arguments.timeout, int(end - time.monotonic()))
            command = _command(part, engine, model, out, arguments)
            used = [before or 0]
            error = _run(command, left, _environment(engine, arguments), used) if left > 0 else "no time was left"
            results[name] = json.loads(out.read_text("utf-8")) if out.is_file() else {}
            results[name] |= {"error": error} if error else {}
            results[name] |= {"process_s": round(time.perf_counter() - start, 1), "limit_s": left}
            if before is not None:
                results[name] |= {"gpu_gib_before": before / 1024, "gpu_gib_peak": max(used) / 1024}
            # A run cut short keeps what it has.
            arguments.out.write_text(json.dumps(about | results, indent=1), "utf-8")
            print(f"{name} {results[name]['process_s']} s {error or ''}", flush=True)
    kept = about | results | {"table": [asdict(line) for line in lines(results)]}
    arguments.out.write_text(json.dumps(kept, indent=1), "utf-8")
    print("\n" + told(results))


def joined(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The results of several runs by model; a later one counts, but no failure replaces a measurement."""
    models: dict[str, dict[str, Any]] = {}
    for file in files:
        run = json.loads(file.read_text("utf-8"))
        known = models.setdefault(Path(run["model"]).name, {})
        for name, result in run.items():
            if ":" in name and ("results" in result or "results" not in known.get(name, {})):
                known[name] = result
    return models


def told(results: dict[str, Any]) -> str:
    """The table, what went wrong, whose work differed, and on what it all ran."""
    parts = [table(lines(results))]
    for name, result in results.items():
        errors = {name: result.get("error")} | {
            f"{name}, {label}": measured.get("error") for label, measured in result.get("results", {}).items()
        }
        parts += [f"{whose}: {error}" for whose, error in errors.items() if error]
        if result.get("gpu_gib_before", 0) > 2:
            parts.append(f"{name}: {result['gpu_gib_before']:.1f} GiB of the GPU were taken before it began")
    sizes: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        mine = {key: size for key, size in result.get("sizes", {}).items() if key not in VARIED}
        part = name.partition(":")[0]
        if mine and sizes.setdefault(part, mine) != mine:
            parts.append(f"{name}: other work than the rest of {part}: {mine} instead of {sizes[part]}")
    counts = [(name, r["sizes"]) for name, r in results.items() if "warmups" in r.get("sizes", {})]
    if counts:
        parts.append(
            "left out as warm-up, then counted: "
            + ", ".join(f"{n} {s['warmups']}, {s.get('repeats', s.get('steps'))}" for n, s in counts)
        )
    machines: dict[str, list[str]] = {}
    for name, result in results.items():
        if "facts" in result:
            facts = ", ".join(f"{key} {fact}" for key, fact in result["facts"].items())
            machines.setdefault(facts, []).append(name)
    return "\n\n".join([*parts, *(f"{' '.join(names)}: {facts}" for facts, names in machines.items())])


def chosen(arguments: Any) -> list[tuple[str, str]]:
    """(part, engine) of everything asked for."""
    pairs = [(part, engine) for part, engines in PARTS.items() for engine in engines]

    def is_named(pair: tuple[str, str], names: list[str]) -> bool:
        return pair[0] in names or ":".join(pair) in names

    return [
        p for p in pairs if (not arguments.only or is_named(p, arguments.only)) and not is_named(p, arguments.without)
    ]


def _command(part: str, engine: str, model: str, out: Path, arguments: Any) -> list[str]:
    pythons = {"trl": arguments.trl_python} | dict.fromkeys(WITH_VLLM, arguments.vllm_python)
    python = pythons.get(engine, sys.executable)
    command = [
        python,
        "-m",
        f"benchmarks.gpu.{part}",
        "--device",
        arguments.device,
        "--model",
        model,
        "--out",
        str(out),
    ]
    if part != "floor":
        command += ["--engine", engine]
    options = [o.partition(":")[2] for o in arguments.option if o.partition(":")[0] == part]
    for size in arguments.size:
        name, _, value = size.partition(":")[2].partition("=")
        command += [f"--{name}", value] if size.partition(":")[0] == part else []
    if engine.startswith("vllm"):
        options = arguments.vllm_option
    elif engine == "verl":
        options = arguments.verl_option
    elif engine not in ("ours", "ours-roomy", "base", "spear"):
        options = []
    return command + [word for option in options for word in ("--option", option)]


def _environment(engine: str, arguments: Any) -> dict[str, str]:
    theirs = arguments.vllm_path if engine in WITH_VLLM else None
    path = os.pathsep.join(filter(None, [theirs, os.environ.get("PYTHONPATH"), str(ROOT / "src")]))
    return OFFLINE | {"PYTHONPATH": path}


def gpu_mib() -> float | None:
    """Memory of the GPU in use by anybody."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return float(said.splitlines()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _adopt_orphans() -> None:
    """On Linux, what a part leaves running becomes a child of this process, which can end it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def descendants() -> list[int]:
    """Of this process, by /proc; none without it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(
                stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()[1]
            )
    found, more = set[int](), {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in more} - found:
        found |= more
    return sorted(found)


def _end_leftovers() -> None:
    """End what a part has left running: it would keep the GPU's memory."""
    for how, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + patience
        for process in descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, how)
        while descendants() and time.monotonic() < end:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.1)


def _run(command: list[str], seconds: int, environment: dict[str, str], used: list[float] | None = None) -> str | None:
    """Run to the end, or stop it with all that it started; what went wrong in one line, or None.

    `used` gets the MiB of the GPU in use meanwhile.
    """
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment, cwd=ROOT, start_new_session=True
            )
        except OSError as error:
            return str(error)
        code, end = None, time.monotonic() + seconds
        while code is None and (left := end - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(left, 5))
            if code is None and used is not None and (now := gpu_mib()) is not None:
                used.append(now)
        if code is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            process.wait()
        _end_leftovers()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    if code == 0:
        return None
    print("\n".join(said[-25:]), flush=True)
    if code is None:
        return f"not done after {seconds} s"
    return said[-1][:300] if said else f"exit code {code}"


def lines(results: dict[str, Any]) -> list[Line]:
    """What the measurements say about each other."""

    def value(part: str, engine: str, name: str, label: str | None = None) -> Figure | None:
        found = results.get(f"{part}:{engine}", {})
        return figure_of(found.get("results", {}).get(label or engine, {}), name, found.get("sizes", {}))

    def device_peak(part: str, engine: str) -> Figure | None:
        found = results.get(f"{part}:{engine}", {})
        return Figure(found["gpu_gib_peak"]) if "gpu_gib_peak" in found and "results" in found else None

    speed, floor = "tokens_per_s", floors(results)
    out = compared(
        "generation",
        "tokens/s",
        value("generation", "ours", speed),
        {
            "transformers, dynamic cache": value("generation", "transformers", speed, "transformers dynamic cache"),
            "transformers, static cache": value(
                "generation", "transformers-static", speed, "transformers static cache"
            ),
            "vLLM, no log-probs": value("generation", "vllm", speed),
            "vLLM, log-probs": value("generation", "vllm", speed, "vllm with log-probs"),
            "floor": floor.get("generation"),
        },
    )
    for what, unit, name in (("agentic rollouts", "tokens/s", speed), ("agentic rollouts, one", "s", "seconds")):
        others = {
            "vLLM": value("agentic", "vllm", name),
            "vLLM, a process of its own": value("agentic", "vllm-process", name),
            "vLLM, turn by turn": value("agentic", "vllm", name, "vllm, turn by turn"),
            "floor": floor.get(f"agentic {name}"),
        }
        out += compared(what, unit, value("agentic", "ours", name), others)
    memory = {"vLLM, which takes half of the GPU": value("agentic", "vllm", "peak_gib")}
    out += compared("agentic rollouts, peak memory", "GiB", value("agentic", "ours", "peak_gib"), memory)
    plain = {
        "plain, bf16 weights": "plain",
        "plain, flash attention": "plain-flash",
        "plain, fp32 weights + autocast": "plain-mixed",
        "TRL's update": "trl",
    }
    for label, engine in (("", "ours"), (", memory to spare", "ours-roomy")):
        if engine != "ours" and value("training", engine, speed) is None:
            continue
        others = {name: value("training", other, speed) for name, other in plain.items()}
        others |= {"floor, whole rows": floor.get("training whole"), "floor": floor.get("training distinct")}
        out += compared(f"training{label}", "real tokens/s", value("training", engine, speed), others)
        others = {name: value("training", other, "peak_gib") for name, other in plain.items()}
        out += compared(f"training{label}, peak memory", "GiB", value("training", engine, "peak_gib"), others)
    peers = {"TRL GRPOTrainer": "trl", "TRL with vLLM": "trl-vllm", "verl with vLLM": "verl"}
    for what, unit, name in (
        ("RL step", "s", "seconds"),
        ("RL step, rollout", "s", "rollout_s"),
        ("RL step, update and the rest", "s", "update_s"),
        ("RL step, peak of torch in its process", "GiB", "peak_gib"),
        ("RL step, turns played", "turns", "turns"),
        ("RL step, tokens written", "tokens", "tokens"),
    ):
        others = {label: value("rl_step", engine, name) for label, engine in peers.items()}
        others |= {"floor": floor[f"rl_step {name}"]} if f"rl_step {name}" in floor else {}
        out += compared(what, unit, value("rl_step", "base", name), others)
    others = {label: device_peak("rl_step", engine) for label, engine in peers.items()}
    out += compared("RL step, GPU memory taken by all processes", "GiB", device_peak("rl_step", "base"), others)
    for what, unit, name in (("with replay", "s", "seconds"), ("with replay, peak memory", "GiB", "peak_gib")):
        base = value("rl_step", "base", name)
        out += compared(f"RL step {what}", unit, value("rl_step", "spear", name), {"without (its base)": base})
    out += compared("episodes replayed a step", "", value("rl_step", "spear", "replayed"), {})
    for what, unit, name in (("", "s", "seconds"), (", rollout", "s", "rollout_s"), (", update", "s", "update_s")):
        out += compared(f"RL step on real ALFWorld{what}", unit, value("alfworld", "ours", name), {})
    out += compared("real ALFWorld, turns an episode", "", value("alfworld", "ours", "turns"), {})
    out += compared("real ALFWorld, sampler's gap", "nats", value("alfworld", "ours", "sampler_gap"), {})
    for part, engine in (("generation", "ours"), ("agentic", "ours"), ("training", "ours"), ("rl_step", "base")):
        first = value(part, engine, "first_step_s" if part == "rl_step" else "first_call_s")
        out += compared(f"{part}: first call, with compilation", "s", first, {})
    return out


def figure_of(measured: dict[str, Any], name: str, sizes: dict[str, Any]) -> Figure | None:
    """A number of an engine's results, with its spread where the repeats are known."""
    found, each = measured.get(name), list[float]()
    steps = measured.get("steps", [])[sizes.get("warmups", 0) :]
    if steps and all(name in step for step in steps):
        each = [step[name] for step in steps]
    elif name in ("seconds", "tokens_per_s"):
        times = measured.get("all_s") or measured.get("seconds")
        each = times if isinstance(times, list) else []
        if name == "tokens_per_s" and found is not None:
            each = [found * median(each) / taken for taken in each]
    if isinstance(found, list):
        found = median(found)
    return None if found is None else Figure(float(found), (min(each), max(each)) if each else None)


def floors(results: dict[str, Any]) -> dict[str, Figure]:
    """What the ceilings that were measured allow, for the work of each part that was."""
    from benchmarks.gpu.floor import Shape, seconds_of_rollout, seconds_of_update
    from benchmarks.gpu.work import RolloutWork, RowWork

    measured = results.get("floor:floor", {})
    if "shape" not in measured:
        return {}
    shape = Shape(**measured["shape"])
    copy, matmul = measured["ceilings"]["copy_bytes_per_s"], measured["ceilings"]["matmul_flops"]

    def rollout(work: dict[str, int]) -> float:
        return seconds_of_rollout(shape, copy, matmul, RolloutWork(**work))

    def update(work: dict[str, int]) -> float:
        return seconds_of_update(shape, copy, matmul, RowWork(**work))

    found = {"generation": measured["results"]["generation"]["tokens_per_s"]}
    played = next((r for name, r in results.items() if name.startswith("agentic:") and "work" in r), None)
    if played:
        found["agentic seconds"] = rollout(played["work"])
        found["agentic tokens_per_s"] = played["work"]["sampled"] / found["agentic seconds"]
    trained = next((r for name, r in results.items() if name.startswith("training:") and "work" in r), None)
    if trained:
        for label, work in (("whole", trained["work"]), ("distinct", trained["distinct"])):
            found[f"training {label}"] = trained["work"]["tokens"] / update(work)
    if work := results.get("rl_step:base", {}).get("work"):
        found["rl_step rollout_s"], found["rl_step update_s"] = rollout(work["rollout"]), update(work["rows"])
        found["rl_step seconds"] = found["rl_step rollout_s"] + found["rl_step update_s"]
    return {name: Figure(value) for name, value in found.items()}


def compared(what: str, unit: str, ours: Figure | None, others: dict[str, Figure | None]) -> list[Line]:
    """Our line, then one for each of the others that says how ours stands to it; nothing if nobody was measured."""
    if ours is None and all(other is None for name, other in others.items() if not name.startswith("floor")):
        return []

    def line(label: str, whose: str, figure: Figure | None, verdict: str = "") -> Line:
        if figure is None:
            return Line(label, unit, None, whose, verdict)
        return Line(label, unit, figure.value, whose, verdict, figure.spread)

    rest = {name: other for name, other in others.items() if other or not name.startswith("floor")}
    shown = [line(what, "ours", ours)]
    return shown + [line("", name, other, _verdict(name, unit, ours, other)) for name, other in rest.items()]


def _verdict(name: str, unit: str, mine: Figure | None, theirs: Figure | None) -> str:
    if not mine or not theirs or not mine.value or not theirs.value:
        return "-"
    ours, other = mine.value, theirs.value
    if name.startswith("floor"):
        return f"{other / ours if unit == 's' else ours / other:.0%} of it"
    if name.startswith("without"):
        return f"{ours / other - 1:+.1%}"
    if unit == "s":
        return f"{other / ours:.2f}x as fast"
    return f"{ours / other:.2f}x as fast" if unit.endswith("/s") else f"{ours / other:.2f}x"


def table(shown: list[Line]) -> str:
    rows = [("what", "whose", "median", "smallest to largest", "unit", "ours beside it")]
    for line in shown:
        spread = " to ".join(map(_number, line.spread)) if line.spread else ""
        rows.append((line.what, line.whose, _number(line.value), spread, line.unit, line.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 or not value else f"{value:.4f}"


if __name__ == "__main__":
    main()
