"""What one episode is made of, and the terms that all other modules use. Standard library only.

step        one training iteration
turn        one policy message and the environment's answer to it
trajectory  one episode: its turns in order
group       sibling trajectories of the same task
row         one padded line of a batch (a turn, or several turns that share one growing conversation)
reward      the task's own; bonus and shaping are ours and are kept apart from it
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

Metrics = dict[str, float]


class Stop(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    """The environment said so."""
    MAX_TURNS = "max_turns"
    """The turn limit cut it off."""
    OVERLONG = "overlong"
    """The context or the episode hit its token limit, or the turn limit came right after a truncated completion."""
    FAILED = "failed"
    """Infrastructure failed (an environment raised, a worker died). Never trains, never counts as a zero reward."""


class ImagePrompt(list[int]):
    """Token ids of a prompt with images, each standing for a run of placeholder tokens."""

    def __init__(self, token_ids: Iterable[int], images: tuple[bytes, ...]) -> None:
        super().__init__(token_ids)
        self.images = images


class ShortPrompt(ImagePrompt):
    """A prompt, with images or without, whose completion has at most `max_new_tokens` tokens: all its episode has left.

    A generator that stops there saves time; one that ignores it has its completion cut. With a `seed` the completion
    depends on the prompt, the weights and that seed alone, where the generator can do so.
    """

    def __init__(
        self, token_ids: Iterable[int], images: tuple[bytes, ...], max_new_tokens: int, *, seed: int | None = None
    ) -> None:
        super().__init__(token_ids, images)
        self.max_new_tokens, self.seed = max_new_tokens, seed


def images_of(prompt: list[int]) -> tuple[bytes, ...]:
    """The prompt's images, as PNG files."""
    return prompt.images if isinstance(prompt, ImagePrompt) else ()


def limit_of(prompt: list[int], most: int) -> int:
    """The most tokens of a prompt's completion: `most`, or the prompt's own limit if that is lower."""
    return min(most, prompt.max_new_tokens) if isinstance(prompt, ShortPrompt) else most


def seed_of(prompt: list[int]) -> int | None:
    """The prompt's own random seed, if it has one."""
    return prompt.seed if isinstance(prompt, ShortPrompt) else None


@dataclass(frozen=True, slots=True)
class Completion:
    """What a generator returns for one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token under the policy that sampled it."""
    truncated: bool = False
    """It hit the token limit before its end token."""
    weights: list[float] | None = None
    """Importance weight of each token, where another engine sampled it; None is 1."""
    entropies: list[float] | None = None
    """Entropy, in nats, of the distribution that each log-probability is of; None where the generator does not say."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, the policy's answer to it, and what the environment gave for it."""

    prompt_ids: list[int]
    completion: Completion
    reward: float = 0.0
    """The environment's own reward for this turn."""
    state_key: str = ""
    """Equal keys inside one group mean "the same state" (GiGPO's anchor). Empty: never equal."""
    used_tool: bool = False
    invalid: str = ""
    """Why the environment could not act on this turn, or charges it; empty when it did and does not."""
    observation: str = ""
    """The text the policy answered to."""
    text: str = ""
    """The policy's answer, decoded."""
    shaping: float = 0.0
    """Our format term for this turn, filled in by the training step."""
    images: tuple[bytes, ...] = ()
    """The images in the prompt, in order, as PNG files."""
    action: str | None = None
    """The action that the environment found in the answer, empty if none; None where it does not say."""


def turn_as_dict(turn: Turn) -> dict[str, Any]:
    """A turn in plain values, which `turn_from_dict` reads back."""
    completion = {name: getattr(turn.completion, name) for name in Completion.__slots__}
    return {name: getattr(turn, name) for name in Turn.__slots__} | {"completion": completion}


def turn_from_dict(saved: Mapping[str, Any]) -> Turn:
    return Turn(**{**saved, "completion": Completion(**saved["completion"])})


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode. `reward` is the task's own; `bonus` is ours and never reaches the replay baseline."""

    turns: list[Turn]
    stop: Stop
    bonus: float = 0.0
    success: bool = False
    metrics: Metrics = field(default_factory=dict)
    """The task's other measures of the episode, by name."""
    last_observation: str = ""
    """The environment's answer to the last turn, which the policy does not see."""
    num_given: int = 0
    """Its first turns that were not sampled for it but repeated from an earlier win; they do not train."""

    @property
    def reward(self) -> float:
        # fsum: siblings that earned the same in another order must come out exactly equal.
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def score(self) -> float:
        """What on-policy learning compares: reward, bonus and format terms together."""
        return math.fsum([*(turn.reward for turn in self.turns), *(turn.shaping for turn in self.turns), self.bonus])

    @property
    def num_tool_turns(self) -> int:
        return sum(turn.used_tool for turn in self.turns)

    @property
    def ends_with_answer(self) -> bool:
        """It ended with a valid turn that used no tool. Where every action is a tool call, as in games, none does."""
        return self.stop is Stop.DONE and bool(self.turns) and not (self.turns[-1].used_tool or self.turns[-1].invalid)

    @property
    def num_tokens(self) -> int:
        """Tokens the policy wrote, also in given turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """Sibling episodes of one task: the unit every group-relative estimator works on."""

    task_id: str
    trajectories: list[Trajectory]
    step: int = 0
    """The training step whose policy sampled it."""
    info: dict[str, str] = field(default_factory=dict)
    """What else is known of the task; `family` is the kind of task it is."""
    num_failed: int = 0
    """Episodes that failed even after a retry; they are not among `trajectories`."""
    joined: list[list[str]] = field(default_factory=list)
    """Of each of the last trajectories, which joined from replay and were not played: why a turn does not train."""

    @property
    def untrained(self) -> list[list[str]]:
        """Per episode and turn: why it does not train, whatever a filter says, or ""."""
        own = [["given"] * t.num_given + [""] * (len(t.turns) - t.num_given) for t in self.trajectories]
        return [*own[: len(own) - len(self.joined)], *self.joined]

    @property
    def has_given_turns(self) -> bool:
        """Whether it began near the end of a win, so that its success says little about the whole task."""
        return any(t.num_given for t in self.trajectories)

    @property
    def success(self) -> float:
        """Share of its episodes that solved the task."""
        return fmean(t.success for t in self.trajectories) if self.trajectories else 0.0

    @property
    def is_flat(self) -> bool:
        """Whether all episodes have the same reward by the task alone, so that they cannot be compared."""
        return len({t.reward for t in self.trajectories}) < 2


def mean_measures(played: Sequence[Trajectory]) -> Metrics:
    """The mean of every measure that some episode has; an episode without a turn counts 0."""
    names = sorted({name for t in played for name in t.metrics})
    return {name: fmean(t.metrics.get(name, 0.0) for t in played) for name in names}
