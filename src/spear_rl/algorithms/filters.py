"""Dr.BoT's reasons not to train on a turn, one record per reason.

A dropped turn still counts for success rates and for its group's mean.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Annotated

from spear_rl.replay.buffer import finite_rewards
from spear_rl.rollout.env import INADMISSIBLE, NO_THOUGHT
from spear_rl.settings.ranges import Share, check_fields
from spear_rl.types import Group, Turn

# UTF-8 read as Latin-1 or Windows-1252: a lead byte's letter, then what becomes of the bytes after it.
# Some of these pairs occur in good text (German: a sharp s before a closing quotation mark), so most must repeat.
_TAIL = (
    "[\u0080-\u00bf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d"
    "\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178]"
)
_UNREADABLE = re.compile(
    f"\ufffd|[\u0080-\u009f]|[\u00c2\u00c3]{_TAIL}|\u00e2\u20ac|\u00f0\u0178|\u00ef\u00bf\u00bd"
    f"|(?:[\u00c4-\u00df]{_TAIL}){{2}}|(?:[\u00e0-\u00ef]{_TAIL}{_TAIL}){{2}}"
)


@dataclass(frozen=True, slots=True)
class Overlong:
    """Completions that hit their token limit."""

    def __call__(self, groups: Sequence[Group]) -> list[list[str]]:
        return _turn_by_turn(groups, "overlong", lambda turn: turn.completion.truncated)


@dataclass(frozen=True, slots=True)
class Void:
    """Turns without a well-formed action. One that is refused, or without its thought, trains with its penalty."""

    def __call__(self, groups: Sequence[Group]) -> list[list[str]]:
        return _turn_by_turn(groups, "void", lambda turn: turn.invalid not in ("", INADMISSIBLE, NO_THOUGHT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetitive:
    """Completions in which some run of `length` tokens occurs `count` times or more."""

    length: int = 20
    count: int = 10

    def __call__(self, groups: Sequence[Group]) -> list[list[str]]:
        return _turn_by_turn(groups, "repetitive", self._repeats)

    def _repeats(self, turn: Turn) -> bool:
        ids = turn.completion.token_ids
        if len(ids) < self.length + self.count - 1:
            return False
        runs = Counter(tuple(ids[i : i + self.length]) for i in range(len(ids) - self.length + 1))
        return max(runs.values()) >= self.count


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Completions whose text holds replacement characters or mojibake."""

    def __call__(self, groups: Sequence[Group]) -> list[list[str]]:
        return _turn_by_turn(groups, "unreadable", lambda turn: _UNREADABLE.search(turn.text) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroups:
    """All but the `keep` share of groups whose scores spread the most; a group without any spread never trains.

    Of n groups ceil(keep * n) stay; between equal spreads the earlier group stays.
    """

    keep: Annotated[float, Share] = 0.75

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, groups: Sequence[Group]) -> list[list[str]]:
        spreads = [pstdev([t.score for t in g.trajectories]) if finite_rewards(g) else 0.0 for g in groups]
        ranked = sorted(range(len(groups)), key=lambda i: -spreads[i])
        most = math.ceil(round(self.keep * len(groups), 9))  # 0.28 * 25 is a little above 7
        kept = {i for i in ranked[:most] if spreads[i] > 0}
        return [
            ["" if i in kept else "flat_group"] * len(t.turns)
            for i, group in enumerate(groups)
            for t in group.trajectories
        ]


overlong, void, unreadable = Overlong(), Void(), Unreadable()


def repetitive(groups: Sequence[Group], *, length: int = 20, count: int = 10) -> list[list[str]]:
    """`Repetitive` as a function."""
    return Repetitive(length=length, count=count)(groups)


def flat(groups: Sequence[Group], *, keep: float = 0.75) -> list[list[str]]:
    """`FlatGroups` as a function."""
    return FlatGroups(keep=keep)(groups)


def _turn_by_turn(groups: Sequence[Group], reason: str, is_bad: Callable[[Turn], bool]) -> list[list[str]]:
    return [[reason if is_bad(turn) else "" for turn in t.turns] for group in groups for t in group.trajectories]
