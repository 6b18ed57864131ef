"""The state of one episode, which commands are possible in it and what each of them does: ALFWorld's rules."""

from collections.abc import Callable, Sequence
from functools import partial

from spear_rl.envs.household.rules import wording
from spear_rl.envs.household.rules.game import TREATMENTS, Game
from spear_rl.envs.household.rules.wording import receptacle_state


class World:
    """The state of one episode; everything that never changes is in its game."""

    __slots__ = ("_commands", "_won", "contents", "flags", "game", "held", "here", "lying", "opened", "taken")

    def __init__(self, game: Game) -> None:
        self.game = game
        self.here: int = game.start
        self.held: int = game.start_held
        """The object in the agent's hands, -1 for none."""
        self.contents: list[tuple[int, ...]] = list(game.start_contents)
        """For each receptacle the objects in it. An object may be in two, and stay in the second when taken."""
        self.lying: list[tuple[int, ...]] = list(game.start_lying)
        """For each location the objects that count as being there: they can be sliced from there."""
        self.opened: frozenset[int] = game.start_opened
        self.flags: dict[str, frozenset[int]] = dict(game.start_flags)
        """Which objects are clean, hot, cool, sliced, toggled, on."""
        self.taken: frozenset[tuple[int, int]] = frozenset()
        """(object, receptacle) since the object was taken out of it; used only by the "Next to it" of `look`."""
        self._commands: tuple[str, ...] | None = None
        self._won: bool | None = None

    @property
    def won(self) -> bool:
        """Whether the goal holds in this state."""
        if self._won is None:
            self._won = self.game.goal(self)
        return self._won

    def close(self) -> None:
        """Nothing to release."""

    def intro(self) -> str:
        return wording.intro(self)

    def state_key(self) -> str:
        """Equal exactly for equal states of the same game, whatever led to them; `taken` is not part of it."""
        moved = _changes(self.contents, self.game.start_contents)
        lying = _changes(self.lying, self.game.start_lying)
        flags = [(number, sorted(marked)) for number, marked in enumerate(self.flags.values()) if marked]
        return f"{self.here};{self.held};{moved};{lying};{sorted(self.opened)};{flags}"

    def commands(self) -> tuple[str, ...]:
        """Every command that is possible now, sorted."""
        if self._commands is None:
            self._commands = self._admissible()
        return self._commands

    def act(self, command: str) -> str:
        """Run the command and return the game's answer."""
        command = command.strip()
        if command not in self.commands():
            return wording.NOTHING_HAPPENS
        verb, _, rest = command.partition(" ")
        if verb not in _READING:
            self._commands = None
            if verb != "go" or self.game.goal_needs_location:
                self._won = None
        return _ACTIONS[verb](self, rest)

    def _admissible(self) -> tuple[str, ...]:
        game, held, contents = self.game, self.held, self.contents
        objects, receptacles = game.object_names, game.receptacle_names
        here = game.receptacles_at[self.here]
        openable, opened, pickupable, toggleable = game.openable, self.opened, game.pickupable, game.toggleable
        # A set, because a lamp in two receptacles at one location would be listed twice.
        found = {*game.gotos[self.here], "help", "inventory", "look"}
        for r in here:
            name = receptacles[r]
            found.add(f"examine {name}")
            inside = contents[r]
            if toggleable:
                found.update([f"use {objects[o]}" for o in inside if o in toggleable])
            if r in openable:
                if r not in opened:
                    found.add(f"open {name}")
                    continue
                found.add(f"close {name}")
            if held < 0:
                found.update([f"take {objects[o]} from {name}" for o in inside if o in pickupable])
            elif held in game.accepts[r]:
                found.add(f"move {objects[held]} to {name}")
        if held >= 0:
            name = objects[held]
            found.add(f"examine {name}")
            for verb, appliances in game.appliances.items():
                if held in game.treatable[verb]:
                    found.update([f"{verb} {name} with {receptacles[r]}" for r in here if r in appliances])
            if held in game.knives:
                found.update([f"slice {objects[o]} with {name}" for o in self.lying[self.here] if o in game.sliceable])
        return tuple(sorted(found))

    def _examine(self, name: str) -> str:
        receptacle = self.game.receptacle_numbers.get(name)
        return wording.object_state(self, name) if receptacle is None else receptacle_state(self, receptacle)

    def _go(self, rest: str) -> str:
        name = rest.removeprefix("to ")
        receptacle = self.game.receptacle_numbers[name]
        self.here = self.game.location_of[receptacle]
        return f"You arrive at {name}. {receptacle_state(self, receptacle)}"

    def _open(self, name: str) -> str:
        receptacle = self.game.receptacle_numbers[name]
        self.opened = self.opened | {receptacle}
        return f"You open the {name}. {receptacle_state(self, receptacle)}"

    def _close(self, name: str) -> str:
        self.opened = self.opened - {self.game.receptacle_numbers[name]}
        return f"You close the {name}."

    def _take(self, rest: str) -> str:
        name, _, where = rest.partition(" from ")
        o, r = self.game.object_numbers[name], self.game.receptacle_numbers[where]
        self.contents[r] = tuple(other for other in self.contents[r] if other != o)
        self.lying[self.here] = tuple(other for other in self.lying[self.here] if other != o)
        self.taken = self.taken | {(o, r)}
        self.held = o
        return f"You pick up the {name} from the {where}."

    def _move(self, rest: str) -> str:
        name, _, where = rest.partition(" to ")
        o, r = self.game.object_numbers[name], self.game.receptacle_numbers[where]
        self.contents[r] = tuple(sorted({*self.contents[r], o}))
        self.lying[self.here] = tuple(sorted({*self.lying[self.here], o}))
        self.taken = self.taken - {(o, r)}
        self.held = -1
        return f"You move the {name} to the {where}."

    def _treat(self, rest: str, *, verb: str) -> str:
        name, _, where = rest.partition(" with ")
        treatment, o = TREATMENTS[verb], {self.game.object_numbers[name]}
        self.flags[treatment.gains] |= o
        if treatment.loses:
            self.flags[treatment.loses] -= o
        return f"You {verb} the {name} using the {where}."

    def _use(self, name: str) -> str:
        o = {self.game.object_numbers[name]}
        self.flags["ison"] ^= o
        # `istoggled` is never cleared, so the game says "turn on" every time.
        self.flags["istoggled"] |= o
        return f"You turn on the {name}."

    def _slice(self, rest: str) -> str:
        name, _, knife = rest.partition(" with ")
        self.flags["issliced"] |= {self.game.object_numbers[name]}
        return f"You sliced the {name} with the {knife}."


_READING = ("look", "inventory", "help", "examine")
_ACTIONS: dict[str, Callable[[World, str], str]] = {
    "look": lambda world, _: wording.surroundings(world),
    "inventory": lambda world, _: wording.carried(world),
    "help": lambda world, _: wording.HELP,
    "examine": World._examine,
    "go": World._go,
    "open": World._open,
    "close": World._close,
    "take": World._take,
    "move": World._move,
    "use": World._use,
    "slice": World._slice,
    **{verb: partial(World._treat, verb=verb) for verb in TREATMENTS},
}


def _changes(now: Sequence[tuple[int, ...]], start: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    return [(number, held) for number, held in enumerate(now) if held is not start[number] and held != start[number]]
