"""The backend `fast`: a game file becomes a game of the household's simulator, once, and is kept on disk as that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from spear_rl.envs.alfworld.gamefile import damaged, read_game_file
from spear_rl.envs.household.env import HouseholdEnv
from spear_rl.envs.household.experts.demonstrations import DEMONSTRATORS
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.pddl import read_problem
from spear_rl.envs.household.rules.tables import game_tables
from spear_rl.envs.shared.dice import Dice
from spear_rl.io.cache import cache_folder, store, stored

FORMAT = 1
"""To be raised whenever the tables of a game change in shape or meaning."""


class RealGame(NamedTuple):
    """A game and how its authors win it."""

    game: Game
    walkthrough: tuple[str, ...]


def fast_env(path: str, sha256: str, cache: str, reward: float) -> HouseholdEnv:
    """An episode of the game in a file."""
    return HouseholdEnv(real_game(path, sha256, cache).game, reward=reward)


@lru_cache(maxsize=2048)
def real_game(path: str, sha256: str, cache: str = "") -> RealGame:
    """The game in a file of known content. A cache entry is named by that content, so it can never be out of date."""
    entry = cache_folder(cache) / "alfworld" / f"games-{FORMAT}" / sha256[:2] / f"{sha256}.json"
    known = _restored(stored(entry))
    return known or _built(path, sha256, entry)


def _restored(value: Any) -> RealGame | None:
    try:
        if not value["is_published"]:
            _warn()
        return RealGame(Game.from_tables(value["tables"]), tuple(value["walkthrough"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _built(path: str, sha256: str, entry: Path) -> RealGame:
    file = read_game_file(path, sha256=sha256)
    if not file.is_published:
        _warn()
    try:
        tables = game_tables(read_problem(file.problem, file.task))
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise damaged(path, error) from error
    store(entry, {"is_published": file.is_published, "walkthrough": file.walkthrough, "tables": tables})
    return RealGame(Game.from_tables(tables), file.walkthrough)


def _warn() -> None:
    warnings.warn(
        "a game file states rules or a wording that are not ALFWorld 0.4's; the backend fast plays it by those of 0.4",
        stacklevel=2,
    )


def _walkthrough(real: RealGame, seed: int) -> list[str]:
    return list(real.walkthrough)


def _mixed(real: RealGame, seed: int) -> list[str]:
    return (_searched if Dice("mixed", seed).chance(0.5) else _walkthrough)(real, seed)


def _searched(real: RealGame, seed: int) -> list[str]:
    return DEMONSTRATORS["search"](real.game, seed)


def _optimal(real: RealGame, seed: int) -> list[str]:
    return DEMONSTRATORS["optimal"](real.game, seed)


def _clumsy(real: RealGame, seed: int) -> list[str]:
    return DEMONSTRATORS["clumsy"](real.game, seed)


EXPERTS: dict[str, Callable[[RealGame, int], list[str]]] = {
    "search": _searched,
    "walkthrough": _walkthrough,
    "mixed": _mixed,
    "optimal": _optimal,
    "clumsy": _clumsy,
}
"""mixed searches in half of the episodes and follows the walkthrough in the others; the rest is the household's."""


def demonstration(path: str, sha256: str, cache: str, expert: str, seed: int) -> list[str]:
    """An expert's commands in the game in a file."""
    return EXPERTS[expert](real_game(path, sha256, cache), seed)
