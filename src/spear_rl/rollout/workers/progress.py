"""Environments with somebody looking on: where every episode stands, and how many have ended how.

Knows no prompts. Every answer is passed on as it is, with two exceptions that a policy can ask for: the episode is over
when it has given up, and has failed when the policy itself could not be reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.rollout.workers.runner import Answer, EnvRunner, Failure, InProcess


@dataclass
class SeenEpisode:
    """An episode under way, as its environment knows it."""

    task: Task
    number: int
    """How many episodes of the same task began before it."""
    envs: EnvRunner = field(default_factory=InProcess)
    """Who runs it, and its task's expert."""
    observation: Observation = field(default_factory=lambda: Observation(""))
    """What was seen last."""
    reward: float = 0.0
    success: bool | None = None
    has_given_up: bool = False
    """Set by a policy that has nothing to say after its present action."""
    error: BaseException | None = None
    """Why it failed."""


@dataclass
class Tally:
    """How far an evaluation has come."""

    num_episodes: int = 0
    """In all, also those to come."""
    num_ended: int = 0
    num_solved: int = 0
    num_failed: int = 0
    num_turns: int = 0


class Watched:
    """A runner around another one; `episodes` are those under way, by their keys.

    Args:
        notice: is told the tally after every answer and end.
    """

    def __init__(
        self, runner: EnvRunner, *, num_episodes: int = 0, notice: Callable[[Tally], None] | None = None
    ) -> None:
        self.episodes: dict[int, SeenEpisode] = {}
        self.tally = Tally(num_episodes)
        self._runner, self._notice = runner, notice or (lambda _: None)
        self._num_begun: Counter[str] = Counter()
        self._lost: list[tuple[int, Answer]] = []

    def lose(self, key: int, error: BaseException) -> None:
        """The policy cannot be reached in this episode: whatever it is said to say is answered by a failure."""
        self.episodes[key].error = error

    def open(self, key: int, task: Task) -> None:
        self.episodes[key] = SeenEpisode(task, self._num_begun[task.id], self._runner)
        self._num_begun[task.id] += 1
        self._runner.open(key, task)

    def step(self, key: int, action: str) -> None:
        error = self.episodes[key].error
        if error is None:
            self._runner.step(key, action)
        else:
            self._lost.append((key, Failure(error)))

    def answers(self, at_least: int) -> list[tuple[int, Answer]]:
        lost, self._lost = self._lost, []
        heard = self._runner.answers(max(at_least - len(lost), 0))
        return [*lost, *((key, self._passed_on(self.episodes[key], answer)) for key, answer in heard)]

    def close(self, key: int) -> None:
        self._runner.close(key)
        episode = self.episodes.pop(key, None)
        if episode is not None:
            self._lost = [(other, answer) for other, answer in self._lost if other != key]
            solved = episode.reward > 0 if episode.success is None else episode.success
            self.tally.num_ended += 1
            self.tally.num_failed += episode.error is not None
            self.tally.num_solved += episode.error is None and solved
            self._notice(self.tally)

    def call(self, function: Callable[[], Any]) -> Any:
        return self._runner.call(function)

    def __len__(self) -> int:
        return len(self._runner) + len(self._lost)

    def _passed_on(self, episode: SeenEpisode, answer: Answer) -> Answer:
        if isinstance(answer, Failure):
            episode.error = answer.error
        elif isinstance(answer, StepResult):
            self.tally.num_turns += 1
            self._notice(self.tally)
            episode.observation = answer.observation
            episode.reward += answer.reward
            episode.success = episode.success if answer.success is None else answer.success
            return replace(answer, done=True) if episode.has_given_up else answer
        else:
            episode.observation = answer
        return answer
