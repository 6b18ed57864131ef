"""Cells of a plan, each one ordinary `spear train` command, and the cold starts that cells share."""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from spear_rl.app.config import Config, flat, load, merged, require_env
from spear_rl.settings.fields import literal, toml_value

_COLD = ("run.seed", "run.threads", "task.", "engine.", "sft.", "rollout.", "optim.weight_decay", "optim.max_grad_norm")
_NOT_COLD = (
    "sft.checkpoint_seconds", "engine.importance_cap", "engine.generator", "engine.vllm_memory",
    "rollout.num_tasks", "rollout.group_size", "rollout.workers", "rollout.step_timeout",
    "rollout.return_share", "rollout.return_when", "rollout.restart_share", "rollout.restart_success",
)  # fmt: skip
"""Prefixes of the settings that a cold start depends on, and those among them that it does not."""
_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_PLAIN = re.compile(r"[\w./:@%+-]([\w./:@%+ -]*[\w./:@%+-])?", re.ASCII)
"""A text that a setting of the command line takes without quotes."""


@dataclass(frozen=True)
class ColdStart:
    """One `spear sft` command, whose model several cells begin with."""

    name: str
    folder: Path
    arguments: list[str]
    config: Config


@dataclass(frozen=True)
class Cell:
    """One run of an arm with a seed in a block."""

    block: tuple[str, ...]
    arm: str
    seed: int
    folder: Path
    source: str | None
    table: dict[str, Any]
    """What the plan says beside the preset or file."""
    config: Config
    """All settings, resolved."""
    cold_start: ColdStart | None = None

    @property
    def name(self) -> str:
        return "/".join([*self.block, self.arm, f"seed_{self.seed}"])

    @property
    def arguments(self) -> list[str]:
        """The command after `spear`."""
        return _arguments("train", self.source, self.table)


def cell_of(
    source: str | None, layers: Sequence[Mapping[str, Any]], out: Path, block: tuple[str, ...], arm: str, seed: int
) -> Cell:
    """A cell of the settings in `layers`, later ones first in rank; a ConfigError says what cannot work."""
    table = _joined(layers, env=merged(source).task.env)
    folder = out.joinpath("cells", *block, arm, f"seed_{seed}")
    run = table.setdefault("run", {})
    run |= {"seed": seed, "dir": str(folder), "resume": "auto"}
    config = load(source, _overrides(table))
    require_env(config)
    if "threads" not in run and not config.run.threads and not on_gpu(config):
        run["threads"] = config.run.threads = 1
    return Cell(block, arm, seed, folder, source, table, config)


def _joined(layers: Sequence[Mapping[str, Any]], *, env: str) -> dict[str, Any]:
    """Tables of settings as one; a layer that changes the environment drops the options of the one before."""
    joined: dict[str, Any] = {}
    for layer in layers:
        task = layer.get("task", {})
        if task.get("env", env) != env:
            joined.get("task", {}).pop("options", None)
            env = task["env"]
        _join(joined, layer)
    return joined


def _join(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping):
            _join(below.setdefault(key, {}), value)
        else:
            below[key] = value


def _arguments(verb: str, source: str | None, table: Mapping[str, Any]) -> list[str]:
    return [verb, *([source] if source else []), *_overrides(table)]


def _overrides(table: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line; the place of the run comes last."""
    found = [word for section, values in table.items() for word in _words(values, section)]
    return sorted(found, key=lambda word: word.startswith(("run.seed=", "run.dir=", "run.resume=")))


def _words(value: Any, key: str) -> list[str]:
    is_section = isinstance(value, Mapping) and not key.startswith("task.options.")  # an option's table stays whole
    if is_section and all(_BARE.fullmatch(name) for name in value):
        return [word for name, entry in value.items() for word in _words(entry, f"{key}.{name}")]
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and literal(value) == value
    return [f"{key}={value if is_plain else toml_value(value)}"]


def with_shared_cold_starts(
    cells: Sequence[Cell], out: Path, reference: str, axes: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[list[Cell], list[ColdStart]]:
    """The cells, beginning with the model of a cold start that those with the same model, task and settings share.

    Args:
        axes: the choices of every axis of blocks; a folder is named by the choices that a cold start depends on.
    """
    relevant = [any(_is_cold_table(table) for table in choices) for choices in axes]
    made: dict[Path, ColdStart] = {}
    changed = []
    bases = {(cell.block, cell.seed): _cold_settings(cell.config) for cell in cells if cell.arm == reference}
    for cell in cells:
        if not cell.config.sft.episodes:
            changed.append(cell)
            continue
        parts = [choice for choice, counts in zip(cell.block, relevant, strict=True) if counts]
        if _cold_settings(cell.config) != bases[cell.block, cell.seed]:
            parts.append(f"arm_{cell.arm}")
        folder = out.joinpath("cold_starts", *parts, f"seed_{cell.seed}")
        if folder not in made:
            made[folder] = _cold_start(cell, folder, "/".join(["cold start", *parts, f"seed_{cell.seed}"]))
        table = {name: dict(section) for name, section in cell.table.items()}
        table.setdefault("engine", {})["model"] = str(folder / "model")
        table.setdefault("sft", {})["episodes"] = 0
        config = load(cell.source, _overrides(table))
        changed.append(replace(cell, table=table, config=config, cold_start=made[folder]))
    return changed, list(made.values())


def _cold_start(cell: Cell, folder: Path, name: str) -> ColdStart:
    table = {name: dict(section) for name, section in cell.table.items() if name not in ("algorithm", "eval")}
    table["run"]["dir"] = str(folder)
    table["eval"] = {"tasks": 0, "every": 0}  # every cell evaluates the model itself
    return ColdStart(name, folder, _arguments("sft", cell.source, table), load(cell.source, _overrides(table)))


def _cold_settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in flat(config).items() if is_cold(key)}


def is_cold(key: str) -> bool:
    """Whether a cold start depends on a setting."""
    return key.startswith(_COLD) and not key.startswith(_NOT_COLD)


def _is_cold_table(choice: Mapping[str, Any]) -> bool:
    keys = [f"{name}.{key}" for name, table in choice.items() if isinstance(table, Mapping) for key in table]
    return "preset" in choice or "config" in choice or any(map(is_cold, keys))


def on_gpu(config: Config) -> bool:
    """Whether a cell runs on a GPU, as far as can be known without torch."""
    return config.engine.device == "cuda" or (config.engine.device == "auto" and bool(gpus()))


@cache
def gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1", "NoDevFiles"))
    numbers = (path.removeprefix("/dev/nvidia") for path in glob.glob("/dev/nvidia[0-9]*"))
    return tuple(sorted(numbers, key=int))
