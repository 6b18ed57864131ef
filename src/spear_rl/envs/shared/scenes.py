"""What an environment's state looks like to a person, as plain values; pages decide how to draw them.

An environment's scenes are made of what was recorded of an episode, whose text is untrusted: nothing is run, and text
that is not understood gives no scene.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_TEXT = 20_000
"""Characters of an observation or an answer that are read."""


class Seen(NamedTuple):
    """A turn as it was recorded; the last of an episode is the state after its last turn, with an observation alone."""

    observation: str = ""
    state_key: str = ""
    text: str = ""
    """What the policy said."""
    action: str = ""
    """What the environment understood."""


class Board(NamedTuple):
    """A grid of cells: wall, floor, target, box, home (a box on a target), player, player_home."""

    rows: tuple[tuple[str, ...], ...]
    kind: str = "board"


class Place(NamedTuple):
    name: str
    things: tuple[str, ...] = ()
    state: str = ""
    """open, closed, or not seen yet."""
    is_here: bool = False


class Plan(NamedTuple):
    """Rooms: what is where as far as it was seen, and what is carried."""

    places: tuple[Place, ...]
    carried: str = ""
    kind: str = "plan"


class WebPage(NamedTuple):
    """A web page as elements: (text, role), where a role is button, option, chosen, product, or nothing."""

    elements: tuple[tuple[str, str], ...]
    kind: str = "page"


class Script(NamedTuple):
    """Code that was run, with what each piece printed."""

    cells: tuple[tuple[str, str], ...]
    kind: str = "script"


Scene = Board | Plan | WebPage | Script
ScenesFn = Callable[[Sequence[Seen]], list[Scene | None]]
"""The turns of an episode and its end in, a scene for each out."""
