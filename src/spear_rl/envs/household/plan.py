"""A game as a plan of its room, read from the game's texts: ALFWorld's own and those of the embedded simulator."""

import re
from collections.abc import Sequence

from spear_rl.envs.shared.scenes import MAX_TEXT, Place, Plan, Scene, Seen

UNSEEN = "not seen yet"
_MOST = 200
_ROOM = re.compile(r"Looking quickly around you, you see ([^.\n]*)\.")
_ARRIVED = re.compile(r"^You arrive at ([a-z]+ \d+)\.")
_SHOWN = re.compile(r"(?:On the|The) ([a-z]+ \d+)(?:, you see ([^.\n]*)| is (open)\. In it, you see ([^.\n]*))\.")
_SHUT = re.compile(r"(?:The ([a-z]+ \d+) is closed|^You close the ([a-z]+ \d+))\.")
_TAKEN = re.compile(r"^You pick up the ([a-z]+ \d+) from the ([a-z]+ \d+)\.")
_PUT = re.compile(r"^You (?:move|put) the ([a-z]+ \d+) (?:to|in/on) the ([a-z]+ \d+)\.")
_DONE = re.compile(r"^You (heat|cool|clean|slice|turn on)d? the ([a-z]+ \d+)(?: (?:using|with) |\.)")
_NOW = {"heat": "hot", "cool": "cold", "clean": "clean", "slice": "sliced", "turn on": "on"}
_NAME = re.compile(r"[a-z]+ \d+")


def plans(turns: Sequence[Seen]) -> list[Scene | None]:
    """What the agent has seen by each turn; none before a room is described."""
    room, found = _Known(), list[Scene | None]()
    for turn in turns:
        room.read(turn.observation[:MAX_TEXT])
        found.append(room.plan() if room.things else None)
    return found


class _Known:
    """What is known of a room."""

    def __init__(self) -> None:
        self.things: dict[str, list[str]] = {}
        self.state: dict[str, str] = {}
        self.marks: dict[str, list[str]] = {}
        self.here = self.carried = ""

    def read(self, text: str) -> None:
        if found := _ROOM.search(text):
            self.things = {name: [] for name in _NAME.findall(found[1])[:_MOST]}
            self.state = dict.fromkeys(self.things, UNSEEN)
        if found := _ARRIVED.search(text):
            self.here = found[1]
        if (found := _SHOWN.search(text)) and found[1] in self.things:
            self.things[found[1]] = _NAME.findall(found[2] or found[4] or "")[:_MOST]
            self.state[found[1]] = found[3] or ""
        if (found := _SHUT.search(text)) and (name := found[1] or found[2]) in self.things:
            self.state[name] = "closed"
        if found := _TAKEN.search(text):
            self.carried = found[1]
            self.things[found[2]] = [thing for thing in self.things.get(found[2], []) if thing != found[1]]
        if found := _PUT.search(text):
            self.carried = ""
            self.things[found[2]] = [*self.things.get(found[2], []), found[1]][-_MOST:]
        if found := _DONE.search(text):
            others = {"heat": "cold", "cool": "hot"}.get(found[1])
            self.marks[found[2]] = [mark for mark in self.marks.get(found[2], []) if mark != others] + [_NOW[found[1]]]

    def plan(self) -> Plan:
        places = [
            Place(name, tuple(map(self._marked, things)), self.state.get(name, ""), name == self.here)
            for name, things in self.things.items()
        ]
        return Plan(tuple(places), self._marked(self.carried))

    def _marked(self, thing: str) -> str:
        marks = dict.fromkeys(self.marks.get(thing, []))
        return f"{thing} ({', '.join(marks)})" if marks else thing
