"""Household errands in the words and rules of ALFWorld, generated from seeds; nothing to install or download."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Annotated

from spear_rl.envs.household.env import HouseholdEnv
from spear_rl.envs.household.experts.demonstrations import DEMONSTRATORS
from spear_rl.envs.household.generation.generator import LEVELS, generated_problem
from spear_rl.envs.household.generation.sentences import FAMILIES
from spear_rl.envs.household.manifest import SPLITS, recorded_panel
from spear_rl.envs.household.rules.game import Game
from spear_rl.rollout.env import Task
from spear_rl.settings.ranges import OneOf, Range, has_checked_options, require_known

__all__ = ["DEMONSTRATORS", "FAMILIES", "LEVELS", "SPLITS", "HouseholdEnv", "tasks"]

INSTRUCTIONS = (
    "You are in a house and have to complete the given task by acting in text commands. "
    "Think in <think></think>, then give exactly one command in <action></action>."
)


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    level: Annotated[str, OneOf(LEVELS, "level")] = "easy",
    expert: Annotated[str, OneOf(DEMONSTRATORS, "expert")] = "search",
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
    families: Sequence[str] = (),
) -> Sequence[Task]:
    """The panel of a split, in a fixed order that takes turns in the kinds of task."""
    own = LEVELS[level].families
    for family in families:
        require_known("families", family, own, what="family")
    chosen = [
        Task(
            id=f"household/{level}/{split}/{number:05d}",
            make_env=partial(household_env, level, seed),
            family=own[seed % len(own)],
            instructions=INSTRUCTIONS,
            answer_format="<action>{action}</action>",
            demonstrate=partial(demonstration, level, seed, expert),
        )
        for number, seed in enumerate(recorded_panel(level, split).seeds)
        if not families or own[seed % len(own)] in families
    ]
    return tuple(chosen[:max_tasks])


def household_env(level: str, seed: int) -> HouseholdEnv:
    """An episode of the game of a seed."""
    return HouseholdEnv(_game(level, seed))


def demonstration(level: str, seed: int, expert: str, demonstration_seed: int) -> list[str]:
    """An expert's commands in the game of a seed."""
    return DEMONSTRATORS[expert](_game(level, seed), demonstration_seed)


@lru_cache(maxsize=2048)
def _game(level: str, seed: int) -> Game:
    return Game(generated_problem(level, seed))
