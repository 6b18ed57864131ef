"""Reference policies for comparison: expert and random. They see the environment instead of prompts; no model."""

import random
from collections.abc import Callable, Iterator, Sequence

from spear_rl.errors import UserError
from spear_rl.rollout.generator import Stream, drained
from spear_rl.rollout.rendering.renderer import MessageRenderer
from spear_rl.rollout.workers.progress import ProgressRunner, RunningEpisode
from spear_rl.rollout.workers.runner import expert_actions
from spear_rl.types import Completion

ActionsFn = Callable[[RunningEpisode, int], Iterator[str]]
"""Episode and seed in; the actions of that episode out, one per turn."""


def expert(episode: RunningEpisode, seed: int) -> Iterator[str]:
    """The task's own demonstration, another one per episode; the episode ends with its last action."""
    actions = expert_actions(episode.task, _rng(episode, seed).getrandbits(31), episode.runner)
    for position, action in enumerate(actions, 1):
        episode.has_given_up = position == len(actions)
        yield action


def uniform(episode: RunningEpisode, seed: int) -> Iterator[str]:
    """One of the admissible actions, uniformly at random."""
    rng = _rng(episode, seed)
    while True:
        if not episode.observation.choices:
            raise UserError(
                f"the policy random: {episode.task.id} does not list its possible actions (Observation.choices), "
                "so there is none to choose"
            )
        yield rng.choice(episode.observation.choices)


def _rng(episode: RunningEpisode, seed: int) -> random.Random:
    """The episode's own random stream, whichever others are played."""
    return random.Random(f"{seed}/{episode.task.id}/{episode.number}")


REFERENCES: dict[str, ActionsFn] = {"expert": expert, "random": uniform}


class ReferencePolicy:
    """A generator, and its own stream, that takes the actions of `actions` in the episodes of `runner`.

    Every prompt is completed at once, in the task's answer format.
    """

    def __init__(self, actions: ActionsFn, runner: ProgressRunner, renderer: MessageRenderer, *, seed: int) -> None:
        self._actions, self._runner, self._renderer, self._seed = actions, runner, renderer, seed
        self._episodes: dict[int, Iterator[Completion]] = {}
        self._done: list[tuple[int, Completion]] = []

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return drained(self.stream(), prompts)

    def stream(self) -> Stream:
        self._episodes, self._done = {}, []
        return self

    def add(self, key: int, prompt: list[int]) -> None:
        if key not in self._episodes:
            self._episodes[key] = self._completions(self._runner.episodes[key])
        self._done.append((key, next(self._episodes[key])))

    def finished(self) -> list[tuple[int, Completion]]:
        done, self._done = self._done, []
        return done

    def __len__(self) -> int:
        return len(self._done)

    def _completions(self, episode: RunningEpisode) -> Iterator[Completion]:
        for action in self._actions(episode, self._seed):
            yield self._renderer.completion(episode.task.answer_format.format(action=action))
        episode.has_given_up = True
        yield self._renderer.completion("")
