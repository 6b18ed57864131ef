"""Every section but `algorithm`. The string under a field is its documentation."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from spear_rl.settings.ranges import FilePath, Length, Range, Seed, Share, Steps, Turns, Words


@dataclass
class Run:
    """Where, how long, how often."""

    dir: Annotated[str, FilePath()] = "runs/spear"
    """Folder of this run; must be new, or hold a run to resume."""
    seed: Annotated[int, Seed] = 0
    """Random seed of model, tasks, sampling and replay."""
    steps: Annotated[int, Steps] = 100
    """RL steps in all."""
    resume: bool | Literal["auto"] = False
    """Continue the run in run.dir from its newest checkpoint, with its stored settings; auto: if there is one."""
    checkpoint_every: Annotated[int, Range(1, 10_000_000, unit="steps")] = 10
    """Steps between checkpoints; the two newest are kept, and the best of those that were evaluated."""
    trajectories_every: Annotated[int, Steps] = 1
    """Steps between records of whole episodes in trajectories/; 0 keeps no text of any episode, played or replayed."""
    trajectories_format: Literal["parquet", "jsonl"] = "parquet"
    """How they are kept.
    parquet: compressed columns with tokens and log-probabilities, merged as the run goes on
    jsonl: one file per step, one JSON object per episode, without tokens; no bound on disk use"""
    trajectories_max_mb: Annotated[int, Range(1, 100_000_000, unit="MB")] = 2048
    """Bound on the parquet files of a run; beyond it the texts of the oldest steps are left out, then the steps."""
    trackers: Words = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Where metrics go: jsonl (required), tensorboard, wandb, trackio, mlflow, or your own: package.module:function."""
    threads: Annotated[int, Range(0, 1024)] = 0
    """CPU threads for torch; 0 is OMP_NUM_THREADS if set, else the fastest in a short measurement (run.json tells)."""


@dataclass
class Task:
    """What to play."""

    env: Annotated[str, Length(0, 256, "characters")] = "household"
    """An environment by name (`spear list`), your own: package.module:function, or an agent's tasks: a .jsonl file."""
    agent: Annotated[str, Length(0, 256, "characters")] = ""
    """Your own agent, package.module:function, called with (task, base_url, api_key): plays the tasks if not empty."""
    options: dict[str, Any] = field(default_factory=dict)
    """The environment's own settings, e.g. task.options.level=easy."""
    python: Annotated[str, FilePath(may_be_empty=True)] = ""
    """Interpreter of the virtual environment with the packages of the environment or agent; this one's if empty."""


