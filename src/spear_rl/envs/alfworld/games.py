"""The backend `fast`: game files converted to games of the household simulator, cached on disk."""

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from spear_rl.envs.alfworld.gamefile import damaged, read_game_file
from spear_rl.envs.household.env import HouseholdEnv
from spear_rl.envs.household.experts import DEMONSTRATORS
from spear_rl.envs.household.rules.game import Game, game_tables
from spear_rl.envs.household.rules.pddl import read_problem
from spear_rl.envs.shared.dice import Dice
from spear_rl.io.cache import cache_folder, store, stored

FORMAT = 1
"""Raise it whenever the tables of a game change in shape or meaning."""

EXPERTS = ("search", "walkthrough", "mixed", "optimal", "clumsy")
"""walkthrough is in the game file; mixed draws between search and walkthrough; the others are the household's."""


class RealGame(NamedTuple):
    """A game and the walkthrough of its authors."""

    game: Game
    walkthrough: tuple[str, ...]


def fast_env(path: str, sha256: str, cache: str, reward: float, invalid: str = "strict") -> HouseholdEnv:
    """An episode of the game in a file."""
    return HouseholdEnv(real_game(path, sha256, cache).game, reward=reward, invalid=invalid)


def demonstration(path: str, sha256: str, cache: str, expert: str, seed: int) -> list[str]:
    """An expert's commands in the game in a file."""
    game, walkthrough = real_game(path, sha256, cache)
    if expert == "mixed":
        expert = "search" if Dice("mixed", seed).chance(0.5) else "walkthrough"
    return list(walkthrough) if expert == "walkthrough" else DEMONSTRATORS[expert](game, seed)


@lru_cache(maxsize=2048)
def real_game(path: str, sha256: str, cache: str = "") -> RealGame:
    """The game in a file of known content. Cache entries are named by that content, so they are never out of date."""
    entry = cache_folder(cache) / "alfworld" / f"games-{FORMAT}" / sha256[:2] / f"{sha256}.json"
    return _restored(stored(entry)) or _built(path, sha256, entry)


def _restored(value: Any) -> RealGame | None:
    try:
        _warn_unless(value["is_published"])
        return RealGame(Game(value["tables"]), tuple(value["walkthrough"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _built(path: str, sha256: str, entry: Path) -> RealGame:
    file = read_game_file(path, sha256=sha256)
    _warn_unless(file.is_published)
    try:
        tables = game_tables(read_problem(file.problem, file.task))
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise damaged(path, error) from error
    store(entry, {"is_published": file.is_published, "walkthrough": file.walkthrough, "tables": tables})
    return RealGame(Game(tables), file.walkthrough)


def _warn_unless(is_published: bool) -> None:
    if not is_published:
        own = "a game file states rules or a wording that are not ALFWorld 0.4's"
        warnings.warn(f"{own}; the backend fast plays it by those of 0.4", stacklevel=2)
