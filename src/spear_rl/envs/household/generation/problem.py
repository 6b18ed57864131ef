"""Writes a generated room and task as a PDDL problem, in the form of ALFWorld's own games."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

from spear_rl.envs.household.families import TaskSpec
from spear_rl.envs.household.generation.rooms import OPENABLE, THINGS
from spear_rl.envs.household.rules.pddl import Fact, Formula, Problem, read_formula

_PLACED = """
(exists (?r - receptacle) (exists (?o - object) (and
    (objecttype ?o {thing}type) (receptacletype ?r {place}type) (inreceptacle ?o ?r) {more})))"""
_TREATED = "({trait} ?o) ({gains} ?o)"
_SECOND = "(exists (?o2 - object) (and (not (= ?o ?o2)) (objecttype ?o2 {thing}type) (inreceptacle ?o2 ?r)))"
_IN_LIGHT = """
(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and
        (objecttype ?ot {place}type) (toggleable ?ot) (istoggled ?ot)
        (receptacleatlocation ?r ?l) (atlocation ?a ?l) (inreceptacle ?ot ?r)))
    (exists (?o - object ?a - agent) (and (objecttype ?o {thing}type) (holds ?a ?o))))"""

# ALFWorld's rules name these types, so a game must declare them even where the room has none.
_RULE_RECEPTACLES = {"fridge", "microwave", "sinkbasin"}
_RULE_OBJECTS = {"butterknife", "knife"}


@lru_cache(maxsize=4096)
def goal_formula(task: TaskSpec) -> Formula:
    family, thing, place = task
    if family == "look_at_obj_in_light":
        return read_formula(_IN_LIGHT.format(thing=thing, place=place))
    more = _SECOND.format(thing=thing) if family == "pick_two_obj_and_place" else ""
    if task.treatment:
        more = _TREATED.format(trait=task.treatment.trait, gains=task.treatment.gains)
    return read_formula(_PLACED.format(thing=thing, place=place, more=more))


def room_problem(
    task: TaskSpec,
    sentence: str,
    furniture: Sequence[str],
    things: Sequence[tuple[str, int]],
    joined: Collection[int],
) -> Problem:
    """The game in which `furniture`, sorted types, holds `things`, each a type and the number of its receptacle.

    A receptacle whose number is in `joined` is at the same location as the one before it.
    """
    counts: Counter[str] = Counter()
    entities = {"agent1": "agent", "loc_bar_00": "location"}
    facts: list[Fact] = [("atlocation", "agent1", "loc_bar_00")]
    receptacles: list[str] = []
    locations: list[str] = []
    for number, kind in enumerate(furniture):
        counts[kind] += 1
        entity = _receptacle_id(kind, counts[kind])
        location = locations[-1] if number in joined else f"loc_bar_{number + 1:02d}"
        entities |= {entity: "receptacle", location: "location"}
        facts += [("receptacletype", entity, f"{kind}type"), ("receptacleatlocation", entity, location)]
        if kind in OPENABLE:
            facts.append(("openable", entity))
        receptacles.append(entity)
        locations.append(location)
    # Objects are numbered by their receptacle, so games that differ only in the order of the draws are the same game.
    for kind, number in sorted(things):
        counts[kind] += 1
        entity = f"{kind}_bar_{counts[kind]:02d}"
        entities[entity] = "object"
        facts += [("objecttype", entity, f"{kind}type"), ("inreceptacle", entity, receptacles[number])]
        facts.append(("objectatlocation", entity, locations[number]))
        facts += [(trait, entity) for trait in THINGS[kind].traits]
    kinds, places = {kind for kind, _ in things}, set(furniture)
    for kind in sorted(kinds):
        facts += [("cancontain", f"{place}type", f"{kind}type") for place in THINGS[kind].places if place in places]
    entities |= {f"{place}type": "rtype" for place in sorted(places | _RULE_RECEPTACLES)}
    entities |= {f"{kind}type": "otype" for kind in sorted(kinds | _RULE_OBJECTS)}
    return Problem(entities=entities, facts=tuple(facts), goal=goal_formula(task), task=sentence)


def _receptacle_id(kind: str, number: int) -> str:
    # ALFWorld displays `sink_bar_..._bar_sinkbasin` as "sinkbasin".
    if kind.endswith("basin"):
        return f"{kind.removesuffix('basin')}_bar_{number:02d}_bar_{kind}"
    return f"{kind}_bar_{number:02d}"
