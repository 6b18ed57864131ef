"""Episodes as verl's rows: prompt, response, and the spans of the response that the policy wrote. Knows no verl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spear_rl.algorithms.imitation import Replay
from spear_rl.functional import LossFn, LossInputs
from spear_rl.types import Completion, Stop, Trajectory, Turn

Span = tuple[int, int]
"""Start and length of a turn in its row's response."""
Fields = dict[str, Tensor]
"""One row as verl's workers read it."""
PAD_TOKENS = 128
"""Length of a row that only fills a batch up: verl's own choice, long enough for every parallel layout."""


class Row(NamedTuple):
    """Prompt, response, and the turns that the response holds, in order."""

    prompt: list[int]
    response: list[int]
    spans: list[Span]
    turns: list[Turn]


def rows_of(trajectory: Trajectory) -> list[Row]:
    """One row, or several where a prompt does not extend what came before it.

    Two turns with prompts [1 2] and [1 2 7 3 4] and answers [7] and [8] make one row:

        prompt [1 2]   response [7 3 4 8]   spans [(0, 1), (3, 1)]
    """
    rows: list[Row] = []
    for turn in trajectory.turns:
        so_far = [*rows[-1].prompt, *rows[-1].response] if rows else []
        if not rows or turn.prompt_ids[: len(so_far)] != so_far:
            rows.append(Row(turn.prompt_ids, [], [], []))
            so_far = turn.prompt_ids
        row = rows[-1]
        row.response.extend(turn.prompt_ids[len(so_far) :])
        row.spans.append((len(row.response), len(turn.completion.token_ids)))
        row.turns.append(turn)
        row.response.extend(turn.completion.token_ids)
    return rows


def spread(spans: Sequence[Span], values: Sequence[float], size: int) -> Tensor:
    """[T] one value a turn, on that turn's tokens; 0 between them."""
    out = torch.zeros(size)
    for (start, length), value in zip(spans, values, strict=True):
        out[start : start + length] = value
    return out


def spans_of(mask: Sequence[int]) -> list[Span]:
    """The runs of ones: where the turns are in a row whose agent loop is not ours."""
    ends = [(one, list(run)[-1][0] + 1) for one, run in groupby(enumerate(mask), key=lambda entry: bool(entry[1]))]
    starts = [0, *(end for _, end in ends)]
    return [(start, end - start) for start, (one, end) in zip(starts, ends, strict=False) if one]


def trajectory_of(
    rows: Sequence[tuple[list[int], list[int], list[Span]]],
    *,
    reward: float,
    max_length: int,
    decode: Callable[..., str],
) -> Trajectory:
    """An episode of such rows: a turn used a tool if something answered it, and the last one earned the reward."""
    truncated = len(rows[-1][1]) >= max_length
    turns = [
        Turn(
            [*prompt, *response[:start]],
            Completion(response[start : start + length], [], truncated and number == len(rows) - 1),
            used_tool=start + length < len(response),
            text=decode(response[start : start + length], skip_special_tokens=True),
        )
        for number, (prompt, response, spans) in enumerate(rows)
        for start, length in spans
    ]
    turns[-1] = replace(turns[-1], reward=reward)
    return Trajectory(turns, Stop.OVERLONG if truncated else Stop.DONE, success=reward > 0)


def fields_of(row: Row, advantages: Sequence[float], trains: Sequence[float]) -> Fields:
    """A row of a stored episode; its old log-probabilities are those it was stored with."""
    size = len(row.response)
    written, old = spread(row.spans, [1.0] * len(row.spans), size).long(), torch.zeros(size)
    for (start, length), turn in zip(row.spans, row.turns, strict=True):
        old[start : start + length] = torch.tensor(turn.completion.logprobs)
    return {
        "prompts": torch.tensor(row.prompt),
        "responses": torch.tensor(row.response),
        "input_ids": torch.tensor([*row.prompt, *row.response]),
        "position_ids": torch.arange(len(row.prompt) + size),
        "response_mask": written,
        "loss_mask": written,
        "old_log_probs": old,
        "advantages": spread(row.spans, advantages, size),
        "spear_mask": spread(row.spans, trains, size),
    }


