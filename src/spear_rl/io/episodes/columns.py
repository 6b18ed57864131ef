"""The columns of a part, and episodes as rows of them.

The columns of an episode are repeated on each of its turns, where run lengths and dictionaries make them almost free.
So a file is complete in itself, any parquet reader understands it, and the index of a run is a projection of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from spear_rl.types import Group, Trajectory, Turn

EPISODE = {
    "step": pa.int32(),
    "group": pa.int32(),
    "episode": pa.int32(),
    "task": pa.string(),
    "family": pa.string(),
    "success": pa.bool_(),
    "reward": pa.float64(),
    "bonus": pa.float64(),
    "advantage": pa.float64(),
    "stop": pa.string(),
    "turns": pa.int32(),
    "tool_turns": pa.int32(),
    "tokens": pa.int32(),
    "given": pa.int32(),
    "group_success": pa.float32(),
    "dropped": pa.string(),
    "measures": pa.string(),
}
"""Columns of an episode. `group` and `episode` are its places in the step, `advantage` the mean of its turns, `tokens`
those that the policy wrote, `dropped` the reasons for which turns of it did not train, `measures` JSON."""

NAMES = ("task", "family", "stop", "dropped", "measures")
"""Columns of an episode with few different values, read as dictionaries."""

TURN = {
    "turn": pa.int32(),
    "observation": pa.large_string(),
    "text": pa.large_string(),
    "action": pa.large_string(),
    "turn_reward": pa.float64(),
    "shaping": pa.float64(),
    "turn_advantage": pa.float64(),
    "turn_dropped": pa.string(),
    "state_key": pa.large_string(),
    "tool": pa.bool_(),
    "invalid": pa.string(),
    "truncated": pa.bool_(),
    "prompt_kept": pa.int32(),
    "prompt_ids": pa.large_list(pa.int32()),
    "token_ids": pa.large_list(pa.int32()),
    "logprobs": pa.large_list(pa.float32()),
    "entropies": pa.large_list(pa.float32()),
    "images_kept": pa.int32(),
    "images": pa.large_list(pa.large_binary()),
    "last_observation": pa.large_string(),
}
"""Columns of a turn; -1 is the one row of an episode without turns. A prompt begins with the first `prompt_kept` tokens
of the turn before it (its prompt and answer), and goes on with `prompt_ids`; the same for images. `entropies` is null
where the engine gives none, `last_observation` where another turn follows."""

TEXTS = (
    "observation", "text", "action", "state_key", "prompt_ids", "token_ids", "logprobs", "entropies", "images",
    "last_observation",
)  # fmt: skip
"""What is left out of the oldest steps to keep the bound on disk use: almost all of a part's size."""

SCHEMA = pa.schema(list((EPISODE | TURN).items()))


