"""What an environment is. Text in, text (and pictures, if it has any) out; no tokens, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from spear_rl.types import Metrics

INADMISSIBLE = "inadmissible"
"""The one reason for an invalid turn that had a well-formed action: the world refused it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees next."""

    text: str
    state_key: str = ""
    """Equal keys mean the same state of the same task; empty means unknown."""
    choices: tuple[str, ...] = ()
    """The actions that would work now, where the environment can list them."""
    images: tuple[bytes, ...] = ()
    """What is seen beside the text, each as a PNG file; only a vision-language model can be shown it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    used_tool: bool = False
    invalid: str = ""
    """Why the action could not be acted on, in one word (no_action, unclosed_tag, inadmissible, ...); else empty."""
    success: bool | None = None
    """Whether the task is solved; None lets the episode's reward decide (success is a positive reward)."""
    metrics: Metrics = field(default_factory=dict)
    """The task's other measures of the episode so far, by name; an evaluation reports the mean of the last ones."""


class Environment(Protocol):
    """One episode of one task: `reset` once, `step` until done, `close`, throw away."""

    def reset(self) -> Observation: ...
    def step(self, action: str) -> StepResult: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Task:
    """A named way to make one environment; siblings of a group share the task, not the environment."""

    id: str
    make_env: Callable[[], Environment]
    """Picklable, so that a worker process can call it."""
    family: str = ""
    """The kind of task, for results per kind and baselines per kind."""
    instructions: str = ""
    """What the policy is told about the game before its first observation."""
    answer_format: str = "{action}"
    """How the instructions ask for an action, e.g. "<action>{action}</action>"."""
    demonstrate: Callable[[int], list[str]] | None = None
    """Seed in, the actions of one expert episode out; None where there is no expert."""
    instructions_role: Literal["user", "system"] = "user"
    """Whose message the instructions are: at the head of the first observation, or the system's own."""
    unfinished_reward: float = 0.0
    """Added to the last turn of an episode that a limit of ours cut off: where a wrong answer costs something, not
    answering must cost as much."""


TasksFn = Callable[..., Sequence[Task]]
"""`tasks(split, **options)`: the panel of a split (train, validation, test), in a fixed order."""
