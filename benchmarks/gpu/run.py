"""Every comparison in one run on one machine, each in a process of its own; prints one table, writes one JSON.

    python -m benchmarks.gpu                                            # everything, on the GPU
    python -m benchmarks.gpu --device cpu --model tiny                  # a rehearsal
    python -m benchmarks.gpu --vllm-path VLLM_SITE_PACKAGES             # vLLM wants another transformers than ours
    python -m benchmarks.gpu --only generation rl_step:trl
    python -m benchmarks.gpu --only training --size training:layout=log

Programs beside this folder run one comparison each: agentic_rollouts.py, training_peers.py, rl_step_peers.py.
A part whose library is missing or that fails shows "-", and the reason stands below the table.
"""

from __future__ import annotations

import argparse
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
from typing import Any

PARTS: dict[str, list[str]] = {
    "floor": ["floor"],
    "generation": ["ours", "transformers", "transformers-static", "vllm"],
    "agentic": ["ours", "vllm"],
    "training": ["ours", "ours-roomy", "plain", "plain-flash", "plain-mixed", "trl"],
    "rl_step": ["base", "spear", "trl", "trl-vllm", "verl"],
    "alfworld": ["ours"],
}


WITH_VLLM = ("vllm", "trl-vllm", "verl")
"""Engines that need vLLM on their import path."""

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
    arguments = asked.parse_args([*defaults, *sys.argv[1:]])

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
            out = Path(folder) / "result.json"
            out.unlink(missing_ok=True)
            start = time.perf_counter()
            left = min(arguments.timeout, int(end - time.monotonic()))
            command = _command(part, engine, model, out, arguments)
            error = _run(command, left, _environment(engine, arguments)) if left > 0 else "no time was left"
            result = json.loads(out.read_text("utf-8")) if out.is_file() else {"error": error}
            results[f"{part}:{engine}"] = result | {"process_s": round(time.perf_counter() - start, 1)}
            arguments.out.write_text(
                json.dumps(about | results, indent=1), "utf-8"
            )  # a run cut short keeps what it has
            print(f"{part}:{engine} {results[f'{part}:{engine}']['process_s']} s {error or ''}", flush=True)
    shown = lines(results)
    kept = about | results | {"table": [asdict(line) for line in shown]}
    arguments.out.write_text(json.dumps(kept, indent=1), "utf-8")
    print("\n" + table(shown))
    for name, result in results.items():
        if "error" in result:
            print(f"\n{name}: {result['error']}")
    known = next((result["facts"] for result in results.values() if "facts" in result), {})
    print("\n" + ", ".join(f"{name} {value}" for name, value in known.items()))


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
    if engine == "vllm":
        options = arguments.vllm_option
    elif engine == "verl":
        options = arguments.verl_option
    elif engine not in ("ours", "ours-roomy", "base", "spear"):
        options = []
    return command + [word for option in options for word in ("--option", option)]


def _environment(engine: str, arguments: Any) -> dict[str, str]:
    theirs = arguments.vllm_path if engine in WITH_VLLM else None
    return {"PYTHONPATH": os.pathsep.join(filter(None, [theirs, os.environ.get("PYTHONPATH"), str(ROOT / "src")]))}


