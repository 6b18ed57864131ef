"""Episodes on disk: those of a step, those of an evaluation, and those that replay drew. `spear show` reads them.

Never imports torch, so that reading is quick.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spear_rl.io.files import writing
from spear_rl.io.jsonl import append_row, read_rows
from spear_rl.rollout.agents.records import EPISODES
from spear_rl.types import Group, Trajectory

if TYPE_CHECKING:
    from spear_rl.replay.buffer import Remembered, Replay, ReplayBuffer

TRAJECTORIES, EVALUATIONS, DRAWS, BUFFER = "trajectories", "evaluations", "draws.jsonl", "buffer.jsonl"
MAX_EVALUATION = 32 * 2**20
"""Bytes of the episodes of one evaluation; what is beyond them is counted in the last line and not kept."""


def step_file(run_dir: Path, kind: str, step: int, *, prefix: str = "step") -> Path:
    """Where the episodes of a step are: `kind` is the folder."""
    return run_dir / kind / f"{prefix}_{step:06d}.jsonl"


def episode_row(
    t: Trajectory,
    *,
    task: str,
    family: str,
    step: int,
    advantages: Sequence[float] | None = None,
    dropped: Sequence[str] | None = None,
) -> dict[str, Any]:
    """An episode as one JSON object: observations, answers, rewards, and for every turn why it did not train."""
    turns = [
        {"observation": turn.observation, "text": turn.text, "reward": turn.reward}
        | ({"tool": True} if turn.used_tool else {})
        | ({"invalid": turn.invalid} if turn.invalid else {})
        | ({"truncated": True} if turn.completion.truncated else {})
        | ({"advantage": advantages[i]} if advantages else {})
        | ({"dropped": dropped[i]} if dropped and dropped[i] else {})
        for i, turn in enumerate(t.turns)
    ]
    about = {"task": task, "family": family, "step": step, "success": t.success, "reward": t.reward, "bonus": t.bonus}
    measures = {"metrics": t.metrics} if t.metrics else {}
    ending = {"stop": t.stop, "tool_turns": t.num_tool_turns, "turns": turns, "last_observation": t.last_observation}
    return about | measures | ending


def write_trajectories(
    path: Path,
    groups: Sequence[Group],
    turn_advantages: Sequence[Sequence[float]] | None = None,
    dropped: Sequence[Sequence[str]] | None = None,
) -> None:
    """The episodes of a step, one JSON line each, in the order they were played in."""
    played = [(group, t) for group in groups for t in group.trajectories]
    rows = (
        episode_row(
            t,
            task=group.task_id,
            family=group.info.get("family", ""),
            step=group.step,
            advantages=turn_advantages[number] if turn_advantages else None,
            dropped=dropped[number] if dropped else None,
        )
        for number, (group, t) in enumerate(played)
    )
    _write(path, rows)


def write_evaluation(path: Path, groups: Sequence[Group], *, step: int, split: str) -> None:
    """The episodes of an evaluation of the policy at `step`, as far as they fit into MAX_EVALUATION bytes."""
    rows = (
        episode_row(t, task=group.task_id, family=group.info.get("family", ""), step=step) | {"split": split}
        for group in groups
        for t in group.trajectories
    )
    _write(path, rows, most=MAX_EVALUATION)


def _write(path: Path, rows: Iterable[Mapping[str, Any]], *, most: int | None = None) -> None:
    size = num_left_out = 0
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), path.open("w", encoding="utf-8") as file:
        for row in rows:
            line = json.dumps(row) + "\n"  # ASCII: a character is a byte
            size += len(line)
            if num_left_out or (most is not None and size > most):
                num_left_out += 1
            else:
                file.write(line)
        if num_left_out:
            file.write(json.dumps({"left_out": num_left_out}) + "\n")


class DrawLog:
    """What replay drew: a row per step in draws.jsonl, and the text of every episode at its first draw.

    Args:
        has_texts: whether texts are kept at all.
        max_age: of a stored episode; whether an older one has been written need not be known.
    """

    def __init__(self, run_dir: Path, *, has_texts: bool, max_age: float) -> None:
        self._run_dir, self._has_texts, self._max_age = run_dir, has_texts, max_age
        self._texts: dict[str, tuple[int, int]] | None = None

    def write(self, step: int, replays: Iterable[Replay]) -> None:
        """Record the draws of a step; nothing is written where none was made."""
        draws, texts, known = [], [], self._known()
        for replay in replays:
            for (stored, today), dropped in zip(replay.drawn, replay.dropped, strict=True):
                item = stored.item
                t, name = item.trajectory, f"{stored.step}/{item.number}"
                draw = {"episode": name, "played": stored.step, "age": step - stored.step, "task": item.task}
                draw |= {"family": item.family, "success": t.success, "reward": stored.reward}
                draw |= {} if item.group_success is None else {"group_success": item.group_success}
                draw |= {"advantage": item.advantage, "advantage_today": today}
                draw |= {"turns": len(t.turns), "turns_replayed": dropped.count(""), "tool_turns": t.num_tool_turns}
                if self._has_texts:
                    if name not in known or item.number < 0:
                        known[name] = (step, stored.step)
                        row = episode_row(
                            t,
                            task=item.task,
                            family=item.family,
                            step=stored.step,
                            advantages=item.turn_advantages,
                            dropped=item.dropped,
                        )
                        texts.append({"episode": name} | row)
                    draw["text"] = known[name][0]
                draws.append(draw)
        if texts:
            _write(step_file(self._run_dir, TRAJECTORIES, step, prefix="replayed"), texts)
        if draws:
            append_row(self._run_dir / DRAWS, {"step": step, "draws": draws})
        self._texts = {name: places for name, places in known.items() if step - places[1] <= self._max_age}

    def _known(self) -> dict[str, tuple[int, int]]:
        """Episode -> (the step whose file has its text, the step it was played at), also of a run that is resumed."""
        if self._texts is None:
            with writing(self._run_dir / DRAWS):
                rows = read_rows(self._run_dir / DRAWS).by_step.values()
            found = [draw for row in rows for draw in draws_of(row) if type(draw.get("text")) is int]
            self._texts = {str(draw["episode"]): (draw["text"], draw["played"]) for draw in found}
        return self._texts


class BufferLog:
    """Which episodes entered the replay buffer and which left it: a row of buffer.jsonl per step that changed it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / BUFFER
        self._before: set[tuple[int, int]] | None = None

    def begin(self, buffer: ReplayBuffer[Remembered]) -> None:
        """Before the first step: what a resumed run has stored entered earlier."""
        if self._before is None:
            self._before = _stored(buffer)

    def write(self, step: int, buffer: ReplayBuffer[Remembered]) -> None:
        """After a step."""
        before, now = self._before or set(), _stored(buffer)
        entered, left = ([f"{at}/{number}" for at, number in sorted(some)] for some in (now - before, before - now))
        if entered or left:
            append_row(self._path, {"step": step, "entered": entered, "left": left})
        self._before = now


