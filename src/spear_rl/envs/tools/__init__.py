"""Problems that a policy solves with tools: typed Python functions, a sandbox, a search engine, or MCP servers."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from spear_rl.envs.shared.generated_panels import SPLITS, content_split
from spear_rl.envs.tools.env import Problem, Reward, ToolEnv, is_same
from spear_rl.envs.tools.functions import Tool
from spear_rl.envs.tools.sources import described_tools
from spear_rl.errors import OptionError
from spear_rl.io.escaping import in_words
from spear_rl.rollout.env import Task
from spear_rl.rollout.rendering.tool_calls import FORMATS, instructions, written
from spear_rl.settings.names import option_function
from spear_rl.settings.ranges import Length, OneOf, Range, has_checked_options, shown

__all__ = ["CALLS", "Problem", "Tool", "ToolEnv", "demonstration", "panel", "tasks"]

_TOLD = "Answer the question. Use the tools where they help."
_ANSWER = "When you know the answer, write it within <answer></answer>."
CALLS = {"template": "as the model's chat template asks; hermes where it has no tools", **FORMATS}
"""Formats that the policy can be asked for."""


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    tools: Any = (),
    problems: Annotated[str, Length(0, 4096, "characters")] = "",
    reward: Annotated[str, Length(0, 256, "characters")] = "",
    calls: Annotated[str, OneOf(CALLS, "format", CALLS)] = "template",
    told: Annotated[str, Length(0, 100_000, "characters")] = _TOLD,
    max_turns: Annotated[int, Range(1, 10_000, unit="turns")] = 8,
    output_chars: Annotated[int, Range(1, 1_000_000, unit="characters")] = 4000,
    max_tasks: Annotated[int, Range(0, 10_000_000)] | None = None,
) -> Sequence[Task]:
    """The problems of a split.

    Args:
        tools: where the tools come from, one source or a list (`spear_rl.envs.tools.sources`).
        problems: a file of JSON lines, or your module:function from a split to a list of dicts. A problem has
            `question` and `answer`; `id`, `family`, `split` and `demonstration` if it likes. Without a `split` its
            content decides.
        told: what the policy is told before the description of the tools.
        reward: your module:function from a problem and an answer to a number; by default 1 for the same answer.
        calls: the format that the policy is asked for and demonstrations have: the chat template's, or one that the
            instructions ask for. Calls are read in every format.
    """
    if not problems:
        raise OptionError("problems is empty: give a file of JSON lines, or my_module:function")
    names = (tools,) if isinstance(tools, str) else tuple(tools) if isinstance(tools, list | tuple) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise OptionError(f"tools takes a text or a list of texts, e.g. tools=my_tools:functions; got {shown(tools)}")
    chosen = _problems(problems, split)[:max_tasks]
    return panel(
        "tools", split, chosen, names, told=told, style=calls, reward=reward, max_turns=max_turns,
        output_chars=output_chars,
    )  # fmt: skip


def panel(
    env: str,
    split: str,
    problems: Iterable[Problem],
    sources: Sequence[str],
    *,
    told: str = _TOLD,
    style: str = "template",
    reward: str = "",
    max_turns: int = 8,
    output_chars: int = 4000,
) -> tuple[Task, ...]:
    """The tasks of problems with tools; for environments that bring problems of their own."""
    schemas = [tool.schema for tool in described_tools(sources)]
    described = "" if style == "template" else f"{instructions(schemas, style)}\n"
    text = f"{told}\n\n{described}{_ANSWER}".strip()
    if reward:
        _users_reward(reward)
    return tuple(
        Task(
            id=f"{env}/{split}/{problem.id}",
            make_env=partial(_env, problem, tuple(sources), reward, max_turns, output_chars),
            family=problem.family,
            instructions=text,
            instructions_role="system",
            demonstrate=partial(demonstration, problem, style) if problem.demonstration else None,
            tools=tuple(json.dumps(schema) for schema in schemas) if style == "template" else (),
        )
        for problem in problems
    )


def _env(problem: Problem, sources: Sequence[str], reward: str, max_turns: int, output_chars: int) -> ToolEnv:
    return ToolEnv(problem, sources, _users_reward(reward) if reward else is_same, max_turns, output_chars)


def demonstration(problem: Problem, style: str, seed: int) -> list[str]:
    """The problem's demonstration, whatever the seed: text turns as they are, calls in the format."""
    return [
        turn if isinstance(turn, str) else written(turn["name"], turn.get("arguments", {}), style)
        for turn in problem.demonstration
    ]


@lru_cache(maxsize=16)
def _users_reward(name: str) -> Reward:
    return option_function(name, "reward")


def _problems(source: str, split: str) -> list[Problem]:
    path = Path(source)
    if path.suffix in (".jsonl", ".json") or path.is_file():
        rows: Iterable[Any] = _lines(path)
    else:
        function = option_function(source, "problems")
        try:
            rows = [{**row, "split": split} if isinstance(row, Mapping) else row for row in function(split)]
        except Exception as error:  # the user's own code
            raise OptionError(f"problems: {source} raised {in_words(error)} for the split {split}") from error
    found = [_problem(row, number, source) for number, row in enumerate(rows, 1)]
    return [problem for problem, own in found if own == split]


def _lines(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at separators within a JSON text
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"problems: {path} cannot be read ({in_words(error)})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise OptionError(f"problems: line {number} of {path} is not JSON ({in_words(error)})") from error
    return rows


def _problem(row: Any, number: int, source: str) -> tuple[Problem, str]:
    """(the problem of a row, its split)."""
    if not isinstance(row, Mapping) or not isinstance(row.get("question"), str) or not row["question"].strip():
        raise OptionError(f'problems: problem {number} of {source} is no object with a text "question"')
    shape = row.get("demonstration", ())
    turns = tuple(shape) if isinstance(shape, list | tuple) else None
    if turns is None or not all(isinstance(t, str) or (isinstance(t, Mapping) and "name" in t) for t in turns):
        raise OptionError(f'problems: "demonstration" of problem {number} of {source} is no list of texts and calls')
    content = hashlib.sha256(row["question"].encode("utf-8", "surrogatepass")).hexdigest()
    own = str(row.get("id") or f"{number:05d}")
    split = str(row.get("split") or content_split(content))
    return Problem(
        own, row["question"], str(row.get("answer", "")), str(row.get("family", "")), turns, dict(row)
    ), split
