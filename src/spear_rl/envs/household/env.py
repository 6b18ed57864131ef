"""Text games of ALFWorld's kind as environments: the policy's answer in, the game's text out, a reward for winning."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.wording import NOTHING_HAPPENS
from spear_rl.envs.household.rules.world import World
from spear_rl.envs.shared.answer_tags import parsed_answer, published_answer
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

REWARD = 10.0


class Episode(Protocol):
    """A running game, whichever engine runs it."""

    @property
    def won(self) -> bool: ...
    def intro(self) -> str: ...
    def commands(self) -> tuple[str, ...]: ...
    def act(self, command: str) -> str: ...
    def state_key(self) -> str: ...
    def close(self) -> None: ...


class TextGameEnv:
    """One episode of one game; `invalid` is one of `answer_tags.RULES`."""

    __slots__ = ("_episode", "_invalid", "_is_over", "_new_episode", "_reward")

    def __init__(self, new_episode: Callable[[], Episode], *, reward: float = REWARD, invalid: str = "strict") -> None:
        self._new_episode, self._reward, self._invalid = new_episode, reward, invalid
        self._episode: Episode | None = None
        self._is_over = False

    def reset(self) -> Observation:
        self.close()
        self._episode = self._new_episode()
        self._is_over = False
        intro = self._episode.intro()
        return replace(self._observation(self._episode, intro), task=intro.rpartition("\n\n")[2])

    def step(self, action: str) -> StepResult:
        episode = self._episode
        if self._is_over:
            raise RuntimeError("this episode is over: make a new environment for the next one")
        if episode is None:
            raise RuntimeError("there is no episode under way: call reset() before step()")
        commands, is_strict = episode.commands(), self._invalid == "strict"
        command, invalid = parsed_answer(action) if is_strict else published_answer(action, commands)
        is_possible = command in commands
        text = episode.act(command) if command else NOTHING_HAPPENS
        if is_strict and not is_possible:
            invalid = invalid or INADMISSIBLE
        self._is_over = won = is_possible and episode.won
        return StepResult(
            self._observation(episode, text),
            reward=self._reward if won else 0.0,
            done=won,
            used_tool=is_possible,
            invalid=invalid,
            success=won,
            action=command,
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

    def __init__(self, game: Game, *, reward: float = REWARD, invalid: str = "strict") -> None:
        super().__init__(partial(World, game), reward=reward, invalid=invalid)
