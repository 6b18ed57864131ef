"""The goal of a game: grounded from PDDL to the numbers of its entities, then compiled to a function of the world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from spear_rl.envs.household.rules.pddl import Fact, Formula, Problem, typed_names

if TYPE_CHECKING:
    from spear_rl.envs.household.rules.world import World

Ground: TypeAlias = "bool | Sequence[Any]"
"""A JSON-compatible formula over numbers: ("any", ("inside", 3, 0, 1), ("not", ("flag", "ishot", 3)))."""
Numbers: TypeAlias = Mapping[str, Mapping[str, int]]
"""For objects, receptacles and locations, the number of each identifier."""
Bindings: TypeAlias = Mapping[str, str]
GoalTest: TypeAlias = "Callable[[World], bool]"

FLAGS = ("isclean", "ishot", "iscool", "issliced", "istoggled", "ison")

_CONNECTIVES = frozenset({"and", "or", "not", "imply", "exists", "forall", "="})
# Predicates that commands change -> the grounded test, and where its numbers come from: (kind, argument position).
_FLUENTS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, int], ...]]] = {
    **{flag: (("flag", flag), (("objects", 0),)) for flag in FLAGS},
    "opened": (("opened",), (("receptacles", 0),)),
    "atlocation": (("here",), (("locations", -1),)),
    "holds": (("held",), (("objects", -1),)),
    "holdsany": (("busy",), ()),
    "inreceptacle": (("inside",), (("objects", 0), ("receptacles", -1))),
    "objectatlocation": (("lying",), (("objects", 0), ("locations", -1))),
}


def grounded_goal(problem: Problem, numbers: Numbers) -> Ground:
    """The goal over a game's numbers; a truth value where no command can change it."""
    return _Grounder(problem, numbers).grounded(problem.goal, {})


def mentions(formula: Formula, predicate: str) -> bool:
    """Whether a formula contains a predicate."""
    if isinstance(formula, str) or not formula:
        return False
    return formula[0] == predicate or any(mentions(part, predicate) for part in formula[1:])


class _Grounder:
    def __init__(self, problem: Problem, numbers: Numbers) -> None:
        self.entities: defaultdict[str, list[str]] = defaultdict(list)
        for entity, kind in problem.entities.items():
            self.entities[kind].append(entity)
        # In PDDL every type is an object.
        self.entities["object"] = list(problem.entities)
        self.facts = frozenset(problem.facts)
        self.numbers = numbers

    def grounded(self, formula: Formula, bound: Bindings) -> Ground:
        """The formula with its quantifiers expanded and its static parts evaluated."""
        if isinstance(formula, str):
            raise ValueError(f"a goal is made of (predicate ...) lists, found {formula!r}")
        if not formula:
            return True
        head = formula[0]
        if head in ("and", "or"):
            return _joined([self.grounded(part, bound) for part in formula[1:]], is_all=head == "and")
        if head == "not":
            return _negation(self.grounded(formula[1], bound))
        if head == "imply":
            parts = [_negation(self.grounded(formula[1], bound)), self.grounded(formula[2], bound)]
            return _joined(parts, is_all=False)
        if head in ("exists", "forall"):
            parts = [self.grounded(formula[2], inner) for inner in self._bindings(formula, bound)]
            return _joined(parts, is_all=head == "forall")
        atom = tuple(bound.get(str(word), str(word)) for word in formula)
        return atom[1] == atom[2] if head == "=" else self._atom(atom)

    def _bindings(self, formula: tuple[Formula, ...], bound: Bindings) -> list[Bindings]:
        """`bound` with every assignment of entities to the variables that a quantifier declares."""
        variables = typed_names(formula[1])
        # A variable declared again shadows the outer one.
        found: list[Bindings] = [{name: entity for name, entity in bound.items() if name not in variables}]
        for variable, kind in variables.items():
            found = [
                {**inner, variable: entity}
                for inner in found
                for entity in self._candidates(variable, kind, formula, inner)
            ]
        return found

    def _candidates(self, variable: str, kind: str, formula: tuple[Formula, ...], bound: Bindings) -> list[str]:
        """The entities of a type; for `exists`, only those that meet the static conditions known so far."""
        entities = self.entities.get(kind, [])
        for atom in _conjuncts(formula[2]) if formula[0] == "exists" else ():
            words = [bound.get(str(word), str(word)) for word in atom]
            is_static = words[0] not in _CONNECTIVES and words[0] not in _FLUENTS
            if is_static and variable in words and all(w == variable or not w.startswith("?") for w in words[1:]):
                entities = [e for e in entities if tuple(e if w == variable else w for w in words) in self.facts]
        return entities

    def _atom(self, atom: Fact) -> Ground:
        predicate, *arguments = atom
        if predicate == "checked":
            raise ValueError(f"a goal cannot ask for ({predicate} ...): the household does not keep track of it")
        if predicate not in _FLUENTS:
            return atom in self.facts
        test, operands = _FLUENTS[predicate]
        numbers = [self.numbers[kind].get(arguments[position]) for kind, position in operands]
        return False if None in numbers else (*test, *numbers)


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


def _joined(parts: list[Ground], *, is_all: bool) -> Ground:
    """The conjunction or disjunction of the parts, without those that are decided."""
    if any(part is (not is_all) for part in parts):
        return not is_all
    undecided = [part for part in parts if not isinstance(part, bool)]
    if not is_all:
        undecided = _merged(undecided)
    if len(undecided) < 2:
        return undecided[0] if undecided else is_all
    return ("all" if is_all else "any", *undecided)


def _merged(parts: list[Sequence[Any]]) -> list[Sequence[Any]]:
    """Merge the parts that differ only in the receptacle of an object: the goal stays short with twenty cabinets."""
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


def goal_test(ground: Ground) -> GoalTest:
    """The grounded goal as a function of the world: nested closures, the fastest form in pure Python."""
    if isinstance(ground, bool):
        return lambda world: ground
    kind, *operands = ground
    return _TESTS[kind](*operands)


# In the tests below `any` and `all` over a generator would double the time of a step.


def _joined_test(is_all: bool, *parts: Ground) -> GoalTest:
    tests = tuple(map(goal_test, parts))

    def holds(world: World) -> bool:
        for test in tests:
            if test(world) is not is_all:
                return not is_all
        return is_all

    return holds


def _not(part: Ground) -> GoalTest:
    test = goal_test(part)
    return lambda world: not test(world)


def _inside(o: int, *receptacles: int) -> GoalTest:
    def holds(world: World) -> bool:
        contents = world.contents
        for receptacle in receptacles:  # noqa: SIM110
            if o in contents[receptacle]:
                return True
        return False

    return holds


_TESTS: dict[str, Callable[..., GoalTest]] = {
    "all": partial(_joined_test, True),
    "any": partial(_joined_test, False),
    "not": _not,
    "inside": _inside,
    "flag": lambda flag, o: lambda world: o in world.flags[flag],
    "busy": lambda: lambda world: world.held >= 0,
    "opened": lambda receptacle: lambda world: receptacle in world.opened,
    "here": lambda location: lambda world: world.here == location,
    "held": lambda o: lambda world: world.held == o,
    "lying": lambda o, location: lambda world: o in world.lying[location],
}
