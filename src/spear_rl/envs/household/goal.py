"""Goals: a PDDL formula becomes one function of a world, with everything that cannot change already worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from spear_rl.envs.household.problem import Fact, Formula, Problem, typed_names

if TYPE_CHECKING:
    from spear_rl.envs.household.world import World

Test: TypeAlias = "Callable[[World], bool]"
Bound: TypeAlias = Mapping[str, str]

_CONNECTIVES = frozenset({"and", "or", "not", "imply", "exists", "forall", "="})
_FLAGS = frozenset({"isclean", "ishot", "iscool", "issliced", "istoggled", "ison"})
_MOVING = frozenset({"atlocation", "objectatlocation", "opened", "inreceptacle", "holds", "holdsany"})
_UNTRACKED = frozenset({"checked"})


class Numbers(NamedTuple):
    """Which number each identifier has in a game's tables."""

    objects: Mapping[str, int]
    receptacles: Mapping[str, int]
    locations: Mapping[str, int]


def compiled_goal(problem: Problem, numbers: Numbers) -> Test:
    """Whether the goal holds, as a function of the world."""
    simplified = _Compiler(problem, numbers).simplified(problem.goal, {})
    if isinstance(simplified, bool):
        return _always(simplified)
    return simplified


def mentioned_predicates(formula: Formula) -> frozenset[str]:
    """The predicates a formula looks at."""
    if isinstance(formula, str) or not formula:
        return frozenset()
    head, *rest = formula
    below = frozenset[str]().union(*(mentioned_predicates(part) for part in rest))
    return below if not isinstance(head, str) or head in _CONNECTIVES else below | {head}


class _Compiler:
    def __init__(self, problem: Problem, numbers: Numbers) -> None:
        self.entities = problem.entities
        self.facts = frozenset(problem.facts)
        self.numbers = numbers

    def simplified(self, formula: Formula, bound: Bound) -> Test | bool:
        """The formula as a test, or as a plain truth value where no move can change it."""
        if isinstance(formula, str):
            raise ValueError(f"a goal is made of (predicate ...) lists, found {formula!r}")
        if not formula:
            return True
        head = formula[0]
        if head == "and":
            return _all([self.simplified(part, bound) for part in formula[1:]])
        if head == "or":
            return _any([self.simplified(part, bound) for part in formula[1:]])
        if head == "not":
            return _negation(self.simplified(formula[1], bound))
        if head == "imply":
            return _any([_negation(self.simplified(formula[1], bound)), self.simplified(formula[2], bound)])
        if head == "exists":
            return _any([self.simplified(formula[2], inner) for inner in self._bindings(formula, bound)])
        if head == "forall":
            return _all([self.simplified(formula[2], inner) for inner in self._bindings(formula, bound)])
        atom = tuple(bound.get(str(word), str(word)) for word in formula)
        return atom[1] == atom[2] if head == "=" else self._atom(atom)

    def _bindings(self, formula: tuple[Formula, ...], bound: Bound) -> Iterator[Bound]:
        names, body = formula[1], formula[2]
        variables = typed_names(names)
        choices = []
        for variable, kind in variables.items():
            # In PDDL every type is an object.
            entities = [entity for entity, own in self.entities.items() if kind in (own, "object")]
            if formula[0] == "exists":
                entities = self._promising(variable, entities, body, bound)
            choices.append(entities)
        for chosen in product(*choices):
            yield {**bound, **dict(zip(variables, chosen, strict=True))}

    def _promising(self, variable: str, entities: list[str], body: Formula, bound: Bound) -> list[str]:
        """The entities for which no unchanging condition on the variable alone fails; saves most of the grounding."""
        for atom in _conjuncts(body):
            words = [bound.get(str(word), str(word)) for word in atom]
            fixed = words[0] not in _CONNECTIVES | _FLAGS | _MOVING
            if fixed and variable in words and all(w == variable or not w.startswith("?") for w in words[1:]):
                entities = [e for e in entities if tuple(e if w == variable else w for w in words) in self.facts]
        return entities

    def _atom(self, atom: Fact) -> Test | bool:
        predicate, *arguments = atom
        if predicate in _UNTRACKED:
            raise ValueError(f"a goal cannot ask for ({predicate} ...): the household does not keep track of it")
        if predicate in _FLAGS:
            entity = self.numbers.objects.get(arguments[0])
            return False if entity is None else _flag(predicate, entity)
        if predicate in _MOVING:
            return self._moving(predicate, arguments)
        return atom in self.facts

    def _moving(self, predicate: str, arguments: list[str]) -> Test | bool:
        objects, receptacles, locations = self.numbers
        if predicate == "holdsany":
            return lambda world: world.held >= 0
        first, last = arguments[0], arguments[-1]
        if predicate == "opened":
            receptacle = receptacles.get(first)
            return False if receptacle is None else lambda world: receptacle in world.opened
        if predicate == "atlocation":
            place = locations.get(last)
            return False if place is None else lambda world: world.here == place
        if predicate == "holds":
            entity = objects.get(last)
            return False if entity is None else lambda world: world.held == entity
        entity, rooms = objects.get(first), receptacles if predicate == "inreceptacle" else locations
        where = rooms.get(last)
        if entity is None or where is None:
            return False
        if predicate == "inreceptacle":
            return lambda world: entity in world.contents[where]
        return lambda world: entity in world.lying[where]


def _conjuncts(formula: Formula) -> Iterator[tuple[Formula, ...]]:
    if isinstance(formula, str) or not formula:
        return
    if formula[0] == "and":
        for part in formula[1:]:
            yield from _conjuncts(part)
    elif formula[0] == "exists":
        yield from _conjuncts(formula[2])
    elif all(isinstance(word, str) for word in formula):
        yield formula


def _always(value: bool) -> Test:
    return lambda world: value


def _flag(predicate: str, entity: int) -> Test:
    return lambda world: entity in world.flags[predicate]


def _negation(part: Test | bool) -> Test | bool:
    return not part if isinstance(part, bool) else lambda world: not part(world)


def _all(parts: list[Test | bool]) -> Test | bool:
    if any(part is False for part in parts):
        return False
    tests = [part for part in parts if not isinstance(part, bool)]
    if len(tests) < 2:
        return tests[0] if tests else True

    def every(world: World) -> bool:
        for test in tests:  # noqa: SIM110 - a generator would double the time of a step
            if not test(world):
                return False
        return True

    return every


def _any(parts: list[Test | bool]) -> Test | bool:
    if any(part is True for part in parts):
        return True
    tests = [part for part in parts if not isinstance(part, bool)]
    if len(tests) < 2:
        return tests[0] if tests else False

    def some(world: World) -> bool:
        for test in tests:  # noqa: SIM110 - a generator would double the time of a step
            if test(world):
                return True
        return False

    return some
