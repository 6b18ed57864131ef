"""The tables of one game that no move ever changes, indexed by number so that all its episodes can share them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from spear_rl.envs.household.goal import Numbers, Test, compiled_goal, mentioned_predicates
from spear_rl.envs.household.problem import Problem
from spear_rl.envs.household.rooms import TREATMENTS

KNIFE_TYPES = frozenset({"knifetype", "butterknifetype"})
FLAGS = ("isclean", "ishot", "iscool", "issliced", "istoggled", "ison")

Arguments = tuple[str, ...]


class Game:
    """Objects, receptacles and locations are numbers in the order of their identifiers: the order of every list."""

    __slots__ = (
        "accepts",
        "appliances",
        "goal",
        "goal_needs_location",
        "gotos",
        "is_container",
        "knives",
        "location_of",
        "nested",
        "object_names",
        "object_numbers",
        "openable",
        "pickupable",
        "receptacle_names",
        "receptacle_numbers",
        "receptacles_at",
        "sliceable",
        "start",
        "start_contents",
        "start_flags",
        "start_held",
        "start_lying",
        "start_opened",
        "task",
        "toggleable",
        "treatable",
    )

    def __init__(self, problem: Problem) -> None:
        facts: defaultdict[str, list[Arguments]] = defaultdict(list)
        for fact in problem.facts:
            facts[fact[0]].append(fact[1:])
        kinds = problem.entities
        known = sorted({argument for fact in problem.facts for argument in fact[1:]})
        names = display_names(known)
        objects = [entity for entity in known if kinds[entity] == "object"]
        receptacles = [entity for entity in known if kinds[entity] == "receptacle"]
        locations = [entity for entity in known if kinds[entity] == "location"]
        object_of = {entity: number for number, entity in enumerate(objects)}
        receptacle_of = {entity: number for number, entity in enumerate(receptacles)}
        location_of = {entity: number for number, entity in enumerate(locations)}

        self.task = problem.task
        self.object_names = tuple(names[entity] for entity in objects)
        self.receptacle_names = tuple(names[entity] for entity in receptacles)
        self.object_numbers = {names[entity]: number for entity, number in object_of.items()}
        self.receptacle_numbers = {names[entity]: number for entity, number in receptacle_of.items()}

        def marked(predicate: str, numbers: dict[str, int]) -> frozenset[int]:
            return frozenset(numbers[entity] for (entity,) in facts[predicate])

        self.openable = marked("openable", receptacle_of)
        self.pickupable = marked("pickupable", object_of)
        self.sliceable = marked("sliceable", object_of)
        self.toggleable = marked("toggleable", object_of)
        self.is_container = marked("isreceptacleobject", object_of)
        self.treatable = {verb: marked(treatment.trait, object_of) for verb, treatment in TREATMENTS.items()}
        self.nested = _grouped(len(objects), ((object_of[b], object_of[a]) for a, b in facts["inreceptacleobject"]))

        objects_by_type: defaultdict[str, list[int]] = defaultdict(list)
        for entity, kind in facts["objecttype"]:
            objects_by_type[kind].append(object_of[entity])
        accepted_by_type: defaultdict[str, set[int]] = defaultdict(set)
        for receptacle_type, object_type in facts["cancontain"]:
            accepted_by_type[receptacle_type].update(objects_by_type[object_type])
        shared = {kind: frozenset(accepted) for kind, accepted in accepted_by_type.items()}
        accepts: list[frozenset[int]] = [frozenset()] * len(receptacles)
        for entity, kind in facts["receptacletype"]:
            number = receptacle_of[entity]
            here = shared.get(kind, frozenset())
            accepts[number] = accepts[number] | here if accepts[number] else here
        self.accepts = tuple(accepts)
        self.knives = frozenset(number for kind in KNIFE_TYPES for number in objects_by_type[kind])
        receptacles_by_type: defaultdict[str, set[int]] = defaultdict(set)
        for entity, kind in facts["receptacletype"]:
            receptacles_by_type[kind].add(receptacle_of[entity])
        self.appliances = {
            verb: frozenset(receptacles_by_type[f"{treatment.appliance}type"]) for verb, treatment in TREATMENTS.items()
        }

        standing = [(location_of[place], receptacle_of[entity]) for entity, place in facts["receptacleatlocation"]]
        self.location_of = {receptacle: place for place, receptacle in standing}
        if len(self.location_of) != len(standing):
            raise ValueError("a receptacle stands at more than one location")
        self.receptacles_at = _grouped(len(locations), standing)
        gotos = sorted((f"go to {names[entity]}", receptacle_of[entity]) for entity in receptacles)
        self.gotos = tuple(
            tuple(command for command, receptacle in gotos if self.location_of.get(receptacle, place) != place)
            for place in range(len(locations))
        )

        starts = facts["atlocation"]
        if len(starts) != 1:
            raise ValueError(f"a game has one agent at one location, this one has {len(starts)} such facts")
        self.start = location_of[starts[0][1]]
        self.start_held = next((object_of[entity] for _, entity in facts["holds"]), -1)
        self.start_contents = _grouped(
            len(receptacles), ((receptacle_of[inside], object_of[entity]) for entity, inside in facts["inreceptacle"])
        )
        self.start_lying = _grouped(
            len(locations), ((location_of[place], object_of[entity]) for entity, place in facts["objectatlocation"])
        )
        self.start_opened = marked("opened", receptacle_of)
        self.start_flags = {flag: marked(flag, object_of) for flag in FLAGS}

        self.goal: Test = compiled_goal(problem, Numbers(object_of, receptacle_of, location_of))
        self.goal_needs_location = "atlocation" in mentioned_predicates(problem.goal)


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


def _grouped(size: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = [[] for _ in range(size)]
    for group, member in pairs:
        groups[group].append(member)
    return tuple(tuple(sorted(group)) for group in groups)