@dataclass
class Engine:
    """The policy and what it runs on."""

    name: Annotated[str, Length(1, 256, "characters")] = "hf"
    """hf (transformers, in this process), or your own: package.module:function."""
    model: Annotated[str, FilePath()] = "tiny"
    """tiny, tiny-xs, tiny-vision, smollm2; a folder, adapter, GGUF file or hub id; or package.module:function."""
    revision: Annotated[str, Length(0, 256, "characters")] = ""
    """Branch, tag or commit of a model of the hub; its main branch if empty. A resumed run keeps its commit."""
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
    generator: Literal["native", "vllm", "auto"] = "native"
    """What generates tokens.
    auto: the faster of the two for the model (docs/gpu.md has the rule); a resumed run keeps it
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
    """Processes that environments run in; 0 is this one, fastest below 0.1 ms per step. Agents at once; 0 is 64."""
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
    max_response_tokens: Annotated[int, Range(0, 2**31, unit="tokens")] = 0
    """Maximum tokens that the policy writes per episode, over all turns; 0 is no such limit."""
    stop: Words = field(default_factory=list)
    """Strings that end a turn, e.g. ["</action>"]."""
    layout: Literal["chat", "turns", "log", "transcript", "now"] = "chat"
    """What the prompt of a turn shows.
    chat: the whole conversation so far, one growing chat
    turns: the task, the last two exchanges and the present observation, a new prompt per turn (the paper's)
    log: as turns, and the names of all actions so far
    transcript: all actions and observations so far, possible actions once and then what changed: few new tokens
    now: the task and the present observation only"""
    detail: Literal["full", "short"] = "full"
    """How much a prompt tells.
    full: instructions and possible actions too
    short: observations only, for tiny models"""
    history: Literal["action", "answer"] = "action"
    """What the layouts turns, log and transcript show of earlier answers.
    action: the action alone; thoughts never enter a later prompt
    answer: the whole answer, thoughts included"""
    return_share: Annotated[float, Share] = 0.0
    """Share of a step's tasks, above 0 at least one, that return: an earlier group did not solve them."""
    return_when: Literal["lost", "mixed", "unsolved"] = "unsolved"
    """Which tasks return, by their latest group; medium success and those not seen for longest come first.
    lost: no episode won
    mixed: some episodes won and some lost
    unsolved: either"""
    restart_share: Annotated[float, Share] = 0.0
    """Share of a step's groups, above 0 at least one, that begin within a win: near its end at first, later earlier."""
    restart_success: Annotated[float, Range(0, 1, "(]")] = 0.5
    """Share of a family's restarts in a step that must win to begin a turn earlier next time; if none does, later."""
    thinking: bool | None = None
    """Switch of chat templates that have one (Qwen3, SmolLM3): think before an answer; unset is the template's own."""


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
    """Mini-batches (optimizer steps) per pass over a step's rows, shuffled; rows of an episode follow one another."""
    minibatch_rows: Annotated[int, Range(0, 16_777_216, unit="rows")] = 0
    """Instead, the most on-policy rows per optimizer step (the paper's unit), divided evenly; 0 is num_minibatches."""
    epochs: Annotated[int, Range(1, 1000)] = 1
    """Passes over a step's rows, each with new mini-batches; the learning rate goes by RL steps."""


@dataclass
class Sft:
    """The cold start: supervised learning on expert episodes before RL."""

    episodes: Annotated[int, Range(0, 100_000)] = 0
    """Expert episodes, or the first so many of sft.from; 0 is no cold start, or all of sft.from."""
    from_: Annotated[str, FilePath(may_be_empty=True)] = ""
    """A .jsonl file of episodes to learn from instead: as a run with an agent records them, or OpenAI chats."""
    epochs: Annotated[int, Range(1, 1000)] = 3
    """Passes over them."""
    batch_size: Annotated[int, Range(1, 65_536, unit="episodes")] = 16
    """Episodes per update."""
    learning_rate: Annotated[float, Range(0, 1, "(]")] = 1e-4
    """Peak learning rate, after a warm-up over the first tenth; falls to a tenth."""
    checkpoint_seconds: Annotated[float, Range(0, 86_400, unit="seconds")] = 60.0
    """Seconds between checkpoints, or more: at most a tenth of the time goes into writing them."""


@dataclass
class Eval:
    """Success on held-out tasks."""

    tasks: Annotated[int, Range(0, 1_000_000)] = 128
    """Held-out tasks; 0 is no evaluation."""
    samples: Annotated[int, Range(1, 10_000)] = 1
    """Episodes of each task; with more than one, mean@k and pass@k are reported."""
    every: Annotated[int, Steps] = 0
    """Steps between evaluations; 0 is before and after RL only."""
    split: Literal["train", "validation", "test", "held_out"] = "validation"
    """Which panel.
    train: the tasks that are trained on
    validation: held out, for decisions during development
    test: held out, for the final figure
    held_out: training games in rooms that are not trained in (alfworld with task.options.hold_out_scenes)"""
    also: Words = field(default_factory=list)
    """Other splits to evaluate at the same times, each reported by its name, e.g. ["held_out"]."""
    max_turns: Annotated[int, Range(0, 10_000, unit="turns")] = 0
    """Turns after which an episode is cut off; 0 is rollout.max_turns."""
    temperature: Annotated[float, Range(0, 100)] = 0.4
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: Annotated[float, Range(1e-6, 1)] | None = None
    """Nucleus sampling; unset is rollout.top_p."""
