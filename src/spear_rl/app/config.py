"""The typed configuration. The string under a field is its documentation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Any, Literal

from spear_rl.errors import ConfigError
from spear_rl.settings import fields
from spear_rl.settings.fields import documentation, flat, override, sections, to_toml, update, value_of
from spear_rl.settings.names import ALGORITHM_NAMES, BASES, split_name
from spear_rl.settings.ranges import FilePath, Length, Range, nearest

Steps = Range(0, 10_000_000, unit="steps")
Seed = Range(0, 2**31 - 1)
Share = Range(0, 1)
Weight = Range(0, 1000)
Turns = Range(1, 10_000, unit="turns")
Name = Annotated[str, Length(1, 256, "characters")]
Words = Annotated[list[Name], Length(0, 64, "entries")]

__all__ = [
    "Config", "check", "documentation", "flat", "load", "merged", "override", "presets", "resolved", "sections",
    "to_toml", "update", "value_of",
]  # fmt: skip


@dataclass
class Run:
    """Where, how long, how often."""

    dir: Annotated[str, FilePath()] = "runs/spear"
    """Folder of this run; must be new, or hold a run to resume."""
    seed: Annotated[int, Seed] = 0
    """Random seed of model, tasks, sampling and replay."""
    steps: Annotated[int, Steps] = 100
    """RL steps in all."""
    resume: bool = False
    """Continue the run in run.dir from its newest checkpoint, with the settings stored there."""
    checkpoint_every: Annotated[int, Range(1, 10_000_000, unit="steps")] = 10
    """Steps between checkpoints; the two newest are kept, and the best of those that were evaluated."""
    trajectories_every: Annotated[int, Steps] = 10
    """Steps between dumps of whole episodes into trajectories/; 0 is never."""
    trackers: Words = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Where metrics go: jsonl (required), tensorboard, wandb, trackio, mlflow, or your own: package.module:function."""
    threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads for torch; 0 lets torch decide."""


@dataclass
class Task:
    """What to play."""

    env: Name = "household"
    """An environment by name (`spear list`), or your own: package.module:function."""
    options: dict[str, Any] = field(default_factory=dict)
    """The environment's own settings, e.g. task.options.level=easy."""
    python: Annotated[str, FilePath(may_be_empty=True)] = ""
    """Interpreter of the virtual environment that the environment's packages are in; this one's if empty."""


@dataclass
class Engine:
    """The policy and what it runs on."""

    name: Annotated[str, Length(1, 256, "characters")] = "hf"
    """hf (transformers, in this process), or your own: package.module:function."""
    model: Annotated[str, FilePath()] = "tiny"
    """tiny, tiny-xs (from scratch), smollm2 (135M, a package), a transformers folder, or package.module:function."""
    trust_remote_code: bool = False
    """Run Python code that a model's folder brings along, with all your rights; off, such a folder is refused."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the model runs on.
    auto: a GPU if there is one
    cpu: the processor
    cuda: the first GPU"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the model computes in; weights are learned in float32 anyway.
    auto: bfloat16 on a GPU that has it, else float32
    float32: full precision
    bfloat16: half the memory, faster on a GPU"""
    attention: Literal["auto", "packed", "padded"] = "auto"
    """How rows are laid out for the model.
    auto: packed on a GPU where the model allows it, else padded
    packed: rows end to end, compiled layers, continuous batching (GPU)
    padded: rows of one length; slower, works everywhere"""
    micro_batch_tokens: Annotated[int, Range(0, 2**24, unit="tokens")] = 0
    """Tokens per forward pass, and kept at once if set; 0 is 4096 on a CPU, by memory on a GPU. Changes no result."""
    checkpointing: bool = False
    """Recompute activations layer by layer in the backward pass: a third slower, for a fraction of the memory."""
    lora_rank: Annotated[int, Range(0, 4096)] = 0
    """Train a low-rank adapter of this rank (and alpha twice that) instead of the model; 0 trains the model."""
    lora_targets: Words = field(default_factory=list)
    """Layers with an adapter, by the end of their names, e.g. ["q_proj", "v_proj"]; none is all linear layers."""
    generator: Literal["native", "vllm"] = "native"
    """What generates tokens.
    native: this engine
    vllm: vLLM in the same process, for large models"""
    vllm_memory: Annotated[float, Range(0, 1, "()")] = 0.3
    """Share of the GPU's memory for vLLM."""
    importance_cap: Annotated[float, Range(0, 1_000_000)] = 0.0
    """If above 0, tokens are scored again by the trainer and weighted by min(trainer / sampler, cap); 2 is usual."""