def replay_rows(replay: Replay) -> Iterator[Fields]:
    """The rows of drawn episodes of which something trains."""
    for trajectory, values, reasons in zip(replay.trajectories, replay.turn_advantages, replay.dropped, strict=True):
        turns = iter(zip(values, reasons, strict=True))
        for row in rows_of(trajectory):
            own = [next(turns) for _ in row.spans]
            fields = fields_of(row, [value for value, _ in own], [float(not reason) for _, reason in own])
            if fields["spear_mask"].any():
                yield fields


def padding(token: int) -> Fields:
    """A row that trains nothing."""
    return fields_of(Row([token] * (PAD_TOKENS - 1), [token], [], []), [], [])


def hold_back(loss: LossFn, rows: Sequence[Fields], logprobs: Sequence[Tensor]) -> dict[str, float]:
    """Give the tokens that `loss` holds back for their covariance an advantage of 0; `rows` are one mini-batch's.

    A token with advantage 0 and one with weight 0 have the same loss, and both count in the reduction.
    """
    names = ("old_log_probs", "advantages", "spear_mask")
    old, advantages, mask = (pad_sequence([row[name] for row in rows], batch_first=True) for name in names)
    now = pad_sequence(list(logprobs), batch_first=True)
    kept = loss.keywords["keep"](LossInputs(now, old, advantages, mask))  # type: ignore[attr-defined]
    for row, weights in zip(rows, kept, strict=True):
        row["advantages"] = row["advantages"] * weights[: len(row["advantages"])]
    count = mask.sum().clamp(min=1)
    clipped, ratio = ((1 - kept) * mask).sum() / count, ((now - old).exp() * mask).sum() / count
    return {"replay/covariance_clip_fraction": float(clipped), "replay/ratio": float(ratio)}


def cells(num_policy: int, num_replay: int, *, dp: int, mini: int, unit: int, joint: bool) -> list[list[list[int]]]:
    """Which rows each of `dp` ranks sees in each optimizer step: [rank][mini-batch] -> row numbers.

    Policy rows are 0 .. num_policy - 1 and stay where verl put them, replay rows follow, -1 is a row to fill up with. A
    rank's share of a mini-batch grows by multiples of `unit`. 4 policy and 3 replay rows, two ranks, mini-batches of 2:

        joint      rank 0: [0 4] [1 5]         rank 1: [2 6] [3 -1]
        separate   rank 0: [0] [1] [4] [5]     rank 1: [2] [3] [6] [-1]
    """
    share, per_rank, end = mini // dp, num_policy // dp, num_policy + num_replay
    starts = range(0, per_rank, share)
    steps = [[list(range(r * per_rank + k, r * per_rank + k + share)) for k in starts] for r in range(dp)]
    num_steps = len(starts) if joint else -(-num_replay // mini)
    room = -(-num_replay // (num_steps * dp * unit)) * unit if joint else share
    for rank in range(dp):
        for number in range(num_steps):
            # Dealt out one by one, so that every optimizer step gets its share of them.
            dealt = list(range(num_policy + rank * num_steps + number, end, num_steps * dp))
            dealt += [-1] * (room - len(dealt))
            if joint:
                steps[rank][number] += dealt
            else:
                steps[rank].append(dealt)
    return steps


def take_notes(
    policy: Sequence[Fields], replay: Sequence[Fields], minis: Sequence[Sequence[int]], weight: float
) -> None:
    """Write into every row's `spear` what `JointLoss` must know: is it a replay row, the weight of replay, then the
    numbers of tokens and rows that train in its mini-batch, of the policy and of replay.
    """
    rows = [*policy, *replay]
    for numbers in minis:
        counts = []
        for kind in (False, True):
            sizes = [float(rows[n]["spear_mask"].sum()) for n in numbers if (n >= len(policy)) == kind]
            counts += [sum(sizes), float(sum(size > 0 for size in sizes))]
        for n in numbers:
            rows[n]["spear"] = torch.tensor([float(n >= len(policy)), weight, *counts], dtype=torch.float64)
