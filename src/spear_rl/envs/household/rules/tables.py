"""Works the tables of a game out of its problem, in what JSON can hold: names, numbers and the grounded goal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypedDict

from spear_rl.envs.household.generation.rooms import TREATMENTS
from spear_rl.envs.household.rules.goal import Ground, Numbers, grounded_goal, mentioned_predicates
from spear_rl.envs.household.rules.problem import Problem

KNIFE_TYPES = ("knifetype", "butterknifetype")
FLAGS = ("isclean", "ishot", "iscool", "issliced", "istoggled", "ison")
RECEPTACLE_MARKS = ("openable", "opened")
OBJECT_MARKS = (
    "pickupable",
    "sliceable",
    "toggleable",
    "isreceptacleobject",
    *(treatment.trait for treatment in TREATMENTS.values()),
    *FLAGS,
)

Groups = list[list[int]]
"""For each number of one kind, the sorted numbers of another kind that belong to it."""


class Tables(TypedDict):
    """Objects, receptacles and locations are numbers in the order of their identifiers."""

    task: str
    objects: list[str]
    """What the player reads for each object."""
    receptacles: list[str]
    marked: dict[str, list[int]]
    """For each predicate of one argument the numbers it holds for at the start."""
    knives: list[int]
    nested: Groups
    """For each object what is in it."""
    acceptances: Groups
    """The different sets of objects that receptacles accept."""
    accepts: list[int]
    """For each receptacle which of these sets."""
    appliances: dict[str, list[int]]
    standing: list[int]
    """For each receptacle its location, -1 if it has none."""
    receptacles_at: Groups
    contents: Groups
    lying: Groups
    start: int
    held: int
    """What the agent holds at the start, -1 for nothing."""
    goal: Ground
    goal_needs_location: bool


def game_tables(problem: Problem) -> Tables:
    """The tables of a problem."""
    facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for fact in problem.facts:
        facts[fact[0]].append(fact[1:])
    kinds = problem.entities
    known = sorted({argument for fact in problem.facts for argument in fact[1:]})
    names = display_names(known)
    objects = {entity: n for n, entity in enumerate(e for e in known if kinds[e] == "object")}
    receptacles = {entity: n for n, entity in enumerate(e for e in known if kinds[e] == "receptacle")}
    locations = {entity: n for n, entity in enumerate(e for e in known if kinds[e] == "location")}

    objects_by_type: defaultdict[str, list[int]] = defaultdict(list)
    for entity, kind in facts["objecttype"]:
        objects_by_type[kind].append(objects[entity])
    receptacles_by_type: defaultdict[str, set[int]] = defaultdict(set)
    for entity, kind in facts["receptacletype"]:
        receptacles_by_type[kind].add(receptacles[entity])
    accepted_by_type: defaultdict[str, set[int]] = defaultdict(set)
    for receptacle_type, object_type in facts["cancontain"]:
        accepted_by_type[receptacle_type].update(objects_by_type[object_type])
    accepted: list[set[int]] = [set() for _ in receptacles]
    for kind, members in receptacles_by_type.items():
        for receptacle in members:
            accepted[receptacle] |= accepted_by_type[kind]
    acceptances: dict[tuple[int, ...], int] = {}
    accepts = [acceptances.setdefault(tuple(sorted(those)), len(acceptances)) for those in accepted]

    standing = [-1] * len(receptacles)
    for entity, place in facts["receptacleatlocation"]:
        if standing[receptacles[entity]] >= 0:
            raise ValueError("a receptacle stands at more than one location")
        standing[receptacles[entity]] = locations[place]
    starts = facts["atlocation"]
    if len(starts) != 1:
        raise ValueError(f"a game has one agent at one location, this one has {len(starts)} such facts")
    marks = [(predicate, receptacles) for predicate in RECEPTACLE_MARKS]
    marks += [(predicate, objects) for predicate in OBJECT_MARKS]
    return {
        "task": problem.task,
        "objects": [names[entity] for entity in objects],
        "receptacles": [names[entity] for entity in receptacles],
        "marked": {p: sorted(numbers[entity] for (entity,) in facts[p]) for p, numbers in marks},
        "knives": sorted(number for kind in KNIFE_TYPES for number in objects_by_type[kind]),
        "nested": _grouped(len(objects), ((objects[b], objects[a]) for a, b in facts["inreceptacleobject"])),
        "acceptances": [list(those) for those in acceptances],
        "accepts": accepts,
        "appliances": {v: sorted(receptacles_by_type[f"{t.appliance}type"]) for v, t in TREATMENTS.items()},
        "standing": standing,
        "receptacles_at": _grouped(len(locations), ((at, r) for r, at in enumerate(standing) if at >= 0)),
        "contents": _grouped(len(receptacles), ((receptacles[r], objects[o]) for o, r in facts["inreceptacle"])),
        "lying": _grouped(len(locations), ((locations[at], objects[o]) for o, at in facts["objectatlocation"])),
        "start": locations[starts[0][1]],
        "held": next((objects[entity] for _, entity in facts["holds"]), -1),
        "goal": grounded_goal(problem, Numbers(objects, receptacles, locations)),
        "goal_needs_location": "atlocation" in mentioned_predicates(problem.goal),
    }


def display_names(identifiers: Sequence[str]) -> dict[str, str]:
    """What the player reads for each identifier: `mug_bar_1` is "mug 2" if it is the first of two, in sorted order."""
    stems = {entity: _stem(entity) for entity in sorted(identifiers) if "_bar_" in entity}
    left = Counter(stems.values())
    # Whatever is not an instance of something (an agent, a type) keeps its name and an empty number.
    names = {entity: f"{entity} " for entity in identifiers if entity not in stems}
    for entity, stem in stems.items():
        names[entity] = f"{stem} {left[stem]}"
        left[stem] -= 1
    return names


def _stem(entity: str) -> str:
    stem = entity.split("_bar_", 1)[0]
    return f"{stem}basin" if "basin" in entity else stem


def _grouped(size: int, pairs: Iterable[tuple[int, int]]) -> Groups:
    groups: Groups = [[] for _ in range(size)]
    for group, member in pairs:
        groups[group].append(member)
    return [sorted(group) for group in groups]
