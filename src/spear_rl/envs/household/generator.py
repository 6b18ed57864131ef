"""Generates games from seeds: a furnished room, objects in it, and a task that can be solved and is not solved yet."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from spear_rl.envs.household.families import FAMILIES, SENTENCES, TREATMENT_OF, TaskSpec, goal_formula
from spear_rl.envs.household.rooms import OPENABLE, ROOMS, THINGS, Room
from spear_rl.envs.household.rules.pddl import Fact, Problem
from spear_rl.envs.shared.dice import Dice

LAMP = "desklamp"
# ALFWorld's rules name these types, so a game must declare them even where the room has none.
_RULE_RECEPTACLES = {"fridge", "microwave", "sinkbasin"}
_RULE_OBJECTS = {"butterknife", "knife"}


@dataclass(frozen=True, slots=True)
class Level:
    """How hard the games of one level are; pairs are (at least, at most)."""

    receptacles: tuple[int, int]
    objects: tuple[int, int]
    max_openable: int
    """Receptacles that hide their contents until they are opened."""
    max_of_kind: int
    families: tuple[str, ...] = FAMILIES
    rooms: tuple[str, ...] = tuple(ROOMS)
    shares_locations: bool = False
    """Whether neighbouring cabinets and drawers may be at one location, as in most of ALFWorld's rooms."""


LEVELS: dict[str, Level] = {
    "starter": Level((3, 3), (2, 3), max_openable=0, max_of_kind=1, families=FAMILIES[:1], rooms=("bathroom",)),
    "tiny": Level((3, 4), (3, 5), max_openable=0, max_of_kind=1, families=FAMILIES[:1]),
    "easy": Level((4, 6), (4, 7), max_openable=2, max_of_kind=2),
    "medium": Level((7, 12), (8, 14), max_openable=5, max_of_kind=3),
    "hard": Level((15, 30), (18, 36), max_openable=18, max_of_kind=3, shares_locations=True),
}


def generated_problem(level_name: str, seed: int) -> Problem:
    """The game of a seed. Consecutive seeds alternate between the families of the level."""
    level = LEVELS[level_name]
    dice = Dice("household", level_name, seed)
    family = level.families[seed % len(level.families)]
    while True:
        room = ROOMS[dice.choice([name for name in level.rooms if _is_suitable(ROOMS[name], family)])]
        task = _drawn_task(dice, family, room, level)
        furniture = task and _drawn_furniture(dice, room, task, level)
        if task and furniture:
            things = _drawn_things(dice, room, task, level, furniture)
            joined = _drawn_neighbours(dice, level, furniture)
            sentence = dice.choice(SENTENCES[family]).format(thing=task.thing, place=task.place)
            entities, facts = _stated(furniture, things, joined)
            return Problem(entities, facts, goal_formula(task), sentence)


def _is_suitable(room: Room, family: str) -> bool:
    if family == "look_at_obj_in_light":
        return LAMP in room.things
    treatment = TREATMENT_OF.get(family)
    return treatment is None or treatment.appliance in room.furniture


def _drawn_task(dice: Dice, family: str, room: Room, level: Level) -> TaskSpec | None:
    treatment = TREATMENT_OF.get(family)
    trait = treatment.trait if treatment else "pickupable"
    thing = dice.choice([kind for kind in room.things if trait in THINGS[kind].traits])
    if family == "look_at_obj_in_light":
        return TaskSpec(family, thing, LAMP)
    allowed = set(room.furniture) if level.max_openable else set(room.furniture) - OPENABLE
    places = [place for place in THINGS[thing].places if place in allowed]
    return TaskSpec(family, thing, dice.choice(places)) if places else None


