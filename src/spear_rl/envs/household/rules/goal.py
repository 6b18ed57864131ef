"""Grounds a goal: a PDDL formula about types becomes one about a game's numbers, its unchanging parts decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from spear_rl.envs.household.rules.problem import Fact, Formula, Problem, typed_names

Ground: TypeAlias = "bool | Sequence[Any]"
"""A formula over numbers, in what JSON can hold: ("any", ("inside", 3, 0, 1), ("not", ("flag", "ishot", 3)))."""
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


def grounded_goal(problem: Problem, numbers: Numbers) -> Ground:
    """The goal about this game's numbers; a plain truth value where no move can change it."""
    return _Grounder(problem, numbers).simplified(problem.goal, {})


def mentioned_predicates(formula: Formula) -> frozenset[str]:
    """The predicates a formula looks at."""
    if isinstance(formula, str) or not formula:
        return frozenset()
    head, *rest = formula
    below = frozenset[str]().union(*(mentioned_predicates(part) for part in rest))
    return below if not isinstance(head, str) or head in _CONNECTIVES else below | {head}


class _Grounder:
    def __init__(self, problem: Problem, numbers: Numbers) -> None:
        self.entities = problem.entities
        self.facts = frozenset(problem.facts)
        self.numbers = numbers
        self.kinds: dict[str, list[str]] = {}

    def simplified(self, formula: Formula, bound: Bound) -> Ground:
        """The formula with its quantifiers spelled out and its unchanging parts decided."""
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
        variables = typed_names(formula[1])
        # A name declared anew means something else from here on.
        free = {name: entity for name, entity in bound.items() if name not in variables}
        return self._extended(list(variables.items()), formula, free)

    def _extended(
        self, variables: list[tuple[str, str]], formula: tuple[Formula, ...], bound: Bound
    ) -> Iterator[Bound]:
        if not variables:
            yield bound
            return
        (variable, kind), *rest = variables
        entities = self._of_kind(kind)
        if formula[0] == "exists":
            entities = self._promising(variable, entities, formula[2], bound)
        for entity in entities:
            yield from self._extended(rest, formula, {**bound, variable: entity})

    def _of_kind(self, kind: str) -> list[str]:
        if kind not in self.kinds:
            # In PDDL every type is an object.
            self.kinds[kind] = [entity for entity, own in self.entities.items() if kind in (own, "object")]
        return self.kinds[kind]

    def _promising(self, variable: str, entities: list[str], body: Formula, bound: Bound) -> list[str]:
        """The entities for which no unchanging condition on what is bound fails; saves most of the grounding."""
        for atom in _conjuncts(body):
            words = [bound.get(str(word), str(word)) for word in atom]
            fixed = words[0] not in _CONNECTIVES | _FLAGS | _MOVING
            if fixed and variable in words and all(w == variable or not w.startswith("?") for w in words[1:]):
                entities = [e for e in entities if tuple(e if w == variable else w for w in words) in self.facts]
        return entities

    def _atom(self, atom: Fact) -> Ground:
        predicate, *arguments = atom
        if predicate in _UNTRACKED:
            raise ValueError(f"a goal cannot ask for ({predicate} ...): the household does not keep track of it")
        if predicate in _FLAGS:
            entity = self.numbers.objects.get(arguments[0])
            return False if entity is None else ("flag", predicate, entity)
        if predicate in _MOVING:
            return self._moving(predicate, arguments)
        return atom in self.facts

    def _moving(self, predicate: str, arguments: list[str]) -> Ground:
        objects, receptacles, locations = self.numbers
        if predicate == "holdsany":
            return ("busy",)
        first, last = arguments[0], arguments[-1]
        if predicate == "opened":
            receptacle = receptacles.get(first)
            return False if receptacle is None else ("opened", receptacle)
        if predicate == "atlocation":
            place = locations.get(last)
            return False if place is None else ("here", place)
        if predicate == "holds":
            entity = objects.get(last)
            return False if entity is None else ("held", entity)
        entity, rooms = objects.get(first), receptacles if predicate == "inreceptacle" else locations
        where = rooms.get(last)
        if entity is None or where is None:
            return False
        return ("inside" if predicate == "inreceptacle" else "lying", entity, where)


def _conjuncts(formula: Formula) -> Iterator[tuple[Formula, ...]]:
    if isinstance(formula, str) or not formula:
        return
    if formula[0] == "and":
        for part in formula[1:]:
            yield from _conjuncts(part)
    elif formula[0] == "exists":
        declared = typed_names(formula[1])
        yield from (atom for atom in _conjuncts(formula[2]) if declared.keys().isdisjoint(map(str, atom)))
    elif all(isinstance(word, str) for word in formula):
        yield formula


def _negation(part: Ground) -> Ground:
    return not part if isinstance(part, bool) else ("not", part)


def _all(parts: list[Ground]) -> Ground:
    if any(part is False for part in parts):
        return False
    open_parts = [part for part in parts if not isinstance(part, bool)]
    if len(open_parts) < 2:
        return open_parts[0] if open_parts else True
    return ("all", *open_parts)


def _any(parts: list[Ground]) -> Ground:
    if any(part is True for part in parts):
        return True
    open_parts = [part for part in parts if not isinstance(part, bool)]
    open_parts = _merged(open_parts)
    if len(open_parts) < 2:
        return open_parts[0] if open_parts else False
    return ("any", *open_parts)


def _merged(parts: list[Sequence[Any]]) -> list[Sequence[Any]]:
    """Parts that only differ in the receptacle an object is in, as one: twenty cabinets make no long goal."""
    receptacles: dict[Any, list[int]] = {}
    for part in chain.from_iterable(part[1:] if part[0] == "any" else (part,) for part in parts):
        *others, last = part[1:] if part[0] == "all" else (part,)
        is_inside = last[0] == "inside"
        key = (*others, last[:2] if is_inside else last)
        receptacles.setdefault(key, []).extend(last[2:] if is_inside else ())
    merged: list[Sequence[Any]] = []
    for (*others, last), where in receptacles.items():
        ending = (*last, *sorted(set(where))) if last[0] == "inside" else last
        merged.append(("all", *others, ending) if others else ending)
    return merged
