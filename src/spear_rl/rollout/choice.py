"""Which tasks a step plays: fresh ones, those that return unsolved, and those that restart within an earlier win.

What was played is remembered, so a choice has a state. Without any of this, `collect.Rollouts` needs none.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from spear_rl.io.escaping import clipped
from spear_rl.rollout.env import Task
from spear_rl.types import Group, Turn, turn_as_dict, turn_from_dict

_log = logging.getLogger(__name__)

MEMORY, MAX_WINS = 1024, 256
"""Tasks that are remembered, and those of them with a win: the ones played last."""
LEAST_WEIGHT = 0.05
"""Added to p(1 - p), which is at most 0.25, so that a task that was never won can return too."""
ReturnWhen = Literal["lost", "mixed", "unsolved"]


@dataclass(frozen=True, slots=True)
class Start:
    """The state of a task after the first `num_given` turns of a win."""

    win: tuple[Turn, ...]
    """All its turns; their prompts are left out, as the layout makes them again."""
    num_given: int


@dataclass(frozen=True, slots=True)
class Result:
    """How the latest group of a task went that began at the start."""

    task: str
    family: str
    step: int
    """When the task was last played."""
    num_won: int
    num_played: int
    win: tuple[Turn, ...] = ()
    """The shortest of the latest group with one, where wins are kept."""

    @property
    def is_solved(self) -> bool:
        return self.num_won == self.num_played

    @property
    def weight(self) -> float:
        """The weight of the task in a draw: largest at a success rate of 1/2, where a group's rewards differ most."""
        success = self.num_won / self.num_played
        return success * (1 - success) + LEAST_WEIGHT


@dataclass(frozen=True, slots=True)
class Chosen:
    """A group to play."""

    place: int
    """Of its task in the panel."""
    origin: Literal["fresh", "returned", "restarted"] = "fresh"
    start: Start | None = None


