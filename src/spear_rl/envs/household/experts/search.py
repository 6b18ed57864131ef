"""The expert that has to search: it knows only the observations it has read and the commands it is offered."""

import re
from collections.abc import Sequence

from spear_rl.envs.household.families import TaskSpec, parsed_task, type_of
from spear_rl.envs.household.rooms import THINGS
from spear_rl.envs.household.rules.game import Game
from spear_rl.envs.household.rules.wording import NOTHING_HAPPENS
from spear_rl.envs.household.rules.world import World
from spear_rl.envs.shared.dice import Dice

_TASK = re.compile(r"Your task is to: (.*)")
# Bounded, because an unbounded name would be matched again from every position in it: quadratic time.
_NAME = r"([\w ]{1,100})"
_ARRIVED = re.compile(rf"You arrive at {_NAME}\.")
_CONTENTS = re.compile(rf"(?:On the {_NAME}|The {_NAME} is open\. In it), you see ")
_THING = re.compile(r"\ba (\w+ \d+)")
_PICKED_UP = re.compile(rf"You pick up the {_NAME} from the ")
_PUT_DOWN = re.compile(rf"You move the {_NAME} to the {_NAME}\.")
_TREATED = re.compile(r"You (?:clean|heat|cool) the ")


def searched_commands(game: Game, seed: int = 0) -> list[str]:
    """Wins by searching; another seed searches in another order."""
    world, searcher = World(game), Searcher(seed)
    observation = world.intro()
    commands: list[str] = []
    # A search walks to and opens every receptacle at most once; a delivery takes a few commands more.
    max_commands = 6 * len(game.receptacle_names) + 20
    while not world.won:
        if len(commands) == max_commands:
            raise ValueError(f"the searching expert does not win this game: {game.task}")
        commands.append(searcher.next_command(observation, world.commands()))
        observation = world.act(commands[-1])
    return commands


def clumsy_commands(game: Game, seed: int = 0) -> list[str]:
    """Searches with mistakes: often tries to take the object where it is not, sometimes walks at random, and in four
    of ten episodes only looks around and gives up. Its imitators learn to recover, and have much to improve on."""
    world, searcher, dice = World(game), Searcher(seed), Dice("clumsy", seed)
    commands: list[str] = []
    if dice.chance(0.4):
        for _ in range(4):
            idle = [c for c in world.commands() if c.startswith(("go to ", "examine ", "look", "inventory"))]
            commands.append(dice.choice(idle))
            world.act(commands[-1])
        return commands
    wanted = parsed_task(game.task.removeprefix("Your task is to: ")).thing
    names = [name for name in game.object_names if type_of(name) == wanted]
    observation = world.intro()
    while not world.won:
        possible = world.commands()
        command = searcher.next_command(observation, possible)
        here = _ARRIVED.match(observation)
        grab = f"take {dice.choice(names)} from {here.group(1)}" if here else ""
        is_searching = command.startswith(("go to ", "open "))
        if grab and grab not in possible and is_searching and dice.chance(0.5):
            command = grab
        elif dice.chance(0.1):
            command = dice.choice([c for c in possible if c.startswith("go to ")])
        commands.append(command)
        observation = world.act(command) if command in possible else NOTHING_HAPPENS
    return commands