def table_of(
    step: int,
    groups: Sequence[Group],
    turn_advantages: Sequence[Sequence[float]] | None = None,
    dropped: Sequence[Sequence[str]] | None = None,
) -> pa.Table:
    """The episodes of a step, one row per turn; the lists have one entry per episode, in the order of the groups."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    of_group = [(place, group, group.success) for place, group in enumerate(groups)]
    played = [(place, group, solved, t) for place, group, solved in of_group for t in group.trajectories]
    for number, (place, group, solved, t) in enumerate(played):
        count = max(len(t.turns), 1)
        advantages = list(turn_advantages[number]) if turn_advantages else []
        reasons = list(dropped[number]) if dropped else []
        about = _about(t, group, advantages, reasons)
        about |= {"step": step, "group": place, "episode": number, "group_success": solved}
        for name, value in about.items():
            columns[name] += [value] * count
        _add_turns(columns, t, advantages or [None] * count, reasons or [""] * count)
    return _table(columns)


def _about(t: Trajectory, group: Group, advantages: list[float], reasons: list[str]) -> dict[str, Any]:
    return {
        "task": group.task_id,
        "family": group.info.get("family", ""),
        "success": t.success,
        "reward": t.reward,
        "bonus": t.bonus,
        "advantage": sum(advantages) / len(advantages) if advantages else None,
        "stop": str(t.stop),
        "turns": len(t.turns),
        "tool_turns": t.num_tool_turns,
        "tokens": t.num_tokens,
        "given": t.num_given,
        "dropped": reasons_text(reasons),
        "measures": json.dumps(t.metrics) if t.metrics else "",
    }


def reasons_text(reasons: Iterable[str]) -> str:
    """The different reasons for which turns did not train, as one text."""
    return ",".join(sorted(set(reasons) - {""}))


def _add_turns(columns: dict[str, list[Any]], t: Trajectory, advantages: Sequence[Any], reasons: Sequence[str]) -> None:
    before: Turn | None = None
    for place, turn in enumerate(t.turns):
        kept = _num_kept(turn, before)
        images_kept = _num_shared(turn.images, before.images) if before else 0
        row = (
            place, turn.observation, turn.text, turn.action, turn.reward, turn.shaping, advantages[place],
            reasons[place], turn.state_key, turn.used_tool, turn.invalid, turn.completion.truncated, kept,
            turn.prompt_ids[kept:], turn.completion.token_ids, turn.completion.logprobs, turn.completion.entropies,
            images_kept, turn.images[images_kept:], None,
        )  # fmt: skip
        for name, value in zip(TURN, row, strict=True):
            columns[name].append(value)
        before = turn
    if before is None:
        for name in TURN:
            columns[name].append(-1 if name == "turn" else None)
    columns["last_observation"][-1] = t.last_observation


def _num_kept(turn: Turn, before: Turn | None) -> int:
    """How many of the first tokens of its prompt are the prompt and the answer of the turn before it."""
    if before is None:
        return 0
    prompt, own = before.prompt_ids, turn.prompt_ids
    if own[: len(prompt)] != prompt:
        return _num_shared(own, prompt)
    answer = before.completion.token_ids
    return len(prompt) + _num_shared(own[len(prompt) : len(prompt) + len(answer)], answer)


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    if one[: len(other)] == other:
        return len(other)
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _table(columns: Mapping[str, list[Any]]) -> pa.Table:
    return pa.table([_array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_large_list(kind) and pa.types.is_primitive(kind.value_type):
        return _numbers(values, kind)
    if pa.types.is_large_string(kind) or pa.types.is_string(kind):
        try:
            return pa.array(values, kind)
        except UnicodeEncodeError:  # lone surrogates, which UTF-8 cannot hold, are kept as their escapes
            whole = [v if v is None else v.encode("utf-8", "backslashreplace").decode() for v in values]
            return pa.array(whole, kind)
    return pa.array(values, kind)


def _numbers(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Lists of numbers, flattened in one go: several times quicker than one by one."""
    ends = np.cumsum([0, *(len(v) if v is not None else 0 for v in values)], dtype=np.int64)
    number = np.int32 if pa.types.is_integer(kind.value_type) else np.float32  # SCHEMA's lists have no others
    flat = np.fromiter(chain.from_iterable(v for v in values if v is not None), number)
    missing = np.fromiter((v is None for v in values), np.bool_, len(values))
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat), type=kind, mask=pa.array(missing))


def without_texts(table: pa.Table) -> pa.Table:
    """The same rows with null for everything in TEXTS."""
    for name in TEXTS:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
    return table


def table_of_json(episodes: Iterable[Mapping[str, Any]], step: int) -> pa.Table:
    """Episodes as JSON lines keep them; siblings are those in a row with the same task. ValueError if one is none."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    place, task = -1, object()
    for number, episode in enumerate(episodes):
        turns = episode.get("turns") or []
        place, task = (place, task) if episode.get("task") == task else (place + 1, episode.get("task"))
        advantages = [turn["advantage"] for turn in turns if turn.get("advantage") is not None]
        measures = episode.get("metrics")
        about = dict.fromkeys(EPISODE) | {
            "step": step,
            "group": place,
            "episode": number,
            "task": str(episode.get("task", "")),
            "family": str(episode.get("family", "")),
            "success": bool(episode.get("success")),
            "reward": number_in(episode.get("reward")),
            "bonus": number_in(episode.get("bonus")),
            "advantage": number_in(sum(advantages) / len(advantages)) if advantages else None,
            "stop": str(episode.get("stop", "")),
            "turns": len(turns),
            "tool_turns": sum(bool(turn.get("tool")) for turn in turns),
            "dropped": reasons_text(str(turn.get("dropped", "")) for turn in turns),
            "measures": json.dumps(measures) if measures else "",
        }
        for name, value in about.items():
            columns[name] += [value] * max(len(turns), 1)
        for n, turn in enumerate(turns or [{}]):
            row = dict.fromkeys(TURN) | {
                "turn": n if turns else -1,
                "observation": _text(turn.get("observation")),
                "text": _text(turn.get("text")),
                "turn_reward": number_in(turn.get("reward")),
                "turn_advantage": number_in(turn.get("advantage")),
                "turn_dropped": str(turn.get("dropped", "")),
                "tool": bool(turn.get("tool")),
                "invalid": str(turn.get("invalid", "")),
                "truncated": bool(turn.get("truncated")),
            }
            for name, value in row.items():
                columns[name].append(value)
        columns["last_observation"][-1] = _text(episode.get("last_observation"))
    return _table(columns)


def number_in(value: Any) -> float | None:
    """A finite number; JSON may hold others, and integers that are larger than any."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e308 else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


Pieces = Callable[[list[int]], list[str]]
"""Token ids in, the text of each out."""
