"""Our configuration in verl's words (translation.toml), and a check that verl still has what we hook into."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib import import_module, metadata, resources
from pathlib import Path
from typing import Any

from spear_rl.config import Config, check, load, resolved, to_toml, value_of
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.playing import tasks_of
from spear_rl.settings import update
from spear_rl.wiring import algorithm_of

_FOLDER = resources.files("spear_rl.integrations.verl")
_WORDS: dict[str, Any] = tomllib.loads((_FOLDER / "translation.toml").read_text("utf-8"))


def config_of(block: Mapping[str, Any] | None) -> Config:
    """The block `spear` of verl's configuration: settings of ours, over those of the TOML `file` if it names one."""
    if block is None:
        raise ConfigError("verl's configuration has no block spear: add e.g. +spear.algorithm.name=spear-grpo")
    config = load(block["file"]) if "file" in block else Config()
    update(config, {name: section for name, section in block.items() if name != "file"})
    check(config)
    if config.algorithm.covariance.replay == "kl" or config.algorithm.covariance.on_policy != "none":
        raise ConfigError(
            "algorithm.covariance: with verl, replay is clip or none, and on_policy is verl's own loss_mode"
        )
    return resolved(config)


def preset(source: str | None, overrides: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """A preset TASK-MODEL of the paper's, one of ours or a TOML file; with settings that only verl has."""
    task, _, model = (source or "").partition("-")
    if task in _WORDS["presets"] and model in _WORDS["models"]:
        chosen = f"engine.model={_WORDS['models'][model]}"
        return load(str(_FOLDER / "presets" / f"{task}.toml"), [chosen, *overrides]), _WORDS["presets"][task]
    return load(source, overrides), {}


def verl_settings(config: Config, folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """All that `python -m verl.trainer.main_ppo` is given; `own` settings of verl's win."""
    rollout, steps, loss = config.rollout, config.run.steps, algorithm_of(config).loss.keywords  # type: ignore[attr-defined]
    length = getattr(loss.get("reduce"), "keywords", {}).get("length")
    if config.sft.episodes or not (Path(config.engine.model).is_dir() or "/" in config.engine.model):
        raise ConfigError(
            "verl starts from a transformers folder and has no cold start: run `spear sft`, then set engine.model to "
            "the model folder it wrote and sft.episodes=0"
        )
    actor, num_tokens = "actor_rollout_ref.actor", rollout.max_context + rollout.max_new_tokens
    keys: dict[str, Any] = {name: value_of(config, ours) for name, ours in _WORDS["settings"].items()} | _WORDS[
        "constants"
    ]
    keys |= {
        "data.train_files": str(folder / "train.jsonl"),
        "data.val_files": str(folder / "validation.jsonl"),
        "actor_rollout_ref.model.lora_alpha": 2 * config.engine.lora_rank or 16,
        "actor_rollout_ref.rollout.skip_tokenizer_init": not rollout.stop,
        f"{actor}.ppo_mini_batch_size": max(rollout.num_tasks // config.optim.num_minibatches, 1),
        f"{actor}.ppo_max_token_len_per_gpu": max(config.engine.micro_batch_tokens or 16384, num_tokens),
        f"{actor}.clip_ratio_low": loss["clip_low"],
        f"{actor}.clip_ratio_high": loss["clip_high"],
        f"{actor}.clip_ratio_c": loss.get("dual_clip") or 1e9,
        f"{actor}.loss_agg_mode": "seq-mean-token-sum-norm" if length else "token-mean",
        f"{actor}.loss_scale_factor": length,
        f"{actor}.use_kl_loss": bool(config.algorithm.kl),
        "trainer.total_training_steps": steps or None,
        "trainer.total_epochs": 10**6 if steps else 1,
        "trainer.test_freq": config.eval.every or -1,
        "trainer.val_before_train": bool(config.eval.every),
        "trainer.resume_mode": "auto" if config.run.resume else "disable",
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "hydra.run.dir": str(folder / "hydra"),
        "+spear.file": str(folder / "config.toml"),
    }
    keys |= own
    gpus = int(keys["trainer.n_gpus_per_node"]) * int(keys["trainer.nnodes"])
    rows = int(keys[f"{actor}.ppo_mini_batch_size"]) * int(keys["actor_rollout_ref.rollout.n"])
    if rollout.num_tasks % config.optim.num_minibatches or rows % gpus:
        raise ConfigError(
            f"batch sizes do not divide: {rollout.num_tasks} tasks by {config.optim.num_minibatches} mini-batches, or "
            f"{rows} rows of one by {gpus} GPUs; change rollout.num_tasks, rollout.group_size or optim.num_minibatches"
        )
    return keys


def write_files(config: Config, folder: Path) -> None:
    """The settings, and one line a task: verl's datasets only say which task is to be played."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config), "utf-8")
    about = {"data_source": config.task.env, "agent_name": "spear", "reward_model": {"ground_truth": ""}}
    for split, name, count in (("train", "train", None), (config.eval.split, "validation", config.eval.tasks or 1)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, task in enumerate(tasks_of(config, split, count=count)):
                prompt = [{"role": "user", "content": task.id}]
                line = about | {"prompt": prompt, "extra_info": {"index": number, "split": split}}
                file.write(json.dumps(line) + "\n")


def checked() -> str:
    """One line that says all is well; anything else is raised, in one sentence."""
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError("verl is not installed: pip install 'spear-rl[verl]'") from error
    if not (0, 9, 1) <= tuple(map(int, version.split(".")[:3])) < (0, 10):
        raise ConfigError(f"verl {version} is not supported: pip install 'verl>=0.9.1,<0.10'")
    import_module("verl")
    hooks = [(module, name) for module, names in _WORDS["hooks"].items() for name in names]
    if missing := [f"{module}.{name}" for module, name in hooks if not _exists(module, name)]:
        raise ConfigError(f"verl {version} lacks {', '.join(missing)}: pip install verl==0.9.1, or switch SPEAR off")
    if "spear" not in import_module("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY:
        raise ConfigError(
            "verl did not load our plug-in: reinstall spear-rl so that its entry point verl.plugins is known, or set "
            "VERL_USE_EXTERNAL_MODULES=spear_rl.integrations.verl.trainer, which also shows why it does not load"
        )
    return f"verl {version}: plug-in loaded, all {len(hooks)} hooks found"


def _exists(module: str, name: str) -> bool:
    try:
        reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