@dataclass
class Rollout:
    """How episodes are played."""

    num_tasks: Annotated[int, Range(1, 8192)] = 16
    """Tasks per step."""
    group_size: Annotated[int, Range(2, 1024)] = 8
    """Episodes of each task; one alone would have no siblings to be compared with."""
    max_turns: Annotated[int, Turns] = 30
    """Turns after which an episode is cut off."""
    workers: Annotated[int, Range(0, 1024)] = 0
    """Processes that environments run in; 0 runs them in this one, the fastest for steps below about 0.1 ms."""
    step_timeout: Annotated[float, Range(0.1, 86_400, unit="seconds")] = 60.0
    """Seconds a step may take in a worker before it counts as hung; making and resetting a game: five times that."""
    max_new_tokens: Annotated[int, Range(1, 1_048_576, unit="tokens")] = 64
    """Maximum tokens per turn."""
    max_context: Annotated[int, Range(1, 16_777_216, unit="tokens")] = 4096
    """Maximum tokens per prompt; a longer one ends its episode."""
    temperature: Annotated[float, Range(0.001, 100)] = 1.0
    """Sampling temperature; training scores tokens at the same one."""
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0
    """Nucleus sampling: the probability mass that tokens are drawn from."""
    stop: Words = field(default_factory=list)
    """Strings that end a turn, e.g. ["</action>"]."""
    layout: Literal["chat", "turns", "log", "now"] = "chat"
    """What the prompt of a turn shows.
    chat: the whole conversation so far, one growing chat
    turns: the task, the last two exchanges and the present observation, a new prompt per turn (the paper's)
    log: as turns, and the names of all actions so far
    now: the task and the present observation only"""
    detail: Literal["full", "short"] = "full"
    """How much a prompt tells.
    full: instructions and possible actions too
    short: observations only, for tiny models"""


@dataclass
class Optim:
    """The optimizer: AdamW."""

    learning_rate: Annotated[float, Range(0, 1)] = 1e-6
    """Peak learning rate of RL."""
    warmup_steps: Annotated[int, Steps] = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "cosine"] = "constant"
    """The learning rate after warm-up.
    constant: stays
    cosine: falls to a tenth by run.steps"""
    weight_decay: Annotated[float, Share] = 0.01
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Range(1e-6, 1_000_000)] = 1.0
    """Gradient norms are clipped to this."""
    num_minibatches: Annotated[int, Range(1, 65_536)] = 1
    """Optimizer steps per RL step; its rows are divided between them."""


@dataclass
class BonusConfig:
    """Learn the ropes: the intrinsic reward for using tools. Only for spear-* algorithms."""

    mode: Literal["none", "constant", "cosine"] = "cosine"
    """mu(t), the bonus's weight over the steps.
    none: no bonus
    constant: always 1
    cosine: half a cosine from 1 to 0"""
    steps: Annotated[int, Steps] = 0
    """T_decay of the cosine; 0 is run.steps."""
    count: Literal["turns", "distinct"] = "turns"
    """What is paid.
    turns: every turn that used a tool (the paper)
    distinct: every different call"""


