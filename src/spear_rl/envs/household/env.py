"""Text games of ALFWorld's kind as environments: the policy's answer in, the game's text out, a reward for winning."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.wording import NOTHING_HAPPENS
from spear_rl.envs.household.rules.world import World
from spear_rl.envs.shared.answer_tags import parsed_answer
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
    """One episode of one game."""

    __slots__ = ("_episode", "_is_over", "_new_episode", "_reward")

    def __init__(self, new_episode: Callable[[], Episode], *, reward: float = REWARD) -> None:
        self._new_episode, self._reward = new_episode, reward
        self._episode: Episode | None = None
        self._is_over = False

    def reset(self) -> Observation:
        self.close()
        self._episode = self._new_episode()
        self._is_over = False
        return self._observation(self._episode, self._episode.intro())

    def step(self, action: str) -> StepResult:
        episode = self._episode
        if self._is_over:
            raise RuntimeError("this episode is over: make a new environment for the next one")
        if episode is None:
            raise RuntimeError("there is no episode under way: call reset() before step()")
        command, invalid = parsed_answer(action)
        if invalid:
            return StepResult(self._observation(episode, NOTHING_HAPPENS), invalid=invalid, success=False)
        is_possible = command in episode.commands()
        text = episode.act(command)
        if not is_possible:
            return StepResult(self._observation(episode, text), invalid=INADMISSIBLE, success=False)
        self._is_over = won = episode.won
        reward = self._reward if won else 0.0
        return StepResult(self._observation(episode, text), reward=reward, done=won, used_tool=True, success=won)

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
