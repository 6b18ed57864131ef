"""Episodes in files of JSON lines: as agents' runs record them, with exact tokens, or as OpenAI chats.

A recorded episode, one per line:

    {"task": "t1", "family": "", "reward": 1.0, "success": true, "stop": "done", "turns": [
      {"prompt_ids": [1, 2], "token_ids": [7], "logprobs": [-0.1], "text": "look", "observation": "user: ...",
       "reward": 1.0, "tool": true}]}

An OpenAI chat: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, with
`tools`, `task`, `family`, `reward` and `success` where they are known. Each of its assistant messages is a turn.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from spear_rl.errors import ConfigError, UserError
from spear_rl.io.escaping import in_words
from spear_rl.io.files import write_whole, writing
from spear_rl.io.jsonl import numbered_lines
from spear_rl.rollout.agents.messages import MalformedError, checked_messages, checked_tools, said, transcript
from spear_rl.rollout.agents.rendering import AgentRenderer
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

EPISODES = "episodes"
"""The folder of a run with the episodes that agents played."""
PADDING = 512
"""A model's table of tokens may be longer than its tokenizer's: rounded up, to a multiple of this at most."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode of a file."""

    trajectory: Trajectory
    task: str = ""
    family: str = ""
    has_logprobs: bool = False
    """Whether they are those of the policy that sampled it; else they are 0."""


def write_records(path: Path, groups: Iterable[Group]) -> None:
    """The episodes of `groups`, one line each."""
    lines = [
        json.dumps(record_of(played, task=group.task_id, family=group.info.get("family", ""), step=group.step)) + "\n"
        for group in groups
        for played in group.trajectories
    ]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines))


def record_of(played: Trajectory, *, task: str, family: str, step: int) -> dict[str, Any]:
    """An episode as one JSON object that `read_records` reads back to the same episode."""
    turns = [
        {
            "prompt_ids": list(turn.prompt_ids),
            "token_ids": turn.completion.token_ids,
            "logprobs": turn.completion.logprobs,
            "text": turn.text,
            "observation": turn.observation,
            "reward": turn.reward,
        }
        | ({"tool": True} if turn.used_tool else {})
        | ({"invalid": turn.invalid} if turn.invalid else {})
        | ({"truncated": True} if turn.completion.truncated else {})
        for turn in played.turns
    ]
    about = {"task": task, "family": family, "step": step, "success": played.success, "reward": played.reward}
    return about | {"stop": str(played.stop), "turns": turns}


def read_records(path: str, renderer: AgentRenderer, *, key: str, count: int | None = None) -> list[Recorded]:
    """The first `count` episodes of a file, or all; an error names `key` as the setting that asks for the file.

    Left out are those with a token that a model sampled from the padding of its table and that no tokenizer has.
    """
    found = []
    for number, row in islice(_rows(path, key), count):
        try:
            found.append(_chat(row, renderer) if "messages" in row else _recorded(row, renderer))
        except (MalformedError, UserError) as error:
            raise ConfigError(f"{key}: {path}, line {number}: {error}") from error
    found = [recorded for recorded in found if _highest(recorded.trajectory) < renderer.vocabulary_size]
    if not found:
        raise ConfigError(f"{key}: {path} has no episode")
    return found


def num_records(path: str, *, key: str) -> int:
    """How many episodes a file has."""
    return sum(1 for _ in _rows(path, key))


def texts_in(path: str, *, key: str) -> list[str]:
    """Every text in the episodes of a file, the policy's and the others': to train a tokenizer from scratch on."""
    texts = []
    for number, row in _rows(path, key):
        try:
            if "messages" in row:
                texts += [said(message) for message in checked_messages(row["messages"])]
                texts += [json.dumps(tool) for tool in checked_tools(row.get("tools"))]
            else:
                texts += [str(turn.get(name, "")) for turn in row["turns"] for name in ("observation", "text")]
        except (MalformedError, LookupError, AttributeError, TypeError) as error:
            raise ConfigError(f"{key}: {path}, line {number} is no episode: {in_words(error)}") from error
    return texts


