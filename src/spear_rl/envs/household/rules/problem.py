"""A game as ALFWorld's files state it: who is there, what holds at the start, what the goal is. Knows no rules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Fact: TypeAlias = tuple[str, ...]
"""A predicate and its arguments, in lower case: ("inreceptacle", "mug_bar_1", "desk_bar_1")."""

Formula: TypeAlias = "str | tuple[Formula, ...]"
"""A nested list of words, as PDDL writes it, in lower case."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One game before its first move."""

    entities: Mapping[str, str]
    """Every declared name and its type: agent, location, receptacle, object, rtype or otype."""
    facts: tuple[Fact, ...]
    goal: Formula
    task: str
    """The task as a sentence, the only thing the player is told about the goal."""

    def content_hash(self) -> str:
        """The same for two games that differ in nothing but the wording of the task or the order of their facts."""
        lines = sorted(" ".join(fact) for fact in set(self.facts))
        lines.append(lisp(self.goal))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def lisp(formula: Formula) -> str:
    """The formula as PDDL text."""
    return formula if isinstance(formula, str) else f"({' '.join(map(lisp, formula))})"


def typed_names(words: Iterable[Formula]) -> dict[str, str]:
    """`a b - t c - u` as {a: t, b: t, c: u}; a name without a type is an object."""
    typed: dict[str, str] = {}
    untyped: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "-":
            typed |= dict.fromkeys(untyped, str(next(rest, "object")))
            untyped = []
        else:
            untyped.append(str(word))
    return typed | dict.fromkeys(untyped, "object")
