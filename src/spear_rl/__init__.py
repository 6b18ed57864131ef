"""SPEAR: self-imitation learning with progressive exploration for LLM agents.

The public names can be taken from here; each is imported when first asked for, so that an environment's process never
pays for torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "types": ("Completion", "Group", "Metrics", "Stop", "Trajectory", "Turn"),
    "functional": (
        *("LossInputs", "LossOutput", "clipped_surrogate", "constant", "cosine", "fixed_length_mean", "group_relative"),
        *("gae", "keep_low_covariance", "leave_one_out", "recalibrate", "token_mean"),
    ),
    "replay": ("ReplayBuffer", "RewardHistory"),
    "algorithms": ("ALGORITHMS", "Algorithm", "dr_bot", "dr_grpo", "gigpo", "grpo", "ppo", "rloo", "spear"),
    "rollout": ("Environment", "Observation", "StepResult", "Task", "collect_groups"),
    "envs": ("ENVIRONMENTS",),
    "engines": ("ENGINES",),
    "engines.base": ("Batch", "Engine", "Term", "TrainableEngine"),
    "train.step": ("train_step",),
    "train.trackers": ("TRACKERS",),
    "app.config": ("Config",),
    "app.train": ("sft_from", "train_from"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