def _rows(path: str, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of its line, episode) of every episode."""
    for number, row in numbered_lines(path, key=key):
        if not isinstance(row, dict) or not ({"messages", "turns"} & row.keys()):
            raise ConfigError(f"{key}: {path}, line {number} has neither messages nor turns")
        yield number, row


def _recorded(row: dict[str, Any], renderer: AgentRenderer) -> Recorded:
    if not isinstance(row["turns"], list) or not row["turns"]:
        raise MalformedError("turns must be a list with at least one turn")
    turns = [_turn(turn, number, renderer.vocabulary_size) for number, turn in enumerate(row["turns"])]
    stop = row.get("stop", "done")
    if stop not in list(Stop):
        raise MalformedError(f"stop must be one of {', '.join(Stop)}")
    has_logprobs = all("logprobs" in turn for turn in row["turns"])
    success = _success(row, math.fsum(turn.reward for turn in turns))
    return Recorded(Trajectory(turns, Stop(stop), success=success), *_named(row), has_logprobs)


def _turn(value: Any, number: int, vocabulary_size: int) -> Turn:
    where = f"turns[{number}]"
    if not isinstance(value, dict) or not {"prompt_ids", "token_ids"} <= value.keys():
        raise MalformedError(f"{where} lacks prompt_ids or token_ids: give those, or the whole chat as messages")
    padded = -(-vocabulary_size // PADDING) * PADDING
    for name in ("prompt_ids", "token_ids"):
        ids = value[name]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < padded for i in ids):
            limit = f"0 to {vocabulary_size - 1}, those of the tokenizer"
            raise MalformedError(f"{where}.{name} must be a list of token ids from {limit}")
    ids, scores = value["token_ids"], value.get("logprobs", [0.0] * len(value["token_ids"]))
    is_scores = isinstance(scores, list) and len(scores) == len(ids)
    if not is_scores or not all(type(s) in (int, float) and math.isfinite(s) and s <= 1e-3 for s in scores):
        raise MalformedError(f"{where}.logprobs must be a list of log-probabilities, one per token id")
    completion = Completion(ids, [float(score) for score in scores], bool(value.get("truncated")))
    return Turn(
        value["prompt_ids"],
        completion,
        reward=_number(value.get("reward", 0.0), f"{where}.reward"),
        used_tool=bool(value.get("tool")),
        invalid=str(value.get("invalid", "")),
        observation=str(value.get("observation", "")),
        text=str(value.get("text", "")),
    )


def _highest(played: Trajectory) -> int:
    return max(max(max(turn.prompt_ids), max(turn.completion.token_ids)) for turn in played.turns)


def _chat(row: dict[str, Any], renderer: AgentRenderer) -> Recorded:
    """A chat as an episode: every assistant message is what a policy would have written, in a growing conversation."""
    messages, tools = checked_messages(row["messages"]), checked_tools(row.get("tools"))
    turns: list[Turn] = []
    begin = 0
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        new: Sequence[Any] = messages[begin:place]
        if turns:
            last = turns[-1]
            prompt = renderer.continued(last.prompt_ids, last.completion.token_ids, new, tools)
        elif new:
            prompt = renderer.conversation(new, tools)
        else:
            raise MalformedError("a chat must not begin with an assistant message")
        text, begin = renderer.written(message, tools), place + 1
        ids = renderer.answer(text)
        completion, used_tool = Completion(ids, [0.0] * len(ids)), bool(message.get("tool_calls"))
        turns.append(Turn(prompt, completion, used_tool=used_tool, observation=transcript(new), text=text))
    if not turns:
        raise MalformedError("messages have no assistant message to learn from")
    reward = _number(row.get("reward", 1.0), "reward")
    turns[-1] = replace(turns[-1], reward=reward)
    return Recorded(Trajectory(turns, Stop.DONE, success=_success(row, reward)), *_named(row))


def _named(row: dict[str, Any]) -> tuple[str, str]:
    return str(row.get("task", "")), str(row.get("family", ""))


def _success(row: dict[str, Any], reward: float) -> bool:
    success = row.get("success", reward > 0)
    if not isinstance(success, bool):
        raise MalformedError("success must be true or false")
    return success


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e15:
        raise MalformedError(f"{name} must be a finite number")
    return float(value)
