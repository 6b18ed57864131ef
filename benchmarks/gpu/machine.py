"""The machine under the measurement: its names, its clock, its memory."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "trl",
    "vllm",
    "verl",
    "ray",
    "flash-attn",
    "numpy",
    "spear-rl",
)


RANDOM = {
    "random-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                    "num_key_value_heads": 2},
    "random-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
                    "num_key_value_heads": 2},
}  # fmt: skip
"""Shapes of Qwen2.5."""

MODELS = f"smollm2, tiny, {', '.join(RANDOM)} (Qwen2.5's shape, random weights) or a transformers folder"
"""What `--model` takes."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every part takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    made.add_argument("--model", default="smollm2", help=MODELS)
    made.add_argument("--out", type=Path, help="where to write the result as JSON, besides printing it")
    return made


def sized(arguments: argparse.Namespace, sizes: dict[str, dict[str, Any]]) -> argparse.Namespace:
    """Fill in what was not asked for: full sizes on a GPU, rehearsal sizes on a CPU."""
    for name, size in sizes[arguments.device].items():
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, size)
    return arguments


def dtype_of(device: str) -> torch.dtype:
    """bfloat16 where it is fast."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], device: str) -> float:
    """How long one call takes, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def repeated(
    work: Callable[[int], Any], device: str, *, num_warmups: int, num_repeats: int
) -> tuple[float, list[float]]:
    """Seconds of the first call (compilation and all), and of each measured one; the work is told its number."""
    warm = [seconds(lambda number=number: work(number), device) for number in range(num_warmups)]
    forget_peak(device)
    return warm[0], [seconds(lambda number=number: work(num_warmups + number), device) for number in range(num_repeats)]


def forget_peak(device: str) -> None:
    """Peaks of compilation and loading are not the work's own."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float:
    """Most memory in use at once: tensors on the GPU since `forget_peak`, or the whole process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def facts() -> dict[str, Any]:
    """Versions and hardware."""
    known: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    known["torch"] = torch.__version__
    if torch.cuda.is_available():
        known |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        known["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    else:
        known |= {"gpu": None, "threads": torch.get_num_threads()}
    return known


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def report(result: dict[str, Any], out: Path | None) -> None:
    """Print a part's result and write it to `out`, in place of an earlier, less complete one."""
    text = json.dumps({"seed": 0} | result | {"command": shlex.join(sys.argv), "facts": facts()})
    print(text, flush=True)
    if out:  # whoever reads it meanwhile, or ends this process, finds a whole one
        whole = out.with_suffix(".new")
        whole.write_text(text, "utf-8")
        whole.replace(out)
