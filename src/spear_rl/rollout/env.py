"""The environment protocol: text in, text and images out; no tokens, no tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spear_rl.types import Metrics

INADMISSIBLE = "inadmissible"
"""`StepResult.invalid` of a well-formed action that the environment refused."""
NO_THOUGHT = "no_thought"
"""`StepResult.invalid` of a well-formed action without the thought that the environment asks for."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees next."""

    text: str
    state_key: str = ""
    """Equal keys mean the same state of the same task; empty means unknown."""
    choices: tuple[str, ...] = ()
    """The admissible actions, where the environment can list them."""
    images: tuple[bytes, ...] = ()
    """PNG files that belong to the text; only a vision-language model can see them."""
    task: str = ""
    """In the first observation: the task alone, which later prompts repeat. Empty: they repeat the whole text."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one action."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    used_tool: bool = False
    invalid: str = ""
    """Why the action was not executed, or is charged, in one word (no_action, inadmissible, ...); else empty."""
    success: bool | None = None
    """Whether the task is solved; None lets the episode's reward decide (success is a positive reward)."""
    metrics: Metrics = field(default_factory=dict)
    """Further metrics of the episode so far, by name; an evaluation reports the mean of the last values."""
    action: str | None = None
    """The action found in the answer, for later prompts, empty if none; None: the answer without thoughts and tags."""


class Environment(Protocol):
    """One episode of one task: `reset` once, `step` until done, `close`."""

    def reset(self) -> Observation: ...
    def step(self, action: str) -> StepResult: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Task:
    """A task makes its environments; the episodes of a group share the task, not the environment."""

    id: str
    make_env: Callable[[], Environment]
    """Picklable, so that a worker process can call it."""
    family: str = ""
    """The kind of task, for results and baselines per kind."""
    instructions: str = ""
    """What the policy is told before its first observation."""
    answer_format: str = "{action}"
    """The format of an action that the instructions ask for, e.g. "<action>{action}</action>"."""
    demonstrate: Callable[[int], list[str]] | None = None
    """Seed in, the actions of one expert episode out; None without an expert."""
    instructions_role: Literal["user", "system"] = "user"
    """The role of the instructions: before the first observation in the user's message, or as a system message."""
    unfinished_reward: float = 0.0
    """Added to the last turn of an episode cut off by a limit: if a wrong answer costs, no answer must cost as much."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What an agent (task.agent) is told of the task, e.g. a line of a file of tasks; environments ignore it."""


TasksFn = Callable[..., Sequence[Task]]
"""`tasks(split, **options)`: the panel, the tasks of a split (train, validation, test) in a fixed order."""
