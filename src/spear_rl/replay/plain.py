"""Remembered episodes as plain lists, numbers and strings: a checkpoint of them loads without running code."""

from typing import Any

from spear_rl.replay.buffer import Remembered, surprisal
from spear_rl.types import Completion, Stop, Trajectory, Turn


def as_dict(item: Remembered) -> dict[str, Any]:
    """What `from_dict` reads back."""
    trajectory = item.trajectory
    turns = [
        {name: getattr(turn, name) for name in Turn.__slots__ if name != "completion"}
        | {"completion": {name: getattr(turn.completion, name) for name in Completion.__slots__}}
        for turn in trajectory.turns
    ]
    return {name: getattr(item, name) for name in Remembered.__slots__ if name != "trajectory"} | {
        "trajectory": {name: getattr(trajectory, name) for name in ("success", "last_observation")}
        | {"turns": turns, "stop": str(trajectory.stop)}
    }


def from_dict(saved: dict[str, Any]) -> Remembered:
    """The episode; what a checkpoint of an earlier version lacks is unknown, or follows from its tokens."""
    trajectory = saved["trajectory"]
    turns = [Turn(**(turn | {"completion": Completion(**turn["completion"])})) for turn in trajectory["turns"]]
    restored = Trajectory(**(trajectory | {"turns": turns, "stop": Stop(trajectory["stop"])}))
    return Remembered(**({"surprisal": surprisal(restored, saved["dropped"])} | saved | {"trajectory": restored}))
