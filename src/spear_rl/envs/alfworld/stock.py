"""The backend `textworld`: the engine ALFWorld runs on, as the reference for `fast`. Imported only when used."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from spear_rl.envs.alfworld.gamefile import GameFile, read_game_file
from spear_rl.envs.alfworld.memo import remember_translations
from spear_rl.envs.household.env import TextGameEnv
from spear_rl.envs.household.rules.tables import FLAGS
from spear_rl.errors import MissingExtraError

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
"""What the engine says first in every game; it is left out."""

_STATE = frozenset({"atlocation", "holds", "inreceptacle", "objectatlocation", "opened", *FLAGS})
"""The predicates that moves change and that matter to what can still happen."""


def require_stock_engine() -> None:
    """Says what to install where something is missing."""
    missing = [name for name in ("textworld", "fast_downward", "alfworld") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the backend textworld needs {', '.join(missing)}: pip install 'spear-rl[alfworld]' "
            "or use the backend fast"
        )


def stock_env(path: str, sha256: str, reward: float) -> TextGameEnv:
    """An episode of the game in a file."""
    return TextGameEnv(partial(StockEpisode, path, sha256), reward=reward)


class StockEpisode:
    """A game under way in the stock engine."""

    def __init__(self, path: str, sha256: str = "") -> None:
        file = read_game_file(path, sha256=sha256)
        refuse_foreign(file, path)
        require_stock_engine()
        remember_translations()
        try:
            self._engine: Any = _IDLE_ENGINES.pop()
        except IndexError:
            self._engine = _new_engine()
        # What was checked is what is played: the engine does not open the file again.
        self._engine.load({"pddl_domain": file.domain, "grammar": file.grammar, "pddl_problem": file.problem})
        self._state: Any = self._engine.reset()
        self._intro: str = self._state.feedback.removeprefix(BANNER)

    @property
    def won(self) -> bool:
        return bool(self._state.won)

    def intro(self) -> str:
        return self._intro

    def commands(self) -> tuple[str, ...]:
        return tuple(self._state.admissible_commands)

    def act(self, command: str) -> str:
        self._state, _, _ = self._engine.step(command)
        return str(self._state.feedback)

    def state_key(self) -> str:
        facts = sorted(str(fact) for fact in self._state["_facts"] if fact.name in _STATE)
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def close(self) -> None:
        if self._engine is not None:
            _IDLE_ENGINES.append(self._engine)
            self._engine = None


_IDLE_ENGINES: list[Any] = []
"""Engines whose episode is over. Each has a C++ library of its own, which is slow to load and not safe to unload."""


def _new_engine() -> Any:
    textworld = import_module("textworld")
    pddl = import_module("textworld.envs.pddl")
    alfred = import_module("alfworld.agents.environment.alfred_tw_env")
    return alfred.AlfredDemangler(shuffle=False)(pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))


def refuse_foreign(file: GameFile, path: str) -> None:
    """The stock engine evaluates expressions in a game's grammar, so it gets to see no grammar but ALFWorld's own."""
    if not file.is_published:
        raise ValueError(
            f"the game file {path} has a grammar, rules or a task sentence that ALFWorld does not publish; the backend "
            "textworld would run the code in it, so it is refused (the backend fast runs nothing)"
        )
