"""Lets the stock engine remember what it has translated and parsed; what it says and does stays the same.

textworld translates and parses the same texts over and over, at every load, reset and step. There is no seam for it, so
its functions are replaced in place, once a process and only when the backend `textworld` is used.
"""

from __future__ import annotations

import copy
import sys
import threading
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

MAX_GAMES = 64
"""How many translated games are kept; one is a few megabytes."""

_TRANSLATING = threading.Lock()
"""The translator keeps its options in global variables."""


@cache
def remember_translations() -> None:
    """Make translation and parsing remember their results."""
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
        # The second, optimised translation only serves the engine's planner; it plans with the plain one as well.
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
