"""Reads and writes the PDDL problems that ALFWorld keeps its games in; only the subset of PDDL those files use."""

from __future__ import annotations

import re

from spear_rl.envs.household.rules.problem import Fact, Formula, Problem, lisp, typed_names

_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")
TASK = "Your task is to: "

_DECLARED_ORDER = ("agent", "location", "receptacle", "object", "rtype", "otype")


def read_problem(text: str, task: str = "") -> Problem:
    """The game a PDDL problem describes; `task` is the sentence the player is told."""
    sections: dict[str, tuple[Formula, ...]] = {}
    for section in read_formula(text)[1:]:
        if isinstance(section, tuple) and section and isinstance(section[0], str):
            sections[section[0]] = section[1:]
    try:
        declared, init, goal = sections[":objects"], sections[":init"], sections[":goal"][0]
    except (KeyError, IndexError):
        raise ValueError("a PDDL problem needs the sections :objects, :init and :goal") from None
    facts = tuple(dict.fromkeys(fact for entry in init if (fact := _fact(entry))))
    return Problem(entities=typed_names(declared), facts=facts, goal=goal, task=task)


def task_sentence(grammar: str) -> str:
    """The task sentence that a game's grammar prints, or an empty one if it has none."""
    for line in grammar.split("\n"):
        sentence, is_closed, _ = line.partition(TASK)[2].partition('"')
        if is_closed:
            return sentence
    return ""


def write_problem(problem: Problem, name: str = "household") -> str:
    """The game as PDDL text that the stock engine can play."""
    declared = [
        f"  {entity} - {kind}"
        for wanted in _DECLARED_ORDER
        for entity, kind in problem.entities.items()
        if kind == wanted
    ]
    facts = [f"  ({' '.join(fact)})" for fact in problem.facts]
    parts = [f"(define (problem {name})", "(:domain alfred)", "(:objects", *declared, ")", "(:init", *facts, ")"]
    return "\n".join([*parts, f"(:goal {lisp(problem.goal)})", ")", ""])


def _fact(entry: Formula) -> Fact | None:
    # Numeric facts such as (= (total-cost) 0) only matter to a planner.
    if isinstance(entry, str) or entry[0] == "=":
        return None
    return tuple(str(word) for word in entry)


def read_formula(text: str) -> tuple[Formula, ...]:
    """One parenthesised PDDL expression as nested tuples of lower-case words."""
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
