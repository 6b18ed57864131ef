"""A runner that reports progress: the state of every running episode, and totals of those that ended.

Answers pass through unchanged, except that a policy can end its episode (`has_given_up`) or fail it (`fail`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.rollout.workers.runner import Answer, EnvRunner, Failure


@dataclass
class RunningEpisode:
    """A running episode, as its environment sees it."""

    task: Task
    number: int
    """How many episodes of the same task started before it."""
    runner: EnvRunner
    observation: Observation = field(default_factory=lambda: Observation(""))
    """The last one."""
    reward: float = 0.0
    success: bool | None = None
    has_given_up: bool = False
    """Set by a policy that has no action after the current one."""
    error: BaseException | None = None


@dataclass
class Tally:
    """The progress of an evaluation, in episodes and turns."""

    num_episodes: int = 0
    """All of them, including those still to start."""
    num_ended: int = 0
    num_solved: int = 0
    num_failed: int = 0
    num_turns: int = 0


class ProgressRunner:
    """A runner around another one; `episodes` are the running ones by key.

    Args:
        notice: called with the tally after every turn and at every episode's end.
        answer: what the environment of a task is given of an answer; all of it by default.
    """

    def __init__(
        self,
        runner: EnvRunner,
        *,
        num_episodes: int = 0,
        notice: Callable[[Tally], None] | None = None,
        answer: Callable[[Task, str], str] | None = None,
    ) -> None:
        self.episodes: dict[int, RunningEpisode] = {}
        self.endings: dict[str, str] = {}
        """Task id -> the last observation of the last of its episodes that ended."""
        self.tally = Tally(num_episodes)
        self._runner, self._notice = runner, notice or (lambda _: None)
        self._answer = answer or (lambda _, text: text)
        self._num_started: Counter[str] = Counter()
        self._failures: list[tuple[int, Answer]] = []

    def fail(self, key: int, error: BaseException) -> None:
        """Fail an episode, if it runs, whose policy cannot be reached: the answer to its next action is a Failure."""
        if key in self.episodes:
            self.episodes[key].error = error

    def open(self, key: int, task: Task) -> None:
        self.episodes[key] = RunningEpisode(task, self._num_started[task.id], self._runner)
        self._num_started[task.id] += 1
        self._runner.open(key, task)

    def step(self, key: int, action: str) -> None:
        episode = self.episodes[key]
        if episode.error is None:
            self._runner.step(key, self._answer(episode.task, action))
        else:
            self._failures.append((key, Failure(episode.error)))

    def answers(self, at_least: int) -> list[tuple[int, Answer]]:
        failures, self._failures = self._failures, []
        answers = self._runner.answers(max(at_least - len(failures), 0))
        return [*failures, *((key, self._recorded(self.episodes[key], answer)) for key, answer in answers)]

    def close(self, key: int) -> None:
        self._runner.close(key)
        episode = self.episodes.pop(key, None)
        if episode is not None:
            self._failures = [(other, answer) for other, answer in self._failures if other != key]
            solved = episode.reward > 0 if episode.success is None else episode.success
            self.endings[episode.task.id] = episode.observation.text
            self.tally.num_ended += 1
            self.tally.num_failed += episode.error is not None
            self.tally.num_solved += episode.error is None and solved
            self._notice(self.tally)

    def call(self, function: Callable[[], Any]) -> Any:
        return self._runner.call(function)

    def __len__(self) -> int:
        return len(self._runner) + len(self._failures)

    def _recorded(self, episode: RunningEpisode, answer: Answer) -> Answer:
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