def _stored(buffer: ReplayBuffer[Remembered]) -> set[tuple[int, int]]:
    return {(stored.step, stored.item.number) for stored in buffer.items if stored.item.number >= 0}


def draws_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The draws in a row of draws.jsonl; what is no draw is left out."""
    draws = row.get("draws")
    whole = [draw for draw in draws if isinstance(draw, dict)] if isinstance(draws, list) else []
    return [draw for draw in whole if "episode" in draw and type(draw.get("played")) is int]


def remove_later(run_dir: Path, step: int, *, eval_step: int) -> None:
    """Delete the episodes of steps that a resumed run takes again, as other settings may dump other steps."""
    for folder, first in ((TRAJECTORIES, step), (EPISODES, step), (EVALUATIONS, eval_step)):
        for path in (run_dir / folder).glob("*.jsonl"):
            named = re.fullmatch(r"(?:step|replayed|also_[\w.-]+_step)_(\d{6,18})\.jsonl", path.name)
            if named and int(named[1]) >= first and path.is_file():
                path.unlink()
    if any((run_dir / TRAJECTORIES).glob("*.parquet")):
        # Needs pyarrow, which a run without such files need not have.
        from spear_rl.io.episodes.parts import remove_later_steps

        remove_later_steps(run_dir / TRAJECTORIES, step)