@dataclass
class ImitationConfig:
    """Trust the wins: replay of one's own good episodes. Only for spear-* algorithms."""

    enabled: bool = True
    """Off gives the base algorithm's updates bit for bit."""
    weight: Annotated[float, Weight] = 1.0
    """c, what gamma(t) grows to."""
    warm_steps: Annotated[int, Steps] = 0
    """T_warm of gamma(t); 0 is half of run.steps."""
    fraction: Annotated[float, Range(0, 100)] = 0.25
    """Replayed episodes per step, as a fraction of those played."""
    capacity: Annotated[int, Range(1, 1_000_000)] = 2048
    """What the buffer holds; with when_full, what is drawn at once."""
    unit: Literal["episodes", "turns"] = "episodes"
    """What capacity counts.
    episodes: whole episodes
    turns: turns that train again (the authors' code on ALFWorld and WebShop)"""
    max_age: Annotated[int, Range(1, 10_000_000, unit="steps")] = 5
    """Steps after which an episode is forgotten."""
    history: Annotated[int, Range(1, 10_000_000)] = 1024
    """Group means in the baseline's window."""
    percentile: Annotated[float, Range(0, 100)] = 50.0
    """Of the window: the baseline b."""
    per_family: bool = False
    """A baseline for each kind of task instead of one for all."""
    draw: Literal["every_step", "when_full"] = "every_step"
    """When remembered episodes are replayed.
    every_step: a fraction every step
    when_full: `capacity` at once when more than 1.5 times as many qualify (the authors' code)"""
    gate: Literal["both", "old", "new"] = "both"
    """Which advantage of an episode must be positive.
    both: when played and today
    old: when played
    new: today, against the present baseline"""
    update: Literal["joint", "separate"] = "joint"
    """Where replayed rows train.
    joint: in the on-policy optimizer step (the paper)
    separate: in optimizer steps of their own after it (the authors' code)"""
    divide_by_std: bool | None = None
    """Divide A' by a typical std of recent groups; unset is as the base does, false is the paper's A' = R - b."""
    reweight: Annotated[float, Weight] | None = None
    """If set, A' = reweight * A instead of recalibrating against the baseline."""
    admit_by_score: bool = False
    """Remember what beats its siblings with bonus, penalties and step part too (the paper), not by the reward alone."""
    skip_invalid: bool = True
    """Turns that the environment could not act on, or that hit their token limit, do not train again."""
    scale_by_rows: bool = True
    """Weigh replay by episodes drawn over episodes wanted; off, one alone weighs as much as all (the paper)."""
    require_tool: bool = False
    """Remember only episodes that used a tool."""
    age_decay: Annotated[float, Share] = 1.0
    """Multiplies A' for every step of age."""
    keep_step_part: bool = False
    """GiGPO: replay the step advantage too."""


@dataclass
class CovarianceConfig:
    """Against over-confidence: hold back tokens whose advantage and log-probability rise together."""

    replay: Literal["clip", "kl", "none"] = "clip"
    """For replayed rows (part of SPEAR).
    clip: such tokens do not train (Clip-Cov)
    kl: such tokens get a KL penalty (KL-Cov)
    none: nothing is held back"""
    on_policy: Literal["clip", "kl", "none"] = "none"
    """For on-policy rows, with the same settings; off so that SPEAR's own effect shows.
    clip: such tokens do not train (Clip-Cov)
    kl: such tokens get a KL penalty (KL-Cov)
    none: nothing is held back"""
    fraction: Annotated[float, Share] = 0.02
    """Share of tokens held back."""
    low: Annotated[float, Range(0, 1_000_000)] = 2.0
    """Smallest covariance considered; 1 on math, 2 where rewards are ten times larger."""
    high: Annotated[float, Range(0, 1_000_000)] = 60.0
    """Largest covariance considered; 40 on math."""
    beta: Annotated[float, Weight] = 1.0
    """Weight of kl's penalty."""
    joint_means: bool = False
    """Replay: covariances about the means of all rows of a joint optimizer step, not of the replayed ones alone."""


@dataclass
class AlgorithmConfig:
    """What is learned from the episodes."""

    name: Name = "spear-dr-bot-grpo"
    """By name (`spear list`) or your own, package.module:function; with spear-, dr-bot- or spear-dr-bot- before it."""
    invalid_penalty: Annotated[float, Weight] = 0.1
    """Penalty per turn that the environment could not act on."""
    format_bonus: Annotated[float, Weight] = 0.0
    """Bonus per episode without such a turn (0.1 in the paper's formula)."""
    divide_by_std: bool | None = None
    """Divide advantages by the group's std; unset is the algorithm's own."""
    clip_low: Annotated[float, Range(0, 1, "(]")] | None = None
    """PPO's lower clip; unset is the algorithm's own."""
    clip_high: Annotated[float, Range(0, 1000, "(]")] | None = None
    """PPO's upper clip; unset is the algorithm's own."""
    dual_clip: Annotated[float, Range(1, 1_000_000, "(]")] | None = None
    """Bound on the loss of negative advantages; unset is the algorithm's own."""
    entropy_bonus: Annotated[float, Weight] = 0.0
    """Weight of the entropy in the on-policy loss."""
    kl: Annotated[float, Weight] = 0.0
    """Weight of the KL to the cold-started policy; 0 needs no reference model."""
    discount: Annotated[float, Share] = 0.95
    """GiGPO: discount of rewards-to-go."""
    step_weight: Annotated[float, Weight] = 1.0
    """GiGPO: weight of the step advantage."""
    keep_groups: Annotated[float, Range(0, 1, "(]")] = 0.75
    """Dr.BoT: share of groups, those with the largest spread, that trains."""
    max_length: Annotated[int, Range(0, 2**40, unit="tokens")] = 0
    """Dr.BoT: the constant in place of a row's length; 0 is the most tokens a row may train."""
    bonus: BonusConfig = field(default_factory=BonusConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)


