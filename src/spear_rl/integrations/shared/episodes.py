"""Rows of tokens that another framework played, as the core's groups. Knows no framework."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from spear_rl.types import Completion, Group, Stop, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Row:
    """Some turns of one episode, in the order of `number`."""

    group: str
    session: int
    """Which of the group's episodes."""
    number: int
    """Which of the episode's rows."""
    prompt: list[int]
    response: list[int]
    own: list[int]
    """1 where the policy wrote the response."""
    logprobs: list[float]
    """Of the response, by the trainer's account."""
    reward: float = 0.0
    """Of the episode."""
    weights: list[float] | None = None
    """What each token's advantage is multiplied by; None is 1."""
    episode: tuple[str, str, Trajectory] | None = None
    """Task, kind of task and episode, where the first row of one of ours brings it along."""


def packed(task: str, family: str, episode: Trajectory) -> bytes:
    """An episode on its way between processes: JSON, since reading a pickle runs what is in it."""
    turns = [
        {name: getattr(turn, name) for name in Turn.__slots__}
        | {"completion": {name: getattr(turn.completion, name) for name in Completion.__slots__}}
        | {"images": [base64.b64encode(image).decode() for image in turn.images]}
        for turn in episode.turns
    ]
    about = {"stop": episode.stop, "bonus": episode.bonus, "success": episode.success, "metrics": episode.metrics}
    return json.dumps([task, family, about | {"turns": turns}], default=lambda number: number.item()).encode()


def unpacked(content: bytes) -> tuple[str, str, Trajectory]:
    """Task, kind of task and episode, as `packed` got them."""
    task, family, told = json.loads(content)
    turns = []
    for turn in told.pop("turns"):
        images = tuple(base64.b64decode(image) for image in turn.pop("images"))
        turns.append(Turn(**turn | {"completion": Completion(**turn["completion"]), "images": images}))
    return task, family, Trajectory(**told | {"turns": turns, "stop": Stop(told["stop"])})


def groups_of(
    rows: Sequence[Row], *, step: int, group_size: int, max_length: int, text: Callable[[list[int]], str]
) -> list[Group]:
    """The groups, with the trainer's log-probabilities in place of the sampler's; missing episodes are lost ones.

    Args:
        max_length: a response of another agent loop that is as long was cut off.
        text: of some tokens.
    """
    groups: dict[str, Group] = {}
    ordered = sorted(rows, key=lambda row: (row.group, row.session, row.number))
    for (group, _), session in groupby(ordered, key=lambda row: (row.group, row.session)):
        own = list(session)
        turns = [turn for row in own for turn in turns_of(row, text)]
        truncated = len(own[-1].response) >= max_length
        task, family, played = own[0].episode or (group, "", episode_of(turns, own[-1].reward, truncated=truncated))
        episodes = groups.setdefault(group, Group(task, [], step, {"family": family})).trajectories
        episodes.append(_scored(played, own))
    whole = [replace(group, num_failed=max(group_size - len(group.trajectories), 0)) for group in groups.values()]
    return sorted(whole, key=lambda group: group.task_id)  # a framework's own names may be random


def turns_of(row: Row, text: Callable[[list[int]], str]) -> list[Turn]:
    """A turn is a stretch the policy wrote, and used a tool if something answered it.

    Prompt 1 2 and response 7 3 4 8 with own x . . x are the turns [1 2] -> 7, with a tool, and [1 2 7 3 4] -> 8.
    """
    turns, end = [], 0
    for wrote, stretch in groupby(row.own, key=bool):
        begin, end = end, end + len(list(stretch))
        if wrote:
            said, answered = row.response[begin:end], end < len(row.response)
            prompt = row.prompt + row.response[:begin]
            turns.append(Turn(prompt, Completion(said, []), used_tool=answered, text=text(said)))
    return turns


def episode_of(turns: Sequence[Turn], reward: float, *, truncated: bool) -> Trajectory:
    """An episode of such turns, whose last one earned the reward and may have hit a limit."""
    *earlier, last = turns or [Turn([], Completion([], []))]
    last = replace(last, reward=reward, completion=replace(last.completion, truncated=truncated))
    return Trajectory([*earlier, last], Stop.OVERLONG if truncated else Stop.DONE, success=reward > 0)


def _scored(played: Trajectory, rows: Sequence[Row]) -> Trajectory:
    """The episode with log-probabilities and weights of its rows: the policy's tokens come in the same order."""
    wrote = [(row, at) for row in rows for at, own in enumerate(row.own) if own]
    logprobs = iter([row.logprobs[at] for row, at in wrote])
    weights = iter([row.weights[at] for row, at in wrote if row.weights is not None])
    turns = []
    for turn in played.turns:
        size = len(turn.completion.token_ids)
        new = {"logprobs": list(islice(logprobs, size)), "weights": list(islice(weights, size)) or None}
        turns.append(replace(turn, completion=replace(turn.completion, **new)))  # type: ignore[arg-type]
    return replace(played, turns=turns)
