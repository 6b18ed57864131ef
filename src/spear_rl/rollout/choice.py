"""Which tasks a step plays: fresh ones, and those that return because their group did not solve them.

What was played is remembered, so a choice has a state. One without a memory needs none of this: `collect.Rollouts`.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from spear_rl.rollout.env import Task
from spear_rl.types import Group

MEMORY = 1024
"""Tasks that are remembered, those played last."""
ReturnWhen = Literal["lost", "mixed", "unsolved"]
LEAST_WEIGHT = 0.05
"""Added to p(1 - p), which is at most 0.25, so that a task that was never won can return too."""


@dataclass(frozen=True, slots=True)
class Result:
    """How the latest group of a task went."""

    task: str
    step: int
    """When the task was last played."""
    num_won: int
    num_played: int

    @property
    def weight(self) -> float:
        """Largest where half of the episodes won: there a group's baseline tells them apart."""
        success = self.num_won / self.num_played
        return success * (1 - success) + LEAST_WEIGHT


@dataclass(frozen=True, slots=True)
class Chosen:
    """A group to play."""

    place: int
    """Of its task in the panel."""
    origin: Literal["fresh", "returned"] = "fresh"


class TaskChoice:
    """Replaces some of a step's fresh tasks by remembered ones.

    Depends on the seed, the step and what was played before, and on nothing else, so that a resumed run makes the same
    choices.

    Args:
        tasks: the panel.
        return_share: of a step's tasks that return; above 0 it is at least one of them.
        return_when: lost: nobody in the group won; mixed: some won, some lost; unsolved: either.
    """

    def __init__(
        self, tasks: Sequence[Task], *, seed: int, return_share: float = 0.0, return_when: ReturnWhen = "unsolved"
    ) -> None:
        self._tasks, self._seed, self._return_share, self._return_when = tasks, seed, return_share, return_when
        self._results: dict[int, Result] = {}
        """By the task's place in the panel, the one played last at the end."""

    def chosen(self, fresh: Sequence[int], step: int) -> list[Chosen]:
        """The groups of a step, from the places of its fresh tasks: as many, and none twice that was not before.

        Those that are not fresh take the last places, so the other tasks are those of a run without them.
        """
        rng = random.Random(f"{self._seed}/choice/{step}")
        known = {place: result for place, result in self._results.items() if place not in fresh}
        returning = {place: result.weight for place, result in known.items() if self._returns(result)}
        returned = self._drawn(returning, _count(self._return_share, len(fresh)), step, rng)
        old = [Chosen(place, "returned") for place in returned]
        return [*map(Chosen, fresh[: len(fresh) - len(old)]), *old]

    def _returns(self, result: Result) -> bool:
        if result.num_won == result.num_played:
            return False
        return self._return_when == "unsolved" or (self._return_when == "mixed") == (result.num_won > 0)

    def _drawn(self, weights: dict[int, float], count: int, step: int, rng: random.Random) -> list[int]:
        """Up to `count` different places, at random by weight times the steps since each was played."""
        # Efraimidis and Spirakis: the largest u^(1/w) are a weighted sample without replacement.
        ages = {place: max(step - self._results[place].step, 1) for place in weights}
        keys = {place: rng.random() ** (1 / (weight * ages[place])) for place, weight in weights.items()}
        return sorted(keys, key=lambda place: -keys[place])[:count]

    def noted(self, chosen: Sequence[Chosen], groups: Sequence[Group], step: int) -> list[Group]:
        """Remember how the groups went; the groups, each with its origin in `info`."""
        for choice, group in zip(chosen, groups, strict=True):
            if group.trajectories:
                num_won = sum(t.success for t in group.trajectories)
                self._results.pop(choice.place, None)
                self._results[choice.place] = Result(group.task_id, step, num_won, len(group.trajectories))
        for place in list(self._results)[:-MEMORY]:
            del self._results[place]
        return [
            replace(group, info=group.info | {"origin": choice.origin})
            for choice, group in zip(chosen, groups, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plain values; later steps do not change it."""
        return {"results": [(place, asdict(result)) for place, result in self._results.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tasks that the panel no longer has in their place are forgotten."""
        known = {int(place): Result(**saved) for place, saved in state["results"]}
        places = range(len(self._tasks))
        self._results = {n: result for n, result in known.items() if n in places and self._tasks[n].id == result.task}


def _count(share: float, num_tasks: int) -> int:
    return max(round(share * num_tasks), 1) if share else 0