def _drawn_furniture(dice: Dice, room: Room, task: TaskSpec, level: Level) -> list[str] | None:
    """The types of the room's receptacles, sorted; None if no receptacle could hold the object at the start."""
    low, high = level.receptacles
    furniture = [task.place]
    if task.place == LAMP:
        furniture = [dice.choice([stand for stand in THINGS[LAMP].places if stand in room.furniture])]
    elif task.treatment:
        furniture = sorted({task.treatment.appliance, task.place})
    # At most half of the receptacles are of one type, or a small room would hold nothing but cabinets.
    pool = [kind for kind, most in room.furniture.items() for _ in range(min(most, high // 2))]
    for kind in furniture:
        pool.remove(kind)
    num_openable = sum(kind in OPENABLE for kind in furniture)
    wanted = dice.between(low, high)
    for kind in dice.shuffled(pool):
        if len(furniture) >= wanted:
            break
        if kind in OPENABLE:
            if num_openable >= level.max_openable:
                continue
            num_openable += 1
        furniture.append(kind)
    startable = any(kind in THINGS[task.thing].places and kind != task.place for kind in furniture)
    return sorted(furniture) if startable and len(furniture) >= low and num_openable <= level.max_openable else None


def _drawn_things(dice: Dice, room: Room, task: TaskSpec, level: Level, furniture: list[str]) -> list[tuple[str, int]]:
    """(type, number of its receptacle) of every object."""
    total = dice.between(*level.objects)
    num_targets = dice.between(2 if task.family == "pick_two_obj_and_place" else 1, level.max_of_kind)
    # An object to be cleaned, heated or cooled may start at its destination; any other task would be solved already.
    avoided = "" if task.treatment and dice.chance(0.2) else task.place
    things = [(task.thing, _drawn_place(dice, task.thing, furniture, avoided)) for _ in range(num_targets)]
    if task.place == LAMP:
        things.append((LAMP, _drawn_place(dice, LAMP, furniture)))
    placeable = [
        kind
        for kind in room.things
        if kind not in (task.thing, task.place) and any(place in furniture for place in THINGS[kind].places)
    ]
    left = Counter(dict.fromkeys(placeable, level.max_of_kind))
    while placeable and len(things) < total:
        kind = dice.choice(placeable)
        things.append((kind, _drawn_place(dice, kind, furniture)))
        left[kind] -= 1
        if not left[kind]:
            placeable.remove(kind)
    return things


def _drawn_place(dice: Dice, kind: str, furniture: list[str], avoided: str = "") -> int:
    """A receptacle for an object, drawn by how likely it is there."""
    ranks = {place: rank for rank, place in enumerate(THINGS[kind].places)}
    options = [number for number, place in enumerate(furniture) if place in ranks and place != avoided]
    return dice.weighted(options, [1 / (1 + ranks[furniture[number]]) for number in options])


def _drawn_neighbours(dice: Dice, level: Level, furniture: list[str]) -> frozenset[int]:
    """The receptacles that are at the same location as the one before them."""
    if not level.shares_locations:
        return frozenset()
    pairs = enumerate(pairwise(furniture), start=1)
    narrow = ("cabinet", "drawer")
    return frozenset(n for n, (last, kind) in pairs if last == kind and kind in narrow and dice.chance(0.35))


def _stated(
    furniture: list[str], things: list[tuple[str, int]], joined: frozenset[int]
) -> tuple[dict[str, str], tuple[Fact, ...]]:
    """The entities and facts of a room, in the form of ALFWorld's own games."""
    counts: Counter[str] = Counter()
    entities = {"agent1": "agent", "loc_bar_00": "location"}
    facts: list[Fact] = [("atlocation", "agent1", "loc_bar_00")]
    receptacles: list[tuple[str, str]] = []
    location = ""
    for number, kind in enumerate(furniture):
        counts[kind] += 1
        entity = f"{kind}_bar_{counts[kind]:02d}"
        if kind.endswith("basin"):
            # ALFWorld displays `sink_bar_..._bar_sinkbasin` as "sinkbasin".
            entity = f"{kind.removesuffix('basin')}_bar_{counts[kind]:02d}_bar_{kind}"
        location = location if number in joined else f"loc_bar_{number + 1:02d}"
        entities |= {entity: "receptacle", location: "location"}
        facts += [("receptacletype", entity, f"{kind}type"), ("receptacleatlocation", entity, location)]
        if kind in OPENABLE:
            facts.append(("openable", entity))
        receptacles.append((entity, location))
    # Objects are numbered by their receptacle, so games that differ only in the order of the draws are the same game.
    for kind, number in sorted(things):
        counts[kind] += 1
        entity = f"{kind}_bar_{counts[kind]:02d}"
        entities[entity] = "object"
        receptacle, location = receptacles[number]
        facts += [("objecttype", entity, f"{kind}type"), ("inreceptacle", entity, receptacle)]
        facts.append(("objectatlocation", entity, location))
        facts += [(trait, entity) for trait in THINGS[kind].traits]
    kinds, places = {kind for kind, _ in things}, set(furniture)
    for kind in sorted(kinds):
        facts += [("cancontain", f"{place}type", f"{kind}type") for place in THINGS[kind].places if place in places]
    entities |= {f"{place}type": "rtype" for place in sorted(places | _RULE_RECEPTACLES)}
    entities |= {f"{kind}type": "otype" for kind in sorted(kinds | _RULE_OBJECTS)}
    return entities, tuple(facts)