def _run(command: list[str], seconds: int, environment: dict[str, str]) -> str | None:
    """Run to the end, or stop it with all that it started; what went wrong in one line, or None."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment, cwd=ROOT, start_new_session=True
            )
        except OSError as error:
            return str(error)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = None
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

    def value(part: str, engine: str, name: str, label: str | None = None) -> float | None:
        found = results.get(f"{part}:{engine}", {}).get("results", {})
        measured = found.get(label or engine, {}).get(name)
        return None if measured is None else float(measured)

    floor = results.get("floor:floor", {}).get("results", {})
    speed = "tokens_per_s"
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
            "floor": floor.get("generation", {}).get(speed),
        },
    )
    for what, unit, name in (
        ("agentic rollouts", "tokens/s", speed),
        ("agentic rollouts, one", "s", "seconds"),
        ("agentic rollouts, peak memory", "GiB", "peak_gib"),
    ):
        others = {
            "vLLM": value("agentic", "vllm", name),
            "vLLM, turn by turn": value("agentic", "vllm", name, "vllm, turn by turn"),
        }
        out += compared(what, unit, value("agentic", "ours", name), others)
    out += compared(
        "training",
        "real tokens/s",
        value("training", "ours", speed),
        {
            "plain, bf16 weights": value("training", "plain", speed),
            "plain, flash-attn": value("training", "plain-flash", speed),
            "plain, fp32 weights + autocast": value("training", "plain-mixed", speed),
            "TRL's update": value("training", "trl", speed),
            "floor": floor.get("training", {}).get(speed),
        },
    )
    out += compared(
        "training, memory to spare",
        "real tokens/s",
        value("training", "ours-roomy", speed),
        {
            "plain, bf16 weights": value("training", "plain", speed),
            "plain, flash-attn": value("training", "plain-flash", speed),
            "plain, fp32 weights + autocast": value("training", "plain-mixed", speed),
            "TRL's update": value("training", "trl", speed),
            "floor": floor.get("training", {}).get(speed),
        },
    )
    for label, engine in (("", "ours"), (", memory to spare", "ours-roomy")):
        out += compared(
            f"training{label}, peak memory",
            "GiB",
            value("training", engine, "peak_gib"),
            {
                "plain, bf16 weights": value("training", "plain", "peak_gib"),
                "plain, flash-attn": value("training", "plain-flash", "peak_gib"),
                "plain, fp32 weights + autocast": value("training", "plain-mixed", "peak_gib"),
                "TRL's update": value("training", "trl", "peak_gib"),
            },
        )
    for what, unit, name in (
        ("RL step", "s", "seconds"),
        ("RL step, rollout", "s", "rollout_s"),
        ("RL step, update", "s", "update_s"),
        ("RL step, peak memory", "GiB", "peak_gib"),
        ("RL step, turns played", "turns", "turns"),
        ("RL step, tokens written", "tokens", "tokens"),
    ):
        others = {"TRL GRPOTrainer": "trl", "TRL with vLLM": "trl-vllm", "verl with vLLM": "verl"}
        found = {label: value("rl_step", engine, name) for label, engine in others.items()}
        out += compared(what, unit, value("rl_step", "base", name), found)
    for what, unit, name in (("with replay", "s", "seconds"), ("with replay, peak memory", "GiB", "peak_gib")):
        base = value("rl_step", "base", name)
        out += compared(f"RL step {what}", unit, value("rl_step", "spear", name), {"without (its base)": base})
    out += compared("episodes replayed a step", "", value("rl_step", "spear", "replayed"), {})
    for what, unit, name in (("", "s", "seconds"), (", rollout", "s", "rollout_s"), (", update", "s", "update_s")):
        out += compared(f"RL step on real ALFWorld{what}", unit, value("alfworld", "ours", name), {})
    out += compared("real ALFWorld, turns an episode", "", value("alfworld", "ours", "turns"), {})
    out += compared("real ALFWorld, sampler's gap", "nats", value("alfworld", "ours", "sampler_gap"), {})
    for part, engine in (("generation", "ours"), ("training", "ours"), ("rl_step", "base")):
        first = value(part, engine, "first_step_s" if part == "rl_step" else "first_call_s")
        out += compared(f"{part}: first call, with compilation", "s", first, {})
    return out


def compared(what: str, unit: str, ours: float | None, others: dict[str, float | None]) -> list[Line]:
    """Our line, then one for each of the others that says how ours stands to it; nothing if nobody was measured."""
    if ours is None and all(other is None for name, other in others.items() if name != "floor"):
        return []
    shown = [Line(what, unit, ours, "ours")]
    return shown + [Line("", unit, other, name, _verdict(name, unit, ours, other)) for name, other in others.items()]


def _verdict(name: str, unit: str, ours: float | None, other: float | None) -> str:
    if not ours or not other:
        return "-"
    if name == "floor":
        return f"{ours / other:.0%} of it"
    if name.startswith("without"):
        return f"{ours / other - 1:+.1%}"
    if unit == "s":
        return f"{other / ours:.2f}x as fast"
    return f"{ours / other:.2f}x as fast" if unit.endswith("/s") else f"{ours / other:.2f}x"


def table(shown: list[Line]) -> str:
    rows = [("what", "whose", "value", "unit", "ours beside it")]
    rows += [(line.what, line.whose, _number(line.value), line.unit, line.verdict) for line in shown]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    main()
