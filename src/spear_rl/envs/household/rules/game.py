"""One game as all its episodes share it: its entities are numbers, in the order of their identifiers."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypedDict

from spear_rl.envs.household.rules.goal import FLAGS, Ground, goal_test, grounded_goal, mentions
from spear_rl.envs.household.rules.pddl import Problem


class Treatment(NamedTuple):
    """What an appliance does to an object with a certain trait: it gains one flag and may lose another."""

    verb: str
    appliance: str
    trait: str
    gains: str
    loses: str = ""


TREATMENTS = {
    "clean": Treatment("clean", "sinkbasin", "cleanable", gains="isclean"),
    "heat": Treatment("heat", "microwave", "heatable", gains="ishot", loses="iscool"),
    "cool": Treatment("cool", "fridge", "coolable", gains="iscool", loses="ishot"),
}

_KNIFE_TYPES = ("knifetype", "butterknifetype")
_TRAITS = tuple(treatment.trait for treatment in TREATMENTS.values())
_OBJECT_PREDICATES = ("pickupable", "sliceable", "toggleable", "isreceptacleobject", *_TRAITS, *FLAGS)

Groups = list[list[int]]
"""For each number of one kind, the sorted numbers of another kind that belong to it."""


class Tables(TypedDict):
    """A grounded game in JSON-compatible form."""

    task: str
    objects: list[str]
    """The displayed name of each object."""
    receptacles: list[str]
    marked: dict[str, list[int]]
    """For each predicate of one argument, the numbers for which it holds at the start."""
    knives: list[int]
    nested: Groups
    """For each object, what is in it."""
    acceptances: Groups
    """The distinct sets of objects that receptacles accept."""
    accepts: list[int]
    """For each receptacle, the index of its set in `acceptances`."""
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


class Game:
    """The tables that no command changes, in the form that is fastest to look up."""

    def __init__(self, tables: Tables) -> None:
        marked = {predicate: frozenset(numbers) for predicate, numbers in tables["marked"].items()}
        self.task = tables["task"]
        self.object_names = tuple(tables["objects"])
        self.receptacle_names = tuple(tables["receptacles"])
        self.object_numbers = {name: number for number, name in enumerate(self.object_names)}
        self.receptacle_numbers = {name: number for number, name in enumerate(self.receptacle_names)}
        self.openable = marked["openable"]
        self.pickupable = marked["pickupable"]
        self.sliceable = marked["sliceable"]
        self.toggleable = marked["toggleable"]
        self.is_container = marked["isreceptacleobject"]
        self.treatable = {verb: marked[treatment.trait] for verb, treatment in TREATMENTS.items()}
        self.nested = _frozen(tables["nested"])
        acceptances = [frozenset(accepted) for accepted in tables["acceptances"]]
        self.accepts = tuple(acceptances[number] for number in tables["accepts"])
        self.knives = frozenset(tables["knives"])
        self.appliances = {verb: frozenset(numbers) for verb, numbers in tables["appliances"].items()}
        standing = tables["standing"]
        self.location_of = {receptacle: location for receptacle, location in enumerate(standing) if location >= 0}
        self.receptacles_at = _frozen(tables["receptacles_at"])
        walks = sorted((f"go to {self.receptacle_names[r]}", location) for r, location in self.location_of.items())
        self.gotos = tuple(
            tuple([walk for walk, location in walks if location != here]) for here in range(len(self.receptacles_at))
        )
        self.start = tables["start"]
        self.start_held = tables["held"]
        self.start_contents = _frozen(tables["contents"])
        self.start_lying = _frozen(tables["lying"])
        self.start_opened = marked["opened"]
        self.start_flags = {flag: marked[flag] for flag in FLAGS}
        self.goal = goal_test(tables["goal"])
        self.goal_needs_location = tables["goal_needs_location"]


def grounded_game(problem: Problem) -> Game:
    return Game(game_tables(problem))


def game_tables(problem: Problem) -> Tables:
    """Ground a problem: give its entities numbers and group its facts by them."""
    facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for fact in problem.facts:
        facts[fact[0]].append(fact[1:])
    known = sorted({argument for fact in problem.facts for argument in fact[1:]})
    names = display_names(known)
    kinds = problem.entities
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
    for entity, location in facts["receptacleatlocation"]:
        if standing[receptacles[entity]] >= 0:
            raise ValueError("a receptacle stands at more than one location")
        standing[receptacles[entity]] = locations[location]
    starts = facts["atlocation"]
    if len(starts) != 1:
        raise ValueError(f"a game has one agent at one location, this one has {len(starts)} such facts")
    marks = dict.fromkeys(("openable", "opened"), receptacles) | dict.fromkeys(_OBJECT_PREDICATES, objects)
    return {
        "task": problem.task,
        "objects": [names[entity] for entity in objects],
        "receptacles": [names[entity] for entity in receptacles],
        "marked": {p: sorted(own[entity] for (entity,) in facts[p]) for p, own in marks.items()},
        "knives": sorted(number for kind in _KNIFE_TYPES for number in objects_by_type[kind]),
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
        "goal": grounded_goal(problem, {"objects": objects, "receptacles": receptacles, "locations": locations}),
        "goal_needs_location": mentions(problem.goal, "atlocation"),
    }


def display_names(identifiers: Sequence[str]) -> dict[str, str]:
    """The displayed name of each identifier. Instances are numbered downwards: of two mugs the first is "mug 2"."""
    stems = {
        entity: entity.split("_bar_", 1)[0] + ("basin" if "basin" in entity else "")
        for entity in sorted(identifiers)
        if "_bar_" in entity
    }
    left = Counter(stems.values())
    # Identifiers without _bar_ (agents, types) keep their name, followed by a space.
    names = {entity: f"{entity} " for entity in identifiers if entity not in stems}
    for entity, stem in stems.items():
        names[entity] = f"{stem} {left[stem]}"
        left[stem] -= 1
    return names


def _grouped(size: int, pairs: Iterable[tuple[int, int]]) -> Groups:
    groups: Groups = [[] for _ in range(size)]
    for group, member in pairs:
        groups[group].append(member)
    return [sorted(group) for group in groups]


def _frozen(groups: Groups) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(group) for group in groups])
