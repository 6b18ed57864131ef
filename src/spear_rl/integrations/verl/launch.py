"""Our configuration as verl's settings (translation.toml), and the command `spear verl`."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from spear_rl.algorithms import Algorithm, ClippedSurrogate, FixedLength, SequenceMean, TokenMean
from spear_rl.app.build.rollout import eval_sampling_of, tasks_of
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import Config, load, to_toml, value_of
from spear_rl.engines.models.load import located
from spear_rl.errors import ConfigError
from spear_rl.integrations.shared.requirements import require_names, require_surrogate, require_version

_TABLES: dict[str, Any] = tomllib.loads((resources.files(__package__) / "translation.toml").read_text("utf-8"))
_REDUCTIONS = {TokenMean: "token-mean", SequenceMean: "seq-mean-token-mean", FixedLength: "seq-mean-token-sum-norm"}


def config_of(block: Mapping[str, Any] | None) -> Config:
    """Our configuration: the block `spear` of verl's configuration, on top of the TOML `file` that it may name."""
    if block is None:
        raise ConfigError("verl's configuration has no block spear: add e.g. +spear.algorithm.name=spear-grpo")
    config = load(block.get("file"), block={name: section for name, section in block.items() if name != "file"})
    require_expressible(algorithm_of(config))
    require_verls_tasks(config)
    return config


def require_verls_tasks(config: Config) -> None:
    """Refuse settings that choose tasks: verl's data loader does."""
    for name in ("rollout.return_share", "rollout.restart_share", "algorithm.imitation.join_lost"):
        if value := value_of(config, name):
            raise ConfigError(
                f"{name}={str(value).lower()}: verl chooses the tasks itself, so this works with `spear train` only"
            )


def require_expressible(algorithm: Algorithm) -> ClippedSurrogate:
    """The on-policy loss, if verl's own loss can express it and the replay loss; otherwise one sentence why not."""
    if algorithm.critic:
        raise ConfigError("algorithm.name: an algorithm with a critic trains with `spear train`, not inside verl")
    if algorithm.entropy_floor:
        raise ConfigError("algorithm.entropy_floor: verl has one entropy coefficient for a whole run; leave it out")
    parts = [part.loss for part in (algorithm, algorithm.imitation) if part]
    losses = [require_surrogate(loss, _REDUCTIONS, setting="algorithm.name", framework="verl") for loss in parts]
    on_policy, *replayed = [loss.covariance for loss in losses]
    if on_policy or any(clip and clip.kind == "kl" for clip in replayed):
        raise ConfigError("algorithm.covariance: with verl, replay is clip or none, and on_policy verl's own loss_mode")
    return losses[0]


def verl_settings(config: Config, folder: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for `python -m verl.trainer.main_ppo`; `theirs` override ours."""
    rollout, count, actor = config.rollout, config.optim.num_minibatches, "actor_rollout_ref.actor"
    if config.sft.episodes:
        hint = "run `spear sft`, then set engine.model to the model folder it wrote and sft.episodes=0"
        raise ConfigError(f"verl has no cold start: {hint}")
    model = Path(config.engine.model)
    if not (model.is_dir() or ("/" in config.engine.model and model.suffix.lower() != ".gguf")):
        wanted = "verl wants a transformers folder (`spear sft` writes one) or a hub id, owner/name"
        raise ConfigError(f"engine.model: {config.engine.model!r} is no folder: {wanted}")
    require_verls_tasks(config)
    if not model.is_dir() and (config.engine.revision or re.search("@|^hf:", config.engine.model)):  # ours alone
        config.engine.model, config.engine.revision = str(located(config.engine.model, config.engine.revision)), ""
    loss = require_expressible(algorithm_of(config))
    longest = rollout.max_context + rollout.max_new_tokens
    keys: dict[str, Any] = {name: value_of(config, ours) for name, ours in _TABLES["settings"].items()}
    keys |= {name: x.format(folder=folder) if isinstance(x, str) else x for name, x in _TABLES["constants"].items()}
    keys |= {
        "actor_rollout_ref.model.lora_alpha": 2 * config.engine.lora_rank or 16,
        "trainer.resume_mode": "auto" if config.run.resume else "disable",
        f"{actor}.ppo_mini_batch_size": rollout.num_tasks // count,
        f"{actor}.ppo_max_token_len_per_gpu": max(config.engine.micro_batch_tokens or 16384, longest),
        f"{actor}.clip_ratio_c": loss.dual_clip or 1e9,
        f"{actor}.loss_agg_mode": _REDUCTIONS[type(loss.reduction)],
        f"{actor}.loss_scale_factor": loss.reduction.length if isinstance(loss.reduction, FixedLength) else None,
        f"{actor}.use_kl_loss": bool(loss.kl),
        "actor_rollout_ref.rollout.val_kwargs.top_p": eval_sampling_of(config).top_p,
        **{name: getattr(loss, field) for name, field in _TABLES["loss"].items()},
        **theirs,
    }
    gpus = int(keys["trainer.n_gpus_per_node"]) * int(keys["trainer.nnodes"])
    if rollout.num_tasks % count or rollout.num_tasks * rollout.group_size % gpus:
        sizes = f"{rollout.num_tasks} tasks (x {rollout.group_size} episodes) by {count} mini-batches or {gpus} GPUs"
        raise ConfigError(f"batch sizes do not divide: {sizes}; change rollout.* or optim.num_minibatches")
    return keys


def write_files(config: Config, folder: Path) -> None:
    """The settings, and one line per task: verl's datasets only name the task to play."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config), "utf-8")
    about = {"data_source": config.task.env, "agent_name": "spear", "reward_model": {"ground_truth": ""}}
    for split, name, count in (("train", "train", None), (config.eval.split, "validation", config.eval.tasks or 1)):
        lines = [
            about | {"prompt": [{"role": "user", "content": task.id}], "extra_info": {"index": number, "split": split}}
            for number, task in enumerate(tasks_of(config, split, count=count))
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def checked() -> str:
    """One line that says that verl can run; otherwise an error of one sentence."""
    version = require_version("verl", (0, 9, 1), (0, 10))
    require_names("verl", _TABLES["hooks"])
    if "spear" not in import_module("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY:
        loud = "VERL_USE_EXTERNAL_MODULES=spear_rl.integrations.verl.trainer"
        raise ConfigError(f"verl did not load our plug-in: reinstall spear-rl, or set {loud}, which also shows why")
    return f"verl {version}: plug-in loaded, all {len(_TABLES['hooks'])} hooks found"


def launch(source: str | None, overrides: Sequence[str], theirs: Sequence[str]) -> None:
    """Write verl's files into run.dir and replace this process by verl; words of `theirs` without = are passed on."""
    config, own = load(source, overrides), dict(word.split("=", 1) for word in theirs if "=" in word)
    folder = Path(config.run.dir).absolute()
    keys = verl_settings(config, folder, own)
    words = [f"{key}={value if key in own else json.dumps(value)}" for key, value in keys.items()]
    print(checked(), flush=True)
    write_files(config, folder)
    words += [word for word in theirs if "=" not in word]
    os.execv(sys.executable, [sys.executable, "-m", "verl.trainer.main_ppo", *words])
