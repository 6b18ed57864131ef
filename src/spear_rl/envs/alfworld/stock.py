"""The backend `textworld`: ALFWorld's own engine, the reference for `fast`. Imported only when used."""

import copy
import hashlib
import sys
import threading
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from spear_rl.envs.alfworld.gamefile import GameFile, read_game_file
from spear_rl.envs.household.env import TextGameEnv
from spear_rl.envs.household.rules.goal import FLAGS
from spear_rl.errors import MissingExtraError

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
"""Printed first by the engine in every game; removed."""
MAX_GAMES = 64
"""Translated games kept in memory, a few megabytes each."""

_STATE = frozenset({"atlocation", "holds", "inreceptacle", "objectatlocation", "opened", *FLAGS})
"""The predicates that commands change and that matter to what can still happen."""
_IDLE_ENGINES: list[Any] = []
"""Engines whose episode is over. Each loads its own C++ library, which is slow to load and not safe to unload."""
_TRANSLATING = threading.Lock()
"""The translator keeps its options in global variables."""


def require_stock_engine() -> None:
    missing = [name for name in ("textworld", "fast_downward", "alfworld") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the backend textworld needs {', '.join(missing)}: pip install 'spear-rl[alfworld]' "
            "or use the backend fast"
        )


def stock_env(path: str, sha256: str, reward: float, invalid: str = "strict") -> TextGameEnv:
    """An episode of the game in a file."""
    return TextGameEnv(partial(StockEpisode, path, sha256), reward=reward, invalid=invalid)


class StockEpisode:
    """A game running in the stock engine."""

    def __init__(self, path: str, sha256: str = "") -> None:
        file = read_game_file(path, sha256=sha256)
        refuse_foreign(file, path)
        require_stock_engine()
        memoise_engine()
        try:
            self._engine: Any = _IDLE_ENGINES.pop()
        except IndexError:
            self._engine = _new_engine()
        # Load the content that was checked: the engine does not open the file again.
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


def refuse_foreign(file: GameFile, path: str) -> None:
    """Refuse a grammar that is not ALFWorld's own: the stock engine evaluates the expressions in it."""
    if not file.is_published:
        raise ValueError(
            f"the game file {path} has a grammar, rules or a task sentence that ALFWorld does not publish; the backend "
            "textworld would run the code in it, so it is refused (the backend fast runs nothing)"
        )


def _new_engine() -> Any:
    textworld = import_module("textworld")
    pddl = import_module("textworld.envs.pddl")
    alfred = import_module("alfworld.agents.environment.alfred_tw_env")
    return alfred.AlfredDemangler(shuffle=False)(pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))


@cache
def memoise_engine() -> None:
    """Cache what the engine translates and parses again at every load, reset and step; its answers stay the same.

    textworld has no hook for that, so its functions are replaced in place, once per process.
    """
    fast_downward: Any = import_module("fast_downward")
    logic: Any = import_module("textworld.envs.pddl.logic")
    textgen: Any = import_module("textworld.envs.pddl.textgen")
    rules: Any = import_module("textworld.logic").Rule

    translate = fast_downward.pddl2sas

    @lru_cache(maxsize=MAX_GAMES)
    def translated(domain: str, problem: str) -> Any:
        arguments = sys.argv
        try:
            return translate(domain, problem, False, False)
        finally:
            sys.argv = arguments

    def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        # The optimised translation only serves the engine's planner, which works with the plain one as well.
        with _TRANSLATING:
            return translated(domain, problem)

    parse_game, parse_text = logic._parse_and_convert, textgen._parse_and_convert

    @lru_cache(maxsize=MAX_GAMES)
    def parsed_game(text: str, rule_name: str) -> Any:
        return parse_game(text, rule_name=rule_name)

    @lru_cache(maxsize=4096)
    def parsed_text(text: str, rule_name: str) -> Any:
        return parse_text(text, rule_name=rule_name)

    fast_downward.pddl2sas = pddl2sas
    rules.parse_conjunctive_query = staticmethod(lru_cache(maxsize=4096)(rules.parse_conjunctive_query))
    logic._parse_and_convert = lambda text, rule_name, **_: parsed_game(text, rule_name)
    textgen._parse_and_convert = lambda text, rule_name="symbols", **_: copy.deepcopy(parsed_text(text, rule_name))
    textgen.copy_context = _copied_context
    textgen.Symbol.copy = _copied_symbol


def _copied_context(context: dict[str, Any]) -> dict[str, Any]:
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _copied_symbol(symbol: Any, context: dict[str, Any]) -> Any:
    twin = copy.copy(symbol)
    twin.context = _copied_context(context)
    return twin
