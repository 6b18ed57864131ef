"""Rows of tokens that another framework samples and trains on, to and from the core's episodes. Knows no framework."""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

import torch
from torch import Tensor

from spear_rl.engines.base import Batch
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn, turn_as_dict, turn_from_dict


@dataclass(frozen=True, slots=True)
class Row:
    """One or more turns of an episode; an episode's rows are ordered by `number`."""

    group: str
    session: int  # the episode's number in its group
    number: int  # the row's number in its episode
    prompt: list[int]
    response: list[int]
    own: list[int]  # 1 on the tokens of the response that the policy wrote
    logprobs: list[float]  # of the response, by the trainer
    reward: float = 0.0  # of the episode
    weights: list[float] | None = None  # multiply each token's advantage; None is 1
    episode: tuple[str, str, Trajectory] | None = None  # with task and family; in the first row of one of ours


def to_json(task: str, family: str, episode: Trajectory) -> bytes:
    """An episode for another process; not a pickle, since loading one can run code."""
    turns = [
        turn_as_dict(turn) | {"images": [base64.b64encode(image).decode() for image in turn.images]}
        for turn in episode.turns
    ]
    about = {name: getattr(episode, name) for name in Trajectory.__slots__ if name != "turns"}
    return json.dumps([task, family, about | {"turns": turns}], default=lambda number: number.item()).encode()


def from_json(content: bytes) -> tuple[str, str, Trajectory]:
    """Task, family and episode, as `to_json` was given them."""
    task, family, fields = json.loads(content)
    turns = []
    for turn in fields.pop("turns"):
        images = tuple(base64.b64decode(image) for image in turn.pop("images"))
        turns.append(turn_from_dict(turn | {"images": images}))
    return task, family, Trajectory(**fields | {"turns": turns, "stop": Stop(fields["stop"])})


def groups_of(
    rows: Sequence[Row], *, step: int, group_size: int, max_length: int, text: Callable[[list[int]], str]
) -> list[Group]:
    """The groups, with the trainer's log-probabilities instead of the sampler's; missing episodes count as failed.

    Args:
        max_length: a response of this length, of another agent loop, was truncated.
        text: decodes tokens.
    """
    groups: dict[str, Group] = {}
    ordered = sorted(rows, key=lambda row: (row.group, row.session, row.number))
    for (group, _), session in groupby(ordered, key=lambda row: (row.group, row.session)):
        own = list(session)
        if own[0].episode:
            task, family, played = own[0].episode
            played = _with_scores(played, own)
        else:
            turns = [turn for row in own for turn in turns_of(row, text)]
            stop = Stop.OVERLONG if len(own[-1].response) >= max_length else Stop.DONE
            task, family, played = group, "", episode_of(turns, own[-1].reward, stop, success=own[-1].reward > 0)
        groups.setdefault(group, Group(task, [], step, {"family": family})).trajectories.append(played)
    whole = [replace(group, num_failed=max(group_size - len(group.trajectories), 0)) for group in groups.values()]
    return sorted(whole, key=lambda group: group.task_id)  # the framework's own names may be random


def turns_of(row: Row, text: Callable[[list[int]], str] | None = None) -> list[Turn]:
    """One turn per run of tokens that the policy wrote; it used a tool if other tokens follow.

    Prompt 1 2 and response 7 3 4 8 with own x . . x are the turns [1 2] -> 7, with a tool, and [1 2 7 3 4] -> 8.
    """
    turns, end = [], 0
    for is_own, run in groupby(row.own, key=bool):
        begin, end = end, end + len(list(run))
        if is_own:
            ids, weights = row.response[begin:end], row.weights[begin:end] if row.weights else None
            completion = Completion(ids, row.logprobs[begin:end], weights=weights)
            prompt, used_tool = row.prompt + row.response[:begin], end < len(row.response)
            turns.append(Turn(prompt, completion, used_tool=used_tool, text=text(ids) if text else ""))
    return turns


def episode_of(turns: Sequence[Turn], reward: float, stop: Stop = Stop.DONE, *, success: bool = False) -> Trajectory:
    """The episode of these turns; its last turn gets the reward."""
    *earlier, last = turns or [Turn([], Completion([], []))]
    completion = replace(last.completion, truncated=stop is Stop.OVERLONG)
    return Trajectory([*earlier, replace(last, reward=reward, completion=completion)], stop, success=success)


def _with_scores(played: Trajectory, rows: Sequence[Row]) -> Trajectory:
    """The episode with log-probabilities and weights of its rows, which hold the policy's tokens in the same order."""
    own = [(row, at) for row in rows for at, is_own in enumerate(row.own) if is_own]
    logprobs = iter([row.logprobs[at] for row, at in own])
    weights = iter([row.weights[at] for row, at in own if row.weights is not None])
    turns = []
    for turn in played.turns:
        size = len(turn.completion.token_ids)
        own_weights = list(islice(weights, size)) or None
        completion = replace(turn.completion, logprobs=list(islice(logprobs, size)), weights=own_weights)
        turns.append(replace(turn, completion=completion))
    return replace(played, turns=turns)


def fields_of(batch: Batch) -> list[dict[str, Tensor]]:
    """A batch's rows without padding, by verl's names; the prompt ends before the first token that trains."""
    rows = []
    for number, mask in enumerate(batch.mask):
        size, start = int(batch.attention[number].sum()), int(mask.int().argmax())
        ids, trains = batch.input_ids[number, :size], mask[start:size].long()
        row = {"input_ids": ids, "position_ids": torch.arange(size), "prompts": ids[:start], "responses": ids[start:]}
        row |= {"response_mask": trains, "loss_mask": trains, "old_log_probs": batch.old_logprobs[number, start:size]}
        rows.append(row | {"advantages": batch.advantages[number, start:size]})
    return rows
