"""The household as an environment: the policy's text goes in, the game's text comes out, winning pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from spear_rl.envs.household.action import said_command
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.wording import NOTHING_HAPPENS
from spear_rl.envs.household.rules.world import World
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

REWARD = 10.0


class Episode(Protocol):
    """A game under way, on whatever engine."""

    @property
    def won(self) -> bool: ...
    def intro(self) -> str: ...
    def commands(self) -> tuple[str, ...]: ...
    def act(self, command: str) -> str: ...
    def state_key(self) -> str: ...
    def close(self) -> None: ...


class TextGameEnv:
    """One episode of one game of ALFWorld's kind."""

    __slots__ = ("_begin", "_episode", "_is_over", "_reward")

    def __init__(self, begin: Callable[[], Episode], *, reward: float = REWARD) -> None:
        self._begin, self._reward = begin, reward
        self._episode: Episode | None = None
        self._is_over = False

    def reset(self) -> Observation:
        if self._episode is not None:
            self._episode.close()
        self._episode = self._begin()
        self._is_over = False
        return self._observation(self._episode, self._episode.intro())

    def step(self, action: str) -> StepResult:
        episode = self._episode
        if self._is_over:
            raise RuntimeError("this episode is over: make a new environment for the next one")
        if episode is None:
            raise RuntimeError("there is no episode under way: call reset() before step()")
        said = said_command(action)
        if said.invalid:
            return StepResult(self._observation(episode, NOTHING_HAPPENS), invalid=said.invalid, success=False)
        is_possible = said.command in episode.commands()
        text = episode.act(said.command)
        if not is_possible:
            return StepResult(self._observation(episode, text), invalid=INADMISSIBLE, success=False)
        self._is_over = won = episode.won
        return StepResult(
            self._observation(episode, text),
            reward=self._reward if won else 0.0,
            done=won,
            used_tool=True,
            success=won,
        )

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()
        self._episode = None
        self._is_over = True

    @staticmethod
    def _observation(episode: Episode, text: str) -> Observation:
        commands = episode.commands()
        position = commands.index("help")
        choices = commands[:position] + commands[position + 1 :]
        return Observation(text, state_key=episode.state_key(), choices=choices)


class HouseholdEnv(TextGameEnv):
    """One episode of one game in the embedded simulator."""

    __slots__ = ()

    def __init__(self, game: Game, *, reward: float = REWARD) -> None:
        super().__init__(partial(World, game), reward=reward)
