"""ALFWorld's game: which commands work in a state and what each of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spear_rl.envs.household.generation.rooms import TREATMENTS
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.wording import (
    HELP,
    NOTHING_HAPPENS,
    carried,
    intro,
    object_state,
    receptacle_state,
    surroundings,
)


class World:
    """One episode: the state of one game and nothing else. All unchanging tables are the game's."""

    __slots__ = ("_commands", "_won", "contents", "flags", "game", "held", "here", "lying", "opened", "taken")

    def __init__(self, game: Game) -> None:
        self.game = game
        self.here = game.start
        self.held = game.start_held
        """The object in the agent's hands, -1 if there is none."""
        self.contents = list(game.start_contents)
        """For each receptacle the objects in it. An object may be in two, and stay in the second when taken."""
        self.lying = list(game.start_lying)
        """For each location the objects that count as being there: they can be sliced from there."""
        self.opened = game.start_opened
        self.flags = dict(game.start_flags)
        """Which objects are clean, hot, cool, sliced, toggled, on."""
        self.taken: frozenset[tuple[int, int]] = frozenset()
        """(object, receptacle) since it was taken out of it; only the "Next to it" of `look` asks for this."""
        self._commands: tuple[str, ...] | None = None
        self._won: bool | None = None

    def copy(self) -> World:
        """An independent world in the same state."""
        twin = World.__new__(World)
        twin.game, twin.here, twin.held = self.game, self.here, self.held
        twin.contents, twin.lying, twin.flags = list(self.contents), list(self.lying), dict(self.flags)
        twin.opened, twin.taken = self.opened, self.taken
        twin._commands, twin._won = self._commands, self._won
        return twin

    @property
    def won(self) -> bool:
        """Whether the goal holds in the present state."""
        if self._won is None:
            self._won = self.game.goal(self)
        return self._won

    def close(self) -> None:
        """Nothing to give back."""

    def intro(self) -> str:
        """What the player reads first: the room and the task."""
        return intro(self)

    def state_key(self) -> str:
        """Equal exactly for equal states of the same game, however they were reached: `taken` is no part of it."""
        moved = _changes(self.contents, self.game.start_contents)
        lying = _changes(self.lying, self.game.start_lying)
        flags = [(number, sorted(marked)) for number, marked in enumerate(self.flags.values()) if marked]
        return f"{self.here};{self.held};{moved};{lying};{sorted(self.opened)};{flags}"

    def commands(self) -> tuple[str, ...]:
        """Every command that works now, sorted."""
        if self._commands is None:
            self._commands = self._admissible()
        return self._commands

    def act(self, command: str) -> str:
        """Carries the command out and returns what the game says to it."""
        command = command.strip()
        if command not in self.commands():
            return NOTHING_HAPPENS
        verb, _, rest = command.partition(" ")
        return RULES[verb](self, rest)

    def _admissible(self) -> tuple[str, ...]:
        game, held, contents = self.game, self.held, self.contents
        objects, receptacles = game.object_names, game.receptacle_names
        here = game.receptacles_at[self.here]
        openable, opened, pickupable, toggleable = game.openable, self.opened, game.pickupable, game.toggleable
        examine, doors, move, take, use, treat = [], [], [], [], [], []
        for r in here:
            name = receptacles[r]
            examine.append(f"examine {name}")
            inside = contents[r]
            if toggleable:
                use += [f"use {objects[o]}" for o in inside if o in toggleable]
            if r in openable:
                if r not in opened:
                    doors.append(f"open {name}")
                    continue
                doors.append(f"close {name}")
            if held < 0:
                take += [f"take {objects[o]} from {name}" for o in inside if o in pickupable]
            elif held in game.accepts[r]:
                move.append(f"move {objects[held]} to {name}")
        if held >= 0:
            name = objects[held]
            examine.append(f"examine {name}")
            for verb, appliances in game.appliances.items():
                if held in game.treatable[verb]:
                    treat += [f"{verb} {name} with {receptacles[r]}" for r in here if r in appliances]
            if held in game.knives:
                treat += [f"slice {objects[o]} with {name}" for o in self.lying[self.here] if o in game.sliceable]
        here_and_now = [*examine, *doors, *move, *take, *use, *treat, *game.gotos[self.here]]
        # A set, because a lamp in two receptacles at one place would be listed twice.
        return tuple(sorted({*here_and_now, "help", "inventory", "look"}))

    def _changed(self) -> None:
        self._commands = None
        self._won = None

    def _look(self, _: str) -> str:
        return surroundings(self)

    def _inventory(self, _: str) -> str:
        return carried(self)

    def _help(self, _: str) -> str:
        return HELP

    def _examine(self, name: str) -> str:
        receptacle = self.game.receptacle_numbers.get(name)
        return object_state(self, name) if receptacle is None else receptacle_state(self, receptacle)

    def _go(self, rest: str) -> str:
        name = rest.removeprefix("to ")
        receptacle = self.game.receptacle_numbers[name]
        self.here = self.game.location_of[receptacle]
        self._commands = None
        if self.game.goal_needs_location:
            self._won = None
        return f"You arrive at {name}. {receptacle_state(self, receptacle)}"

    def _open(self, name: str) -> str:
        receptacle = self.game.receptacle_numbers[name]
        self.opened = self.opened | {receptacle}
        self._changed()
        return f"You open the {name}. {receptacle_state(self, receptacle)}"

    def _close(self, name: str) -> str:
        self.opened = self.opened - {self.game.receptacle_numbers[name]}
        self._changed()
        return f"You close the {name}."

    def _take(self, rest: str) -> str:
        name, _, where = rest.partition(" from ")
        o, r = self.game.object_numbers[name], self.game.receptacle_numbers[where]
        self.contents[r] = tuple(other for other in self.contents[r] if other != o)
        self.lying[self.here] = tuple(other for other in self.lying[self.here] if other != o)
        self.taken = self.taken | {(o, r)}
        self.held = o
        self._changed()
        return f"You pick up the {name} from the {where}."

    def _move(self, rest: str) -> str:
        name, _, where = rest.partition(" to ")
        o, r = self.game.object_numbers[name], self.game.receptacle_numbers[where]
        self.contents[r] = tuple(sorted({*self.contents[r], o}))
        self.lying[self.here] = tuple(sorted({*self.lying[self.here], o}))
        self.taken = self.taken - {(o, r)}
        self.held = -1
        self._changed()
        return f"You move the {name} to the {where}."

    def _clean(self, rest: str) -> str:
        return self._treat("clean", rest)

    def _heat(self, rest: str) -> str:
        return self._treat("heat", rest)

    def _cool(self, rest: str) -> str:
        return self._treat("cool", rest)

    def _treat(self, verb: str, rest: str) -> str:
        name, _, where = rest.partition(" with ")
        treatment, o = TREATMENTS[verb], {self.game.object_numbers[name]}
        self.flags[treatment.gains] |= o
        if treatment.loses:
            self.flags[treatment.loses] -= o
        self._changed()
        return f"You {verb} the {name} using the {where}."

    def _use(self, name: str) -> str:
        o = {self.game.object_numbers[name]}
        self.flags["ison"] ^= o
        # Once toggled is toggled for good, so the game says "turn on" every time.
        self.flags["istoggled"] |= o
        self._changed()
        return f"You turn on the {name}."

    def _slice(self, rest: str) -> str:
        name, _, knife = rest.partition(" with ")
        self.flags["issliced"] |= {self.game.object_numbers[name]}
        self._changed()
        return f"You sliced the {name} with the {knife}."


RULES: dict[str, Callable[[World, str], str]] = {
    "look": World._look,
    "inventory": World._inventory,
    "help": World._help,
    "examine": World._examine,
    "go": World._go,
    "open": World._open,
    "close": World._close,
    "take": World._take,
    "move": World._move,
    "clean": World._clean,
    "heat": World._heat,
    "cool": World._cool,
    "use": World._use,
    "slice": World._slice,
}


def _changes(now: Sequence[tuple[int, ...]], start: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    return [(number, held) for number, held in enumerate(now) if held is not start[number] and held != start[number]]
