"""States a drawn room and errand as a problem, in the form ALFWorld's own games have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

from spear_rl.envs.household.generation.rooms import OPENABLE, THINGS, TREATMENTS
from spear_rl.envs.household.generation.sentences import TREATMENT, Errand
from spear_rl.envs.household.rules.pddl import read_formula
from spear_rl.envs.household.rules.problem import Fact, Formula, Problem

_DELIVERED = """
(exists (?r - receptacle) (exists (?o - object) (and
    (objecttype ?o {thing}type) (receptacletype ?r {place}type) (inreceptacle ?o ?r) {more})))"""
_TREATED = "({trait} ?o) ({gains} ?o)"
_ANOTHER = "(exists (?o2 - object) (and (not (= ?o ?o2)) (objecttype ?o2 {thing}type) (inreceptacle ?o2 ?r)))"
_LIT = """
(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and
        (objecttype ?ot {place}type) (toggleable ?ot) (istoggled ?ot)
        (receptacleatlocation ?r ?l) (atlocation ?a ?l) (inreceptacle ?ot ?r)))
    (exists (?o - object ?a - agent) (and (objecttype ?o {thing}type) (holds ?a ?o))))"""

# ALFWorld's rules name these types, so a game must declare them even where the room has none.
_NAMED_IN_RULES = {"rtype": {"fridge", "microwave", "sinkbasin"}, "otype": {"butterknife", "knife"}}


@lru_cache(maxsize=4096)
def errand_goal(errand: Errand) -> Formula:
    """What has to be true in the end."""
    family, thing, place = errand
    if family == "look_at_obj_in_light":
        return read_formula(_LIT.format(thing=thing, place=place))
    more = _ANOTHER.format(thing=thing) if family == "pick_two_obj_and_place" else ""
    if family in TREATMENT:
        treatment = TREATMENTS[TREATMENT[family]]
        more = _TREATED.format(trait=treatment.trait, gains=treatment.gains)
    return read_formula(_DELIVERED.format(thing=thing, place=place, more=more))


def stated_problem(
    errand: Errand,
    task: str,
    furniture: Sequence[str],
    things: Sequence[tuple[str, int]],
    joined: Collection[int],
) -> Problem:
    """The game in which `furniture`, sorted types, holds `things`, each a kind and the number of its receptacle.

    A receptacle whose number is in `joined` stands at the same location as the one before it.
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
    # Numbering objects by where they lie makes two games that differ only in the order of the draws the same game.
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
    entities |= {f"{place}type": "rtype" for place in sorted(places | _NAMED_IN_RULES["rtype"])}
    entities |= {f"{kind}type": "otype" for kind in sorted(kinds | _NAMED_IN_RULES["otype"])}
    return Problem(entities=entities, facts=tuple(facts), goal=errand_goal(errand), task=task)


def _receptacle_id(kind: str, number: int) -> str:
    # ALFWorld shows `sink_bar_..._bar_sinkbasin` as "sinkbasin".
    if kind.endswith("basin"):
        return f"{kind.removesuffix('basin')}_bar_{number:02d}_bar_{kind}"
    return f"{kind}_bar_{number:02d}"