class Searcher:
    """Plays one game: each observation and its possible commands in, the next command out."""

    def __init__(self, seed: int) -> None:
        self._dice = Dice("search", seed)
        self._task: TaskSpec | None = None
        self._receptacles: list[str] = []
        self._sought = ""
        self._queue: list[str] = []
        """The receptacles to search for `_sought`, in order."""
        self._inspected: set[str] = set()
        self._seen: dict[str, str] = {}
        """Object -> the receptacle it was last seen in."""
        self._held = ""
        self._place = ""
        """The receptacle to deliver to, once it is chosen."""
        self._is_treated = False

    def next_command(self, observation: str, commands: Sequence[str]) -> str:
        if self._task is None:
            stated = _TASK.search(observation)
            if stated is None:
                raise ValueError("the first observation must state the task")
            self._task = parsed_task(stated.group(1))
            starts = ("go to ", "examine ")
            self._receptacles = [c.removeprefix(start) for start in starts for c in commands if c.startswith(start)]
        self._learn(observation)
        return self._delivery(self._task, commands) if self._held else self._fetching(self._task, commands)

    def _search_order(self, thing: str) -> list[str]:
        """All receptacles, roughly from likely to unlikely."""
        ranks = {place: rank for rank, place in enumerate(THINGS[thing].places if thing in THINGS else ())}
        scores = {
            receptacle: ranks.get(type_of(receptacle), len(ranks) + 4) + 4 * self._dice.below(1000) / 1000
            for receptacle in self._receptacles
        }
        return sorted(self._receptacles, key=lambda receptacle: (scores[receptacle], receptacle))

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

    def _fetching(self, task: TaskSpec, commands: Sequence[str]) -> str:
        candidates = [(thing, r) for thing, r in self._seen.items() if type_of(thing) == task.thing]
        if task.family == "pick_two_obj_and_place" and not self._place:
            # An object that is in its place already stays there, and the other one is brought to it.
            self._place = next((r for _, r in candidates if type_of(r) == task.place), "")
        for thing, receptacle in candidates:
            if receptacle != self._place:
                take = f"take {thing} from {receptacle}"
                step = take if take in commands else self._approach(receptacle, commands)
                if step:
                    return step
        return self._searching(task.thing, commands)

    def _delivery(self, task: TaskSpec, commands: Sequence[str]) -> str:
        treatment = task.treatment
        if task.family == "look_at_obj_in_light":
            use = [command for command in commands if command.startswith(f"use {task.place} ")]
            if use:
                return use[0]
            stands = [r for thing, r in self._seen.items() if type_of(thing) == task.place]
            step = self._approach(stands[0], commands) if stands else ""
            return step or self._searching(task.place, commands)
        if treatment and not self._is_treated:
            return self._at_receptacle(treatment.appliance, f"{treatment.verb} {self._held} with ", commands)
        if task.family == "pick_two_obj_and_place" and self._place:
            return self._at_receptacle(self._place, f"move {self._held} to ", commands)
        command = self._at_receptacle(task.place, f"move {self._held} to ", commands)
        if command.startswith("move "):
            self._place = command.split(" to ", 1)[1]
        return command

    def _at_receptacle(self, wanted: str, doing: str, commands: Sequence[str]) -> str:
        """`doing` at the wanted receptacle or at one of the wanted type, or a step towards it."""
        options = [r for r in self._receptacles if wanted in (r, type_of(r))]
        for receptacle in options:
            if doing + receptacle in commands:
                return doing + receptacle
        # An inspected receptacle is open or needs no opening.
        steps = (self._approach(r, commands) for r in sorted(options, key=lambda r: r not in self._inspected))
        return next(filter(None, steps), "look")

    def _searching(self, thing: str, commands: Sequence[str]) -> str:
        if thing != self._sought:
            self._sought, self._queue = thing, self._search_order(thing)
        for _ in range(2):
            while self._queue:
                receptacle = self._queue[0]
                if receptacle not in self._inspected:
                    examine = f"examine {receptacle}"
                    step = self._approach(receptacle, commands) or (examine if examine in commands else "")
                    if step:
                        return step
                self._queue.pop(0)
            # Not found anywhere: search everything again.
            self._inspected.clear()
            self._queue = self._search_order(thing)
        return "look"

    def _approach(self, receptacle: str, commands: Sequence[str]) -> str:
        """The next step towards seeing into a receptacle; empty if there is none."""
        return next((c for c in (f"open {receptacle}", f"go to {receptacle}") if c in commands), "")
