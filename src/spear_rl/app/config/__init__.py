"""The typed configuration: where its sections come together, are read and are checked."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from spear_rl.app.config.algorithm import (
    AlgorithmConfig,
    BonusConfig,
    CovarianceConfig,
    FiltersConfig,
    ImitationConfig,
    PPOConfig,
)
from spear_rl.app.config.profiles import PROFILES
from spear_rl.app.config.sections import Engine, Eval, Optim, Rollout, Run, Sft, Task
from spear_rl.errors import ConfigError
from spear_rl.settings import fields
from spear_rl.settings.fields import documentation, flat, override, sections, to_toml, update, value_of
from spear_rl.settings.names import ALGORITHM_NAMES, BASES, split_name
from spear_rl.settings.ranges import nearest

__all__ = [
    "AlgorithmConfig", "BonusConfig", "Config", "CovarianceConfig", "Engine", "Eval", "FiltersConfig",
    "ImitationConfig", "Optim", "PPOConfig", "Rollout", "Run", "Sft", "Task", "check", "documentation", "flat", "load",
    "merged", "override", "presets", "require_env", "resolved", "sections", "to_toml", "update", "value_of",
    "with_changes",
]  # fmt: skip


@dataclass
class Config:
    """All settings. `spear show config` prints every field with its default."""

    run: Run = field(default_factory=Run)
    task: Task = field(default_factory=Task)
    engine: Engine = field(default_factory=Engine)
    rollout: Rollout = field(default_factory=Rollout)
    optim: Optim = field(default_factory=Optim)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sft: Sft = field(default_factory=Sft)
    eval: Eval = field(default_factory=Eval)


def load(source: str | None, overrides: Sequence[str] = (), *, block: Mapping[str, Any] | None = None) -> Config:
    """Defaults, a profile, a preset or TOML file, a `block` of sections, and `section.key=value` overrides; checked."""
    return resolved(merged(source, overrides, block=block))


def merged(source: str | None, overrides: Sequence[str] = (), *, block: Mapping[str, Any] | None = None) -> Config:
    """The same as `load`, neither checked nor resolved."""
    table = fields.table_in(source, presets()) if source else {}

    def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> Config:
        config = Config()
        for part in ({"algorithm": below}, table, {"algorithm": above}):
            update(config, part)
        return with_changes(config, overrides, block=block)

    own, asked = Config(), layered({}, {}).algorithm.imitation.profile
    update(own, table)
    if asked == own.algorithm.imitation.profile:
        return layered(PROFILES[asked], {})
    return layered({}, PROFILES[asked])  # the source names another: what it says was not meant for this one


def with_changes(config: Config, overrides: Sequence[str], *, block: Mapping[str, Any] | None = None) -> Config:
    """The config with a `block` and overrides written into it; another task.env drops the options of the first."""
    env, options, config.task.options = config.task.env, config.task.options, {}
    update(config, block or {})
    override(config, overrides)
    if config.task.env == env:
        config.task.options = options | config.task.options
    return config


def resolved(config: Config) -> Config:
    """The config, checked, with the defaults that depend on other settings filled in."""
    check(config)
    config.engine.model = os.path.expanduser(config.engine.model)  # which a shell leaves alone after engine.model=
    algorithm, rollout = config.algorithm, config.rollout
    algorithm.bonus.steps = algorithm.bonus.steps or config.run.steps
    algorithm.imitation.warm_steps = algorithm.imitation.warm_steps or max(config.run.steps // 2, 1)
    turns = rollout.max_turns if rollout.layout == "chat" else 1
    longest = rollout.max_new_tokens * turns
    algorithm.max_length = algorithm.max_length or min(longest, rollout.max_response_tokens or longest)
    return config


def check(config: Config) -> None:
    """Check each field alone, then combinations; an error names the field and what to do."""
    fields.check_fields(config)
    rollout, evaluation, algorithm = config.rollout, config.eval, config.algorithm
    low, high, greedy = algorithm.covariance.low, algorithm.covariance.high, evaluation.temperature
    played, every = rollout.num_tasks * rollout.group_size, evaluation.every
    if played > 65_536:
        product = "rollout.num_tasks times rollout.group_size"
        raise ConfigError(f"{product} must be at most 65,536 episodes (it is {played:,})")
    if config.task.agent and rollout.restart_share:
        raise ConfigError("rollout.restart_share: an agent cannot begin within an earlier win; set it to 0")
    if 0 < greedy < 0.001:
        raise ConfigError(f"eval.temperature must be 0 for the likeliest token, or 0.001 or more (it is {greedy})")
    if every and not evaluation.tasks:
        advice = "set eval.every=0, or eval.tasks above 0"
        raise ConfigError(f"eval.every={every} with eval.tasks=0 evaluates nothing: {advice}")
    if len(set(named := [evaluation.split, *evaluation.also])) < len(named):
        twice = next(split for split in named if named.count(split) > 1)
        raise ConfigError(f"eval.also: {twice} is evaluated already; leave it out")
    if config.optim.minibatch_rows and config.optim.num_minibatches > 1:
        both = f"optim.minibatch_rows={config.optim.minibatch_rows} and num_minibatches={config.optim.num_minibatches}"
        raise ConfigError(f"{both} both say how rows are divided: set optim.num_minibatches=1 or minibatch_rows=0")
    if low >= high:
        rule = "algorithm.covariance.low must be below algorithm.covariance.high"
        raise ConfigError(f"{rule} (they are {low} and {high})")
    _, base = split_name(algorithm.name)
    if base not in BASES and ":" not in base:
        known = f"it is one of: {', '.join(ALGORITHM_NAMES)}; or your own: package.module:function"
        near = nearest(algorithm.name, ALGORITHM_NAMES)
        raise ConfigError(f"algorithm.name cannot be {algorithm.name!r}{near}; {known}")


def require_env(config: Config) -> None:
    """Refuse to play without an environment: the presets for any environment name none."""
    if not config.task.env:
        raise ConfigError("task.env is empty: give your own, task.env=package.module:function, or one of `spear list`")


def presets() -> dict[str, str]:
    """Name -> TOML text of every preset that comes with the package."""
    folder = resources.files("spear_rl.app") / "presets"
    files = sorted((path for path in folder.iterdir() if path.name.endswith(".toml")), key=lambda path: path.name)
    return {path.name.removesuffix(".toml"): path.read_text("utf-8") for path in files}
