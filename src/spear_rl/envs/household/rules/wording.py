"""The game's descriptions of a state, in ALFWorld's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spear_rl.envs.household.rules.world import World

NOTHING_HAPPENS = "Nothing happens."
HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


def intro(world: World) -> str:
    """The first observation: the room and the task."""
    game = world.game
    furniture = [f"a {game.receptacle_names[r]}" for r in sorted(game.location_of)]
    return f"{surroundings(world, furniture)}\n\nYour task is to: {game.task}"


def surroundings(world: World, furniture: Sequence[str] = ()) -> str:
    """The answer to `look`; away from all receptacles only the intro lists the furniture."""
    game = world.game
    here = game.receptacles_at[world.here]
    if not here:
        return f"You are in the middle of a room. Looking quickly around you, you see {listed(furniture)}."
    facing = listed([game.receptacle_names[r] for r in here])
    # An object is listed once for each receptacle here that it was taken from, even if it is in another one now.
    beside = [f"a {game.object_names[o]}" for o in world.lying[world.here] for r in here if (o, r) in world.taken]
    return f"You are facing the {facing}. Next to it, you see {listed(beside)}."


def carried(world: World) -> str:
    """The answer to `inventory`."""
    if world.held < 0:
        return "You are not carrying anything."
    return f"You are carrying: a {world.game.object_names[world.held]}."


def receptacle_state(world: World, receptacle: int) -> str:
    game = world.game
    name = game.receptacle_names[receptacle]
    is_openable = receptacle in game.openable
    if is_openable and receptacle not in world.opened:
        return f"The {name} is closed."
    seen = listed([f"a {game.object_names[o]}" for o in world.contents[receptacle]])
    return f"The {name} is open. In it, you see {seen}." if is_openable else f"On the {name}, you see {seen}."


def object_state(world: World, name: str) -> str:
    game, flags = world.game, world.flags
    o = game.object_numbers[name]
    if o in game.is_container:
        inside = listed([f"a {game.object_names[inner]}" for inner in game.nested[o]])
        return f"This is a normal {name}. In it, you see {inside}."
    clean, hot, cool, sliced = (o in flags[flag] for flag in ("isclean", "ishot", "iscool", "issliced"))
    sort = f"sliced {name}" if sliced else name
    if clean and (hot or cool):
        return f"This is a {'hot' if hot else 'cool'} and clean {sort}."
    if clean or hot:
        return f"This is a {'clean' if clean else 'hot'} {sort}."
    if cool:
        return f"This is a {'cool' if sliced else 'cold'} {sort}."
    if o in game.toggleable and o in flags["istoggled"]:
        return f"This {name} is on."
    if o in game.sliceable and sliced:
        return f"This is a {sort}."
    return f"There's nothing special about {name}."


def listed(names: Sequence[str]) -> str:
    """a, b, and c; or nothing."""
    if len(names) < 2:
        return names[0] if names else "nothing"
    return f"{', '.join(names[:-1])}, and {names[-1]}"
