"""Policies to compare with: an expert, and chance. They look at the game itself, not at prompts, and need no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from spear_rl.errors import UserError
from spear_rl.rollout.generator import Stream, drained
from spear_rl.rollout.rendering.messages import MessageRenderer
from spear_rl.rollout.workers.progress import SeenEpisode, Watched
from spear_rl.rollout.workers.runner import demonstrated
from spear_rl.types import Completion

Acts = Callable[[SeenEpisode, int], Iterator[str]]
"""Episode and seed in; the actions of that episode out, each asked for when it is due."""


def expert(episode: SeenEpisode, seed: int) -> Iterator[str]:
    """The task's own demonstration, drawn anew for every episode; the episode ends with it."""
    task = episode.task
    if task.demonstrate is None:
        raise UserError(f"the policy expert: task {task.id} has no expert (Task.demonstrate)")
    actions = demonstrated(task, random.Random(_own(episode, seed)).getrandbits(31), episode.envs)
    for position, action in enumerate(actions, 1):
        episode.has_given_up = position == len(actions)
        yield action


def uniform(episode: SeenEpisode, seed: int) -> Iterator[str]:
    """One of the possible actions, each with the same chance; the dice are the task's and the episode's own."""
    task, dice = episode.task, random.Random(_own(episode, seed))
    while True:
        if not episode.observation.choices:
            raise UserError(
                f"the policy random: {task.id} does not list its possible actions (Observation.choices), "
                "so there is none to choose"
            )
        yield dice.choice(episode.observation.choices)


def _own(episode: SeenEpisode, seed: int) -> str:
    """What nothing but this episode is seeded with, whichever others are played."""
    return f"{seed}/{episode.task.id}/{episode.number}"


REFERENCES: dict[str, Acts] = {"expert": expert, "random": uniform}


class ReferencePolicy:
    """A generator that acts as `acts` says in the episodes that `watched` sees, in the words each task asks for."""

    def __init__(self, acts: Acts, watched: Watched, renderer: MessageRenderer, *, seed: int) -> None:
        self._acts, self._watched, self._renderer, self._seed = acts, watched, renderer, seed

    def stream(self) -> Stream:
        return _ReferenceStream(self._said)

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return drained(self.stream(), prompts)

    def _said(self, key: int) -> Iterator[Completion]:
        episode = self._watched.episodes[key]
        for action in self._acts(episode, self._seed):
            yield self._renderer.completion(episode.task.answer_format.format(action=action))
        episode.has_given_up = True
        yield self._renderer.completion("")


class _ReferenceStream:
    """Answers what is asked for at once, an episode after the other."""

    def __init__(self, said: Callable[[int], Iterator[Completion]]) -> None:
        self._said = said
        self._episodes: dict[int, Iterator[Completion]] = {}
        self._done: list[tuple[int, Completion]] = []

    def add(self, key: int, prompt: list[int]) -> None:
        if key not in self._episodes:
            self._episodes[key] = self._said(key)
        self._done.append((key, next(self._episodes[key])))

    def finished(self) -> list[tuple[int, Completion]]:
        done, self._done = self._done, []
        return done

    def __len__(self) -> int:
        return len(self._done)
