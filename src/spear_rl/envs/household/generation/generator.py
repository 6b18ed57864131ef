"""Makes games from a seed: a furnished room, things lying about, and an errand that can be run but is not done yet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from spear_rl.envs.household.generation.rooms import OPENABLE, ROOMS, THINGS, TREATMENTS, Room
from spear_rl.envs.household.generation.sentences import FAMILIES, SENTENCES, TREATMENT, Errand
from spear_rl.envs.household.generation.statement import stated_problem
from spear_rl.envs.household.rules.problem import Problem
from spear_rl.envs.shared.dice import Dice

LAMP = "desklamp"
NARROW = ("cabinet", "drawer")


@dataclass(frozen=True, slots=True)
class Level:
    """How hard the games of one level are."""

    receptacles: tuple[int, int]
    """How many receptacles a room has, at least and at most."""
    objects: tuple[int, int]
    """How many objects, at least and at most."""
    max_openable: int
    """How many receptacles have to be opened before one sees what is in them."""
    max_of_kind: int
    """How many objects of one kind there may be."""
    families: tuple[str, ...] = FAMILIES
    rooms: tuple[str, ...] = tuple(ROOMS)
    shares_locations: bool = False
    """Whether neighbouring cabinets and drawers are reached from one place, as in most of ALFWorld's rooms."""


LEVELS: dict[str, Level] = {
    "starter": Level((3, 3), (2, 3), max_openable=0, max_of_kind=1, families=FAMILIES[:1], rooms=("bathroom",)),
    "tiny": Level((3, 4), (3, 5), max_openable=0, max_of_kind=1, families=FAMILIES[:1]),
    "easy": Level((4, 6), (4, 7), max_openable=2, max_of_kind=2),
    "medium": Level((7, 12), (8, 14), max_openable=5, max_of_kind=3),
    "hard": Level((15, 30), (18, 36), max_openable=18, max_of_kind=3, shares_locations=True),
}


def generated_problem(level_name: str, seed: int) -> Problem:
    """The game of a seed. Consecutive seeds take turns in the level's kinds of task."""
    level = LEVELS[level_name]
    dice = Dice("household", level_name, seed)
    family = level.families[seed % len(level.families)]
    while True:
        room = ROOMS[dice.choice([name for name in _suitable_rooms(family) if name in level.rooms])]
        errand = _drawn_errand(dice, family, room, level)
        furniture = errand and _drawn_furniture(dice, room, errand, level)
        if errand and furniture:
            things = _drawn_things(dice, room, errand, level, furniture)
            joined = _drawn_neighbours(dice, level, furniture)
            task = dice.choice(SENTENCES[family]).format(thing=errand.thing, place=errand.place)
            return stated_problem(errand, task, furniture, things, joined)


def _suitable_rooms(family: str) -> tuple[str, ...]:
    if family == "look_at_obj_in_light":
        return ("bedroom", "livingroom")
    if family not in TREATMENT:
        return tuple(ROOMS)
    return tuple(name for name, room in ROOMS.items() if TREATMENTS[TREATMENT[family]].appliance in room.furniture)


def _drawn_errand(dice: Dice, family: str, room: Room, level: Level) -> Errand | None:
    trait = TREATMENTS[TREATMENT[family]].trait if family in TREATMENT else "pickupable"
    thing = dice.choice([kind for kind in room.things if trait in THINGS[kind].traits])
    if family == "look_at_obj_in_light":
        return Errand(family, thing, LAMP)
    places = [
        place
        for place in THINGS[thing].places
        if place in room.furniture and (level.max_openable or place not in OPENABLE)
    ]
    return Errand(family, thing, dice.choice(places)) if places else None


def _drawn_furniture(dice: Dice, room: Room, errand: Errand, level: Level) -> list[str] | None:
    """The types of the room's receptacles, sorted; None where the thing would have no place to start from."""
    low, high = level.receptacles
    furniture = [errand.place]
    if errand.place == LAMP:
        furniture = [dice.choice([stand for stand in THINGS[LAMP].places if stand in room.furniture])]
    elif errand.family in TREATMENT:
        appliance = TREATMENTS[TREATMENT[errand.family]].appliance
        furniture = sorted({appliance, errand.place})
    # No type may fill more than half of the room, or a small one would be nothing but cabinets.
    pile = [kind for kind, most in room.furniture.items() for _ in range(min(most, high // 2))]
    for kind in furniture:
        pile.remove(kind)
    num_openable = sum(kind in OPENABLE for kind in furniture)
    wanted = dice.between(low, high)
    for kind in dice.shuffled(pile):
        if len(furniture) >= wanted:
            break
        if kind in OPENABLE:
            if num_openable >= level.max_openable:
                continue
            num_openable += 1
        furniture.append(kind)
    startable = any(kind in THINGS[errand.thing].places and kind != errand.place for kind in furniture)
    return sorted(furniture) if startable and len(furniture) >= low and num_openable <= level.max_openable else None


def _drawn_things(dice: Dice, room: Room, errand: Errand, level: Level, furniture: list[str]) -> list[tuple[str, int]]:
    """(kind, which receptacle) of every object."""
    total = dice.between(*level.objects)
    num_targets = dice.between(2 if errand.family == "pick_two_obj_and_place" else 1, level.max_of_kind)
    # What still has to be cleaned, heated or cooled may lie where it has to end up; all else would be done already.
    avoided = "" if errand.family in TREATMENT and dice.chance(0.2) else errand.place
    things = [(errand.thing, _drawn_place(dice, errand.thing, furniture, avoided)) for _ in range(num_targets)]
    if errand.place == LAMP:
        things.append((LAMP, _drawn_place(dice, LAMP, furniture)))
    placeable = [
        kind
        for kind in room.things
        if kind not in (errand.thing, errand.place) and any(place in furniture for place in THINGS[kind].places)
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
    """A receptacle for an object, a likely one more often than an unlikely one."""
    ranks = {place: rank for rank, place in enumerate(THINGS[kind].places)}
    options = [number for number, place in enumerate(furniture) if place in ranks and place != avoided]
    return dice.weighted(options, [1 / (1 + ranks[furniture[number]]) for number in options])


def _drawn_neighbours(dice: Dice, level: Level, furniture: list[str]) -> frozenset[int]:
    """The receptacles that are reached from the same place as the one before them."""
    if not level.shares_locations:
        return frozenset()
    pairs = enumerate(pairwise(furniture), start=1)
    return frozenset(n for n, (last, kind) in pairs if last == kind and kind in NARROW and dice.chance(0.35))
