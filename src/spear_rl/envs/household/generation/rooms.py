"""Rooms, receptacles and objects by ALFWorld's type names, and which object is found where."""

from __future__ import annotations

from dataclasses import dataclass

OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})


@dataclass(frozen=True, slots=True)
class Thing:
    """A type of object: the receptacles it may be in, the likeliest first, and its PDDL predicates."""

    places: tuple[str, ...]
    traits: tuple[str, ...] = ("pickupable",)


@dataclass(frozen=True, slots=True)
class Room:
    """A type of room: the most receptacles of each type it may have, and the types of objects found there."""

    furniture: dict[str, int]
    things: tuple[str, ...]


def _thing(places: str, traits: str = "") -> Thing:
    return Thing(tuple(places.split()), ("pickupable", *traits.split()))


def _room(things: str, **furniture: int) -> Room:
    return Room(furniture, tuple(things.split()))


_FOOD = "cleanable heatable coolable sliceable"
_CUP = "cleanable heatable coolable isreceptacleobject"
_DISH = "cleanable coolable isreceptacleobject"
_TOOL = "countertop drawer diningtable sinkbasin sidetable"
_PAPERS = "desk drawer shelf sidetable dresser diningtable countertop coffeetable garbagecan"

THINGS: dict[str, Thing] = {
    "alarmclock": _thing("desk sidetable shelf dresser diningtable"),
    "apple": _thing("countertop fridge diningtable microwave garbagecan sinkbasin sidetable", _FOOD),
    "book": _thing("bed desk drawer sofa coffeetable armchair dresser sidetable shelf diningtable"),
    "bowl": _thing("cabinet countertop fridge diningtable shelf sinkbasin microwave coffeetable desk", _DISH),
    "box": _thing("coffeetable sofa diningtable armchair sidetable shelf desk dresser", "isreceptacleobject"),
    "bread": _thing("countertop diningtable fridge microwave garbagecan sidetable", "heatable coolable sliceable"),
    "butterknife": _thing(_TOOL, "cleanable"),
    "candle": _thing("countertop toilet cabinet shelf drawer sidetable coffeetable cart dresser"),
    "cd": _thing("drawer desk dresser sidetable shelf safe garbagecan"),
    "cellphone": _thing("bed desk drawer sidetable dresser sofa coffeetable armchair shelf safe"),
    "cloth": _thing("bathtubbasin cabinet drawer countertop sinkbasin shelf cart laundryhamper toilet", "cleanable"),
    "creditcard": _thing("drawer sidetable desk dresser shelf sofa armchair coffeetable safe countertop"),
    "cup": _thing("countertop cabinet fridge diningtable sinkbasin microwave shelf sidetable", _CUP),
    "desklamp": Thing(("desk", "sidetable", "dresser", "shelf", "coffeetable"), ("toggleable",)),
    "dishsponge": _thing("sinkbasin countertop drawer cabinet diningtable shelf garbagecan", "cleanable"),
    "egg": _thing("fridge countertop sinkbasin microwave diningtable garbagecan sidetable", _FOOD),
    "fork": _thing(_TOOL, "cleanable"),
    "glassbottle": _thing("cabinet countertop fridge diningtable sinkbasin shelf garbagecan"),
    "handtowel": _thing("handtowelholder countertop cabinet drawer"),
    "houseplant": Thing(("countertop", "shelf", "sidetable", "coffeetable", "diningtable"), ()),
    "kettle": _thing("stoveburner countertop cabinet diningtable sinkbasin shelf", "cleanable"),
    "keychain": _thing("drawer sidetable desk shelf dresser coffeetable sofa armchair safe diningtable"),
    "knife": _thing(_TOOL, "cleanable"),
    "ladle": _thing("countertop cabinet drawer diningtable sinkbasin", "cleanable"),
    "laptop": _thing("desk bed sofa coffeetable diningtable dresser armchair sidetable"),
    "lettuce": _thing("fridge countertop diningtable sinkbasin garbagecan sidetable", "cleanable coolable sliceable"),
    "mug": _thing("countertop coffeemachine cabinet fridge desk microwave sinkbasin diningtable shelf sidetable", _CUP),
    "newspaper": _thing("sofa coffeetable armchair sidetable shelf diningtable drawer garbagecan"),
    "pan": _thing("stoveburner countertop cabinet fridge diningtable sinkbasin", _DISH),
    "pen": _thing(_PAPERS),
    "pencil": _thing(_PAPERS),
    "peppershaker": _thing("cabinet countertop diningtable drawer shelf sidetable"),
    "pillow": _thing("bed sofa armchair"),
    "plate": _thing("cabinet countertop diningtable fridge sinkbasin microwave shelf coffeetable", _CUP),
    "pot": _thing("stoveburner countertop cabinet fridge diningtable sinkbasin shelf", _DISH),
    "potato": _thing("countertop fridge diningtable microwave sinkbasin garbagecan sidetable", _FOOD),
    "remotecontrol": _thing("coffeetable sofa tvstand sidetable drawer armchair dresser"),
    "saltshaker": _thing("cabinet countertop diningtable drawer shelf sidetable"),
    "soapbar": _thing("sinkbasin countertop toilet bathtubbasin cabinet drawer garbagecan cart", "cleanable"),
    "soapbottle": _thing("countertop cabinet toilet garbagecan shelf drawer sidetable cart"),
    "spatula": _thing(_TOOL, "cleanable"),
    "spoon": _thing(_TOOL, "cleanable"),
    "spraybottle": _thing("countertop toilet cabinet garbagecan shelf cart drawer"),
    "statue": _thing("shelf coffeetable sidetable diningtable dresser tvstand desk safe"),
    "television": Thing(("tvstand", "dresser"), ()),
    "tissuebox": _thing("coffeetable drawer shelf sidetable desk countertop cart garbagecan toilet"),
    "toiletpaper": _thing("toiletpaperhanger toilet countertop cabinet drawer shelf garbagecan cart"),
    "tomato": _thing("fridge countertop diningtable microwave sinkbasin garbagecan sidetable", _FOOD),
    "towel": _thing("towelholder countertop"),
    "vase": _thing("shelf coffeetable sidetable diningtable cabinet countertop dresser desk safe"),
    "watch": _thing("drawer coffeetable sidetable dresser shelf tvstand diningtable desk"),
    "winebottle": _thing("cabinet countertop diningtable fridge shelf garbagecan", "coolable"),
}

