"""Which receptacles and objects a room has, by ALFWorld's type names; read from rooms.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})


@dataclass(frozen=True, slots=True)
class Thing:
    """A type of object: the receptacles it may be in, the likeliest first, and its PDDL predicates."""

    places: tuple[str, ...]
    traits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """A type of room: the most receptacles of each type it may have, and the types of objects found there."""

    furniture: dict[str, int]
    things: tuple[str, ...]


_DATA = tomllib.loads(Path(__file__).with_name("rooms.toml").read_text(encoding="utf-8"))
THINGS = {
    kind: Thing(tuple(entry["places"].split()), tuple(entry["traits"].split()))
    for kind, entry in _DATA["things"].items()
}
ROOMS = {name: Room(entry["furniture"], tuple(entry["things"].split())) for name, entry in _DATA["rooms"].items()}