@dataclass
class Sft:
    """The cold start: supervised learning on expert episodes before RL."""

    episodes: Annotated[int, Range(0, 100_000)] = 0
    """Expert episodes; 0 is no cold start."""
    epochs: Annotated[int, Range(1, 1000)] = 3
    """Passes over them."""
    batch_size: Annotated[int, Range(1, 65_536, unit="episodes")] = 16
    """Episodes per update."""
    learning_rate: Annotated[float, Range(0, 1, "(]")] = 1e-4
    """Peak learning rate, after a warm-up over the first tenth; falls to a tenth."""


@dataclass
class Eval:
    """Success on held-out tasks."""

    tasks: Annotated[int, Range(0, 1_000_000)] = 128
    """Held-out tasks, one episode each; 0 is no evaluation."""
    every: Annotated[int, Steps] = 0
    """Steps between evaluations; 0 is before and after RL only."""
    split: Literal["train", "validation", "test"] = "validation"
    """Which panel.
    train: the tasks that are trained on
    validation: held out, for decisions during development
    test: held out, for the final figure"""
    max_turns: Annotated[int, Range(0, 10_000, unit="turns")] = 0
    """Turns after which an episode is cut off; 0 is rollout.max_turns."""
    temperature: Annotated[float, Range(0, 100)] = 0.4
    """Sampling temperature; 0 takes the likeliest token."""


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
    """Defaults, then a preset or a TOML file, a `block` of sections, and `section.key=value` overrides; checked."""
    return resolved(merged(source, overrides, block=block))


def merged(source: str | None, overrides: Sequence[str] = (), *, block: Mapping[str, Any] | None = None) -> Config:
    """The same as `load`, neither checked nor resolved."""
    config = Config()
    if source:
        update(config, fields.table_in(source, presets()))
    update(config, block or {})
    override(config, overrides)
    return config


def resolved(config: Config) -> Config:
    """The config, checked, with the defaults that depend on other settings filled in."""
    check(config)
    algorithm, rollout = config.algorithm, config.rollout
    algorithm.bonus.steps = algorithm.bonus.steps or config.run.steps
    algorithm.imitation.warm_steps = algorithm.imitation.warm_steps or max(config.run.steps // 2, 1)
    turns = rollout.max_turns if rollout.layout == "chat" else 1
    algorithm.max_length = algorithm.max_length or rollout.max_new_tokens * turns
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
    if 0 < greedy < 0.001:
        raise ConfigError(f"eval.temperature must be 0 for the likeliest token, or 0.001 or more (it is {greedy})")
    if every and not evaluation.tasks:
        advice = "set eval.every=0, or eval.tasks above 0"
        raise ConfigError(f"eval.every={every} with eval.tasks=0 evaluates nothing: {advice}")
    if low >= high:
        rule = "algorithm.covariance.low must be below algorithm.covariance.high"
        raise ConfigError(f"{rule} (they are {low} and {high})")
    _, base = split_name(algorithm.name)
    if base not in BASES and ":" not in base:
        known = f"it is one of: {', '.join(ALGORITHM_NAMES)}; or your own: package.module:function"
        near = nearest(algorithm.name, ALGORITHM_NAMES)
        raise ConfigError(f"algorithm.name cannot be {algorithm.name!r}{near}; {known}")


def presets() -> dict[str, str]:
    """Name -> TOML text of every preset that comes with the package."""
    folder = resources.files("spear_rl.app") / "presets"
    files = sorted((path for path in folder.iterdir() if path.name.endswith(".toml")), key=lambda path: path.name)
    return {path.name.removesuffix(".toml"): path.read_text("utf-8") for path in files}
