"""Who wants to know: every logger is a function of one event. None of them can change the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spear_rl.types import Group, Metrics


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened at a step."""

    kind: Literal["sft", "step", "eval", "checkpoint", "end"]
    step: int
    total: int = 0
    metrics: Metrics | dict[str, Any] | None = None


Callback = Callable[[Event], None]


class JsonLines:
    """One line an event of one kind, each on disk before training goes on."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind

    def __call__(self, event: Event) -> None:
        if event.kind == self._kind and event.metrics is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": event.step} | event.metrics) + "\n")


class TensorBoard:
    """Curves for TensorBoard in `folder`; what a killed run drew from `first_step` on is purged."""

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        # Absolute: it is written to from another thread, also while an environment has changed the current folder.
        self._folder, self._first_step = folder.absolute(), first_step
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        prefix = {"step": "", "eval": "eval/"}.get(event.kind)
        for name, value in (event.metrics or {}).items() if prefix is not None else ():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"{prefix}{name}", value, event.step)
        if event.kind == "end":
            self._writer.close()


def drop_rows(path: Path, *, from_step: int) -> None:
    """Forget what a killed run logged after its last checkpoint, so that resuming does not log it twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8").splitlines():
        with suppress(ValueError):  # a line cut in half by the kill
            if json.loads(line)["step"] < from_step:
                kept.append(line + "\n")
    draft = path.with_suffix(".draft")
    draft.write_text("".join(kept), "utf-8")
    draft.replace(path)


def write_trajectories(
    path: Path,
    groups: Sequence[Group],
    turn_advantages: Sequence[Sequence[float]] | None = None,
    dropped: Sequence[Sequence[str]] | None = None,
) -> None:
    """One JSON line an episode: what was seen, said and earned, and for every turn why it did not train."""
    path.parent.mkdir(parents=True, exist_ok=True)
    played = [(group, t) for group in groups for t in group.trajectories]
    with path.open("w", encoding="utf-8") as file:
        for number, (group, t) in enumerate(played):
            turns = [
                {"observation": turn.observation, "text": turn.text, "reward": turn.reward}
                | ({"invalid": turn.invalid} if turn.invalid else {})
                | ({"advantage": turn_advantages[number][i]} if turn_advantages else {})
                | ({"dropped": dropped[number][i]} if dropped and dropped[number][i] else {})
                for i, turn in enumerate(t.turns)
            ]
            episode = {"task": group.task_id, "step": group.step, "success": t.success, "reward": t.reward}
            file.write(json.dumps(episode | {"bonus": t.bonus, "stop": t.stop, "turns": turns}) + "\n")
