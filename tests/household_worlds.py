"""What several tests of the household need: games as PDDL text, and independent copies of a world."""

from __future__ import annotations

import copy

from spear_rl.envs.household.rules.pddl import Problem, lisp
from spear_rl.envs.household.rules.world import World

_DECLARED_ORDER = ("agent", "location", "receptacle", "object", "rtype", "otype")


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


def twin_of(world: World) -> World:
    """An independent world in the same state."""
    twin = copy.copy(world)
    twin.contents, twin.lying, twin.flags = list(world.contents), list(world.lying), dict(world.flags)
    return twin