class TaskChoice:
    """Replaces some of a step's fresh tasks by remembered ones.

    Depends on the seed, the step and what was played before, and on nothing else, so that a resumed run makes the same
    choices.

    Args:
        tasks: the panel.
        return_share: of a step's tasks that return; above 0 it is at least one of them.
        return_when: lost: no episode of the group won; mixed: some won, some lost; unsolved: either.
        restart_share: of a step's groups that begin within a win of a task whose latest group was not all wins; above 0
            at least one of them, and never all.
        restart_success: of a step's restarts of a family, from which on the next ones begin one turn earlier. If all
            are lost, they begin one turn later.
    """

    def __init__(
        self, tasks: Sequence[Task], *, seed: int, return_share: float = 0.0, return_when: ReturnWhen = "unsolved",
        restart_share: float = 0.0, restart_success: float = 0.5,
    ) -> None:  # fmt: skip
        self._tasks, self._seed, self._return_share, self._return_when = tasks, seed, return_share, return_when
        self._restart_share, self._restart_success = restart_share, restart_success
        self._results: dict[int, Result] = {}
        """By the task's place in the panel, the one played last at the end."""
        self._left: dict[str, int] = {}
        """Family -> turns of a win that are left to play; 1 at first. Longer wins are given more turns."""
        self._has_warned = False

    def chosen(self, fresh: Sequence[int], step: int) -> list[Chosen]:
        """The groups of a step: as many as `fresh` has tasks, some of them replaced by tasks played before, none twice.

        Those that are not fresh take the last places, so the other tasks are those of a run without them.
        """
        rng = random.Random(f"{self._seed}/choice/{step}")
        here = set(fresh)
        known = {place: r for place, r in self._results.items() if place not in here and not r.is_solved}
        starts = self._starts(known) if self._restart_share else {}
        num_restarts = min(_count(self._restart_share, len(fresh)), len(fresh) - 1)
        restarted = self._drawn({place: known[place].weight for place in starts}, num_restarts, step, rng)
        returning = {p: result.weight for p, result in known.items() if p not in restarted and self._returns(result)}
        num_returns = min(_count(self._return_share, len(fresh)), len(fresh) - len(restarted))
        returned = self._drawn(returning, num_returns, step, rng)
        old = [Chosen(place, "returned") for place in returned]
        old += [Chosen(place, "restarted", starts[place]) for place in restarted]
        return [*map(Chosen, fresh[: len(fresh) - len(old)]), *old]

    def _returns(self, result: Result) -> bool:
        return self._return_when == "unsolved" or (self._return_when == "mixed") == (result.num_won > 0)

    def _starts(self, known: dict[int, Result]) -> dict[int, Start]:
        """Where restarts begin. Without a given turn it is an ordinary episode of a task that returns."""
        left = {place: self._left.get(result.family, 1) for place, result in known.items()}
        return {p: Start(r.win, max(len(r.win) - left[p], 0)) for p, r in known.items() if len(r.win) > 1}

    def _drawn(self, weights: dict[int, float], count: int, step: int, rng: random.Random) -> list[int]:
        """Up to `count` different places, at random by weight times the steps since each was played."""
        # Efraimidis and Spirakis: the largest u^(1/w) are a weighted sample without replacement.
        ages = {place: max(step - self._results[place].step, 1) for place in weights}
        keys = {place: rng.random() ** (1 / (weight * ages[place])) for place, weight in weights.items()}
        return sorted(keys, key=lambda place: -keys[place])[:count]

    def noted(self, chosen: Sequence[Chosen], groups: Sequence[Group], step: int) -> list[Group]:
        """Remember how the groups went; the groups, each with its origin in `info`."""
        out, restarts = list[Group](), dict[str, list[tuple[Start, Group]]]()
        for choice, group in zip(chosen, groups, strict=True):
            known, origin = self._results.get(choice.place), choice.origin
            if choice.start and known:
                restarts.setdefault(known.family, []).append((choice.start, group))
                origin = origin if group.has_given_turns else "returned"
            if group.has_given_turns and known:
                self._remember(choice.place, replace(known, step=step))
            elif group.trajectories:
                num_won = sum(t.success for t in group.trajectories)
                win = (self._win(group) or (known.win if known else ())) if self._restart_share else ()
                about = (group.task_id, group.info.get("family", ""), step)
                self._remember(choice.place, Result(*about, num_won, len(group.trajectories), win))
            if "strayed" in group.info:
                self._warn(group.task_id)
            out.append(replace(group, info=group.info | {"origin": origin}))
        for family, begun in restarts.items():
            self._move(family, begun)
        for place in list(self._results)[:-MEMORY]:
            del self._results[place]
        for place in [place for place, result in self._results.items() if result.win][:-MAX_WINS]:
            self._results[place] = replace(self._results[place], win=())
        return out

    def _remember(self, place: int, result: Result) -> None:
        self._results.pop(place, None)
        self._results[place] = result

    def _win(self, group: Group) -> tuple[Turn, ...]:
        wins = [t.turns for t in group.trajectories if t.success]
        return tuple(replace(turn, prompt_ids=[], images=()) for turn in min(wins, key=len, default=[]))

    def _move(self, family: str, begun: Sequence[tuple[Start, Group]]) -> None:
        """Let the next restarts of the family begin a turn earlier or later, by how those of this step went."""
        won = [t.success for start, group in begun for t in group.trajectories if t.num_given == start.num_given]
        left = self._left.get(family, 1)
        says_more = any(left <= len(start.win) for start, _ in begun)  # shorter wins do not try so many turns
        if won and says_more and sum(won) >= self._restart_success * len(won):
            self._left[family] = left + 1
        elif won and not any(won):
            self._left[family] = max(left - 1, 1)

    def _warn(self, task: str) -> None:
        if not self._has_warned:
            _log.warning(
                "%s did not repeat an earlier win, so its episodes are played from the start: rollout.restart_share "
                "needs games that are deterministic (rollout/strayed_restarts counts such episodes)",
                clipped(task, 200),
            )
        self._has_warned = True

    def state_dict(self) -> dict[str, Any]:
        """Plain values; later steps do not change it."""
        results = [
            {"place": place}
            | {name: getattr(r, name) for name in Result.__slots__}
            | {"win": [*map(turn_as_dict, r.win)]}
            for place, r in self._results.items()
        ]
        return {"results": results, "left": dict(self._left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tasks that are at another place in the panel, or not in it, are left out."""
        self._results, self._left = {}, dict(state["left"])
        for saved in state["results"]:
            about = {name: value for name, value in saved.items() if name not in ("place", "win")}
            place, win = saved["place"], tuple(map(turn_from_dict, saved["win"]))
            if place < len(self._tasks) and self._tasks[place].id == saved["task"]:
                self._results[place] = Result(**about, win=win)


def _count(share: float, num_tasks: int) -> int:
    return max(round(share * num_tasks), 1) if share else 0