ROOMS: dict[str, Room] = {
    "kitchen": _room(
        "apple bowl bread butterknife cup dishsponge egg fork glassbottle houseplant kettle knife ladle lettuce mug "
        "pan peppershaker plate pot potato saltshaker soapbottle spatula spoon tomato winebottle",
        cabinet=12, coffeemachine=1, countertop=3, diningtable=1, drawer=6, fridge=1, garbagecan=1, microwave=1,
        shelf=2, sidetable=1, sinkbasin=1, stoveburner=4, toaster=1,
    ),
    "bedroom": _room(
        "alarmclock book bowl cd cellphone cloth creditcard desklamp keychain laptop mug pen pencil pillow statue "
        "tissuebox vase",
        armchair=1, bed=1, cabinet=2, desk=2, drawer=9, dresser=1, garbagecan=1, laundryhamper=1, safe=1, shelf=5,
        sidetable=2,
    ),
    "livingroom": _room(
        "book box cellphone creditcard desklamp houseplant keychain laptop newspaper pillow plate remotecontrol statue "
        "television tissuebox vase watch",
        armchair=2, cabinet=3, coffeetable=2, diningtable=1, drawer=7, dresser=1, garbagecan=1, safe=1, shelf=4,
        sidetable=3, sofa=2, tvstand=1,
    ),
    "bathroom": _room(
        "candle cloth dishsponge handtowel soapbar soapbottle spraybottle tissuebox toiletpaper towel",
        bathtubbasin=1, cabinet=4, cart=1, countertop=2, drawer=5, garbagecan=1, handtowelholder=2, shelf=2,
        sinkbasin=2, toilet=1, toiletpaperhanger=1, towelholder=1,
    ),
}  # fmt: skip
