"""The household as an environment: the policy's text goes in, the game's text comes out, winning pays."""

from __future__ import annotations

from spear_rl.envs.household.action import said_command
from spear_rl.envs.household.game import Game
from spear_rl.envs.household.wording import NOTHING_HAPPENS
from spear_rl.envs.household.world import World
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult

REWARD = 10.0


class HouseholdEnv:
    """One episode of one game."""

    __slots__ = ("_game", "_is_over", "_world")

    def __init__(self, game: Game) -> None:
        self._game = game
        self._world: World | None = None
        self._is_over = False

    def reset(self) -> Observation:
        self._world = World(self._game)
        self._is_over = False
        return self._observation(self._world, self._world.intro())

    def step(self, action: str) -> StepResult:
        world = self._world
        if world is None:
            raise RuntimeError("the household has no episode under way: call reset() before step()")
        if self._is_over:
            raise RuntimeError("this episode of the household is over: make a new environment for the next one")
        said = said_command(action)
        if said.invalid:
            return StepResult(self._observation(world, NOTHING_HAPPENS), invalid=said.invalid, success=False)
        if said.command not in world.commands():
            return StepResult(self._observation(world, NOTHING_HAPPENS), invalid=INADMISSIBLE, success=False)
        text = world.act(said.command)
        self._is_over = world.won
        return StepResult(
            self._observation(world, text),
            reward=REWARD if world.won else 0.0,
            done=world.won,
            used_tool=True,
            success=world.won,
        )

    def close(self) -> None:
        self._world = None
        self._is_over = True

    @staticmethod
    def _observation(world: World, text: str) -> Observation:
        commands = world.commands()
        position = commands.index("help")
        choices = commands[:position] + commands[position + 1 :]
        return Observation(text, state_key=world.state_key(), choices=choices)
