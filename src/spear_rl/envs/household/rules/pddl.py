"""Reads the PDDL problems that ALFWorld stores its games in; only the subset of PDDL those files use."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Fact: TypeAlias = tuple[str, ...]
"""A predicate and its arguments, in lower case: ("inreceptacle", "mug_bar_1", "desk_bar_1")."""

Formula: TypeAlias = "str | tuple[Formula, ...]"
"""A PDDL expression as nested tuples of lower-case words."""

TASK = "Your task is to: "
_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """A game before its first move: what exists, what holds at the start, and the goal."""

    entities: Mapping[str, str]
    """Every declared name and its type: agent, location, receptacle, object, rtype or otype."""
    facts: tuple[Fact, ...]
    goal: Formula
    task: str
    """The task as a sentence: all that the player is told about the goal."""

    def content_hash(self) -> str:
        """Equal for two games that differ only in the wording of the task or the order of their facts."""
        lines = sorted(" ".join(fact) for fact in set(self.facts))
        lines.append(lisp(self.goal))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_problem(text: str, task: str = "") -> Problem:
    """The game in a PDDL text; `task` is the sentence that the player is told."""
    sections: dict[str, tuple[Formula, ...]] = {}
    for section in read_formula(text)[1:]:
        if isinstance(section, tuple) and section and isinstance(section[0], str):
            sections[section[0]] = section[1:]
    try:
        declared, init, goal = sections[":objects"], sections[":init"], sections[":goal"][0]
    except (KeyError, IndexError):
        raise ValueError("a PDDL problem needs the sections :objects, :init and :goal") from None
    # Numeric facts such as (= (total-cost) 0) only matter to a planner.
    facts = [tuple(map(str, entry)) for entry in init if isinstance(entry, tuple) and entry[0] != "="]
    return Problem(entities=typed_names(declared), facts=tuple(dict.fromkeys(facts)), goal=goal, task=task)


def read_formula(text: str) -> tuple[Formula, ...]:
    """One parenthesised PDDL expression."""
    stack: list[list[Formula]] = [[]]
    for token in _TOKEN.findall(_COMMENT.sub("", text).lower()):
        if token == "(":
            stack.append([])
        elif token == ")":
            closed = tuple(stack.pop())
            if not stack:
                raise ValueError("unbalanced parentheses in a PDDL problem: one ')' too many")
            stack[-1].append(closed)
        else:
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1 or not isinstance(stack[0][0], tuple):
        raise ValueError("a PDDL problem must be one (parenthesised) expression")
    return stack[0][0]


def task_sentence(grammar: str) -> str:
    """The task sentence in a game's grammar; empty if it has none."""
    for line in grammar.split("\n"):
        sentence, is_closed, _ = line.partition(TASK)[2].partition('"')
        if is_closed:
            return sentence
    return ""


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
