"""One game as its episodes share it: tables that no move ever changes, indexed by number."""

from __future__ import annotations

from spear_rl.envs.household.generation.rooms import TREATMENTS
from spear_rl.envs.household.rules.problem import Problem
from spear_rl.envs.household.rules.tables import FLAGS, Groups, Tables, display_names, game_tables
from spear_rl.envs.household.rules.verdict import Test, goal_test

__all__ = ["Game", "display_names"]


class Game:
    """Objects, receptacles and locations are numbers in the order of their identifiers: the order of every list."""

    __slots__ = (
        "accepts",
        "appliances",
        "goal",
        "goal_needs_location",
        "gotos",
        "is_container",
        "knives",
        "location_of",
        "nested",
        "object_names",
        "object_numbers",
        "openable",
        "pickupable",
        "receptacle_names",
        "receptacle_numbers",
        "receptacles_at",
        "sliceable",
        "start",
        "start_contents",
        "start_flags",
        "start_held",
        "start_lying",
        "start_opened",
        "task",
        "toggleable",
        "treatable",
    )

    def __init__(self, problem: Problem) -> None:
        self._fill(game_tables(problem))

    @classmethod
    def from_tables(cls, tables: Tables) -> Game:
        """The game whose tables were worked out before."""
        game = cls.__new__(cls)
        game._fill(tables)
        return game

    def _fill(self, tables: Tables) -> None:
        marked = {predicate: frozenset(numbers) for predicate, numbers in tables["marked"].items()}
        self.task = tables["task"]
        self.object_names = tuple(tables["objects"])
        self.receptacle_names = tuple(tables["receptacles"])
        self.object_numbers = {name: number for number, name in enumerate(self.object_names)}
        self.receptacle_numbers = {name: number for number, name in enumerate(self.receptacle_names)}
        self.openable = marked["openable"]
        self.pickupable = marked["pickupable"]
        self.sliceable = marked["sliceable"]
        self.toggleable = marked["toggleable"]
        self.is_container = marked["isreceptacleobject"]
        self.treatable = {verb: marked[treatment.trait] for verb, treatment in TREATMENTS.items()}
        self.nested = _frozen(tables["nested"])
        acceptances = [frozenset(accepted) for accepted in tables["acceptances"]]
        self.accepts = tuple(acceptances[number] for number in tables["accepts"])
        self.knives = frozenset(tables["knives"])
        self.appliances = {verb: frozenset(numbers) for verb, numbers in tables["appliances"].items()}
        standing = tables["standing"]
        self.location_of = {receptacle: place for receptacle, place in enumerate(standing) if place >= 0}
        self.receptacles_at = _frozen(tables["receptacles_at"])
        names = zip(self.receptacle_names, standing, strict=True)
        walks = sorted((f"go to {name}", place) for name, place in names if place >= 0)
        self.gotos = tuple(
            tuple([walk for walk, place in walks if place != here]) for here in range(len(self.receptacles_at))
        )
        self.start = tables["start"]
        self.start_held = tables["held"]
        self.start_contents = _frozen(tables["contents"])
        self.start_lying = _frozen(tables["lying"])
        self.start_opened = marked["opened"]
        self.start_flags = {flag: marked[flag] for flag in FLAGS}
        self.goal: Test = goal_test(tables["goal"])
        self.goal_needs_location = tables["goal_needs_location"]


def _frozen(groups: Groups) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(group) for group in groups])
