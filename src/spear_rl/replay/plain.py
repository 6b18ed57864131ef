"""Remembered episodes as plain lists, numbers and strings: a checkpoint of them loads without running code."""

from typing import Any

from spear_rl.replay.buffer import Remembered, surprisal
from spear_rl.types import Stop, Trajectory, turn_as_dict, turn_from_dict


def as_dict(item: Remembered) -> dict[str, Any]:
    """What `from_dict` reads back."""
    trajectory = item.trajectory
    return {name: getattr(item, name) for name in Remembered.__slots__ if name != "trajectory"} | {
        "trajectory": {name: getattr(trajectory, name) for name in ("success", "last_observation")}
        | {"turns": [*map(turn_as_dict, trajectory.turns)], "stop": str(trajectory.stop)}
    }


def from_dict(saved: dict[str, Any], *, needs_surprisal: bool = False) -> Remembered:
    """The episode as it was saved; what a checkpoint of an earlier version lacks is unknown.

    Args:
        needs_surprisal: a priority may have been switched on since; then it follows from the tokens.
    """
    trajectory = saved["trajectory"]
    turns = [*map(turn_from_dict, trajectory["turns"])]
    restored = Trajectory(**(trajectory | {"turns": turns, "stop": Stop(trajectory["stop"])}))
    known = saved.get("surprisal", 0.0)
    if needs_surprisal and not known:
        known = surprisal(restored, saved["dropped"])
    return Remembered(**(saved | {"trajectory": restored, "surprisal": known}))
