"""Household tasks with the rules and words of ALFWorld, generated from seeds; nothing to install or download."""

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated

from spear_rl.envs.household.env import HouseholdEnv
from spear_rl.envs.household.experts import DEMONSTRATORS
from spear_rl.envs.household.families import FAMILIES
from spear_rl.envs.household.generator import LEVELS, generated_problem
from spear_rl.envs.household.rules.game import Game, grounded_game
from spear_rl.envs.shared.answer_tags import RULES
from spear_rl.envs.shared.generated_panels import SPLITS, panel_seeds, recorded_manifest
from spear_rl.rollout.env import Task
from spear_rl.settings.ranges import OneOf, Range, has_checked_options, require_known

__all__ = ["DEMONSTRATORS", "FAMILIES", "LEVELS", "SPLITS", "HouseholdEnv", "tasks"]

INSTRUCTIONS = (
    "You are in a house and have to complete the given task by acting in text commands. "
    "Think in <think></think>, then give exactly one command in <action></action>."
)
MANIFEST = Path(__file__).with_name("panels.json")


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    level: Annotated[str, OneOf(LEVELS, "level")] = "easy",
    expert: Annotated[str, OneOf(DEMONSTRATORS, "expert")] = "search",
    invalid: Annotated[str, OneOf(RULES, "rule")] = "strict",
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
    families: Sequence[str] = (),
) -> Sequence[Task]:
    """The panel of a split, in a fixed order that alternates between the families of task."""
    own = LEVELS[level].families
    for family in families:
        require_known("families", family, own, what="family")
    chosen = [
        Task(
            id=f"household/{level}/{split}/{number:05d}",
            make_env=partial(_env, level, seed, invalid),
            family=own[seed % len(own)],
            instructions=INSTRUCTIONS,
            answer_format=RULES[invalid],
            demonstrate=partial(_demonstration, level, seed, expert),
        )
        for number, seed in enumerate(recorded_seeds(level, split))
        if not families or own[seed % len(own)] in families
    ]
    return tuple(chosen[:max_tasks])


@lru_cache
def recorded_seeds(level: str, split: str) -> tuple[int, ...]:
    """The seeds of a panel, in order."""
    return panel_seeds(recorded_manifest(MANIFEST)[level]["seeds"], split, len(LEVELS[level].families))


def _env(level: str, seed: int, invalid: str) -> HouseholdEnv:
    return HouseholdEnv(_game(level, seed), invalid=invalid)


def _demonstration(level: str, seed: int, expert: str, demonstration_seed: int) -> list[str]:
    return DEMONSTRATORS[expert](_game(level, seed), demonstration_seed)


@lru_cache(maxsize=2048)
def _game(level: str, seed: int) -> Game:
    return grounded_game(generated_problem(level, seed))
