"""The expert that has to look for things: it knows only what it has read and which commands it is offered."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spear_rl.envs.household.generation.rooms import THINGS, TREATMENTS
from spear_rl.envs.household.generation.sentences import TREATMENT, Errand, stated_errand
from spear_rl.envs.shared.dice import Dice

_TASK = re.compile(r"Your task is to: (.*)")
# Names are bounded: a name that runs on over what follows would be tried from every place in it.
_NAME = r"([\w ]{1,100})"
_CONTENTS = re.compile(rf"(?:On the {_NAME}|The {_NAME} is open\. In it), you see ")
_THING = re.compile(r"\ba (\w+ \d+)")
_PICKED_UP = re.compile(rf"You pick up the {_NAME} from the ")
_PUT_DOWN = re.compile(rf"You move the {_NAME} to the {_NAME}\.")
_TREATED = re.compile(r"You (?:clean|heat|cool) the ")


class Searcher:
    """Plays one game: give it each observation with its commands, it answers with the next command."""

    def __init__(self, seed: int) -> None:
        self._dice = Dice("search", seed)
        self._errand: Errand | None = None
        self._receptacles: list[str] = []
        self._sought = ""
        self._queue: list[str] = []
        """Where to look for what is sought, in this order."""
        self._inspected: set[str] = set()
        self._seen: dict[str, str] = {}
        """Where each object was last seen."""
        self._held = ""
        self._place = ""
        """The receptacle that the errand ends in, once it is chosen."""
        self._is_treated = False

    def next_command(self, observation: str, commands: Sequence[str]) -> str:
        if self._errand is None:
            self._errand = self._read_intro(observation, commands)
        self._learn(observation)
        return self._delivery(self._errand, commands) if self._held else self._fetching(self._errand, commands)

    def _read_intro(self, observation: str, commands: Sequence[str]) -> Errand:
        stated = _TASK.search(observation)
        if stated is None:
            raise ValueError("the first observation must state the task")
        errand = stated_errand(stated.group(1))
        walks = [command.removeprefix("go to ") for command in commands if command.startswith("go to ")]
        here = [command.removeprefix("examine ") for command in commands if command.startswith("examine ")]
        self._receptacles = walks + here
        return errand

    def _plausible_order(self, thing: str) -> list[str]:
        places = THINGS[thing].places if thing in THINGS else ()
        ranks = {place: rank for rank, place in enumerate(places)}

        def surprise(receptacle: str) -> float:
            return ranks.get(_kind(receptacle), len(ranks) + 4) + 4 * self._dice.below(1000) / 1000

        surprises = {receptacle: surprise(receptacle) for receptacle in self._receptacles}
        return sorted(self._receptacles, key=lambda receptacle: (surprises[receptacle], receptacle))

    def _learn(self, observation: str) -> None:
        last = observation.rstrip("\n").rpartition("\n")[2]
        contents = _CONTENTS.search(last) if last.endswith(".") else None
        if contents:
            receptacle = contents.group(1) or contents.group(2)
            self._inspected.add(receptacle)
            self._seen.update(dict.fromkeys(_THING.findall(last, contents.end()), receptacle))
        picked, put = _PICKED_UP.match(observation), _PUT_DOWN.match(observation)
        if picked:
            self._held = picked.group(1)
            self._seen.pop(self._held, None)
        elif put:
            self._held = ""
            self._seen[put.group(1)] = put.group(2)
        elif _TREATED.match(observation):
            self._is_treated = True

    def _fetching(self, errand: Errand, commands: Sequence[str]) -> str:
        if errand.family == "pick_two_obj_and_place" and not self._place:
            # One that is where it belongs already stays there, and the other one joins it.
            at_home = [
                r for thing, r in self._seen.items() if _kind(thing) == errand.thing and _kind(r) == errand.place
            ]
            self._place = at_home[0] if at_home else ""
        wanted = [t for t, r in self._seen.items() if _kind(t) == errand.thing and r != self._place]
        for thing in wanted:
            receptacle = self._seen[thing]
            take = f"take {thing} from {receptacle}"
            if take in commands:
                return take
            step = self._approach(receptacle, commands)
            if step:
                return step
        return self._searching(errand.thing, commands)

    def _delivery(self, errand: Errand, commands: Sequence[str]) -> str:
        treatment = TREATMENT.get(errand.family)
        if errand.family == "look_at_obj_in_light":
            use = [command for command in commands if command.startswith(f"use {errand.place} ")]
            if use:
                return use[0]
            stands = [r for thing, r in self._seen.items() if _kind(thing) == errand.place]
            step = self._approach(stands[0], commands) if stands else ""
            return step or self._searching(errand.place, commands)
        if treatment and not self._is_treated:
            return self._at_receptacle(TREATMENTS[treatment].appliance, f"{treatment} {self._held} with ", commands)
        if errand.family == "pick_two_obj_and_place" and self._place:
            return self._at_receptacle(self._place, f"move {self._held} to ", commands)
        command = self._at_receptacle(errand.place, f"move {self._held} to ", commands)
        if command.startswith("move "):
            self._place = command.split(" to ", 1)[1]
        return command

    def _at_receptacle(self, wanted: str, doing: str, commands: Sequence[str]) -> str:
        """`doing` at the wanted receptacle, or at one of the wanted kind, or a step towards that."""
        options = [r for r in self._receptacles if wanted in (r, _kind(r))]
        for receptacle in options:
            if doing + receptacle in commands:
                return doing + receptacle
        # One whose contents are known is open or needs no opening.
        for receptacle in sorted(options, key=lambda r: r not in self._inspected):
            step = self._approach(receptacle, commands)
            if step:
                return step
        return "look"

    def _searching(self, thing: str, commands: Sequence[str]) -> str:
        if thing != self._sought:
            self._sought, self._queue = thing, self._plausible_order(thing)
        for _ in range(2):
            while self._queue:
                receptacle = self._queue[0]
                if receptacle not in self._inspected:
                    examine = f"examine {receptacle}"
                    step = self._approach(receptacle, commands) or (examine if examine in commands else "")
                    if step:
                        return step
                self._queue.pop(0)
            # Nothing found anywhere: something was overlooked, so look again.
            self._inspected.clear()
            self._queue = self._plausible_order(thing)
        return "look"

    def _approach(self, receptacle: str, commands: Sequence[str]) -> str:
        """The next step towards seeing into a receptacle; empty if there is none."""
        return next((c for c in (f"open {receptacle}", f"go to {receptacle}") if c in commands), "")


def _kind(name: str) -> str:
    return name.rsplit(" ", 1)[0]
