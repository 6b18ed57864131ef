"""Worked examples: the turns of a solved episode, with thoughts, from an environment's experts or a user's file."""

import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spear_rl.errors import ConfigError
from spear_rl.io.escaping import clipped
from spear_rl.rollout.collect import EpisodesFailedError, demonstration
from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.rendering.renderer import MessageRenderer, Renderer
from spear_rl.rollout.workers.runner import EnvRunner
from spear_rl.types import Trajectory, Turn

ANY_FAMILY = "*"
"""In a file: examples for the families that it does not name."""
MAX_TRIES = 32
"""Demonstrations of one family that are played to find solved ones."""
MAX_FILE_BYTES = 10_000_000
_MAX_QUOTED = 160
"""Characters of an observation or action that a derived thought repeats."""
_TURN_KEYS = ("observation", "thought", "action")


@dataclass(frozen=True, slots=True)
class ExampleTurn:
    """What was seen, thought and done."""

    observation: str
    thought: str
    action: str


@dataclass(frozen=True, slots=True)
class Example:
    """A solved episode."""

    source: str
    """The id of its task, or its place in a file."""
    turns: tuple[ExampleTurn, ...]


Examples = Mapping[str, Sequence[Example]]
"""By family."""


def expert_examples(
    families: Sequence[str], panel: Sequence[Task], *, count: int, excluded: frozenset[str], seed: int, envs: EnvRunner
) -> dict[str, tuple[Example, ...]]:
    """`count` solved expert episodes per family, of the panel's tasks in an order that depends on the seed.

    A family with fewer than `count` of them gets examples of other families as well.

    Args:
        panel: the training tasks.
        excluded: ids of tasks that must not be shown.
    """
    order = random.Random(f"examples/{seed}").sample(range(len(panel)), len(panel))
    found: dict[str | None, list[Example]] = {family: [] for family in [*families, None]}
    num_tries: Counter[str | None] = Counter()

    def search(kinds: Sequence[str | None]) -> None:
        """Fill `found` with examples of these kinds: families, or None for the tasks of all others."""
        for index in order:
            wanted = [kind for kind in kinds if len(found[kind]) < count and num_tries[kind] < MAX_TRIES]
            if not wanted:
                return
            task = panel[index]
            kind = task.family if task.family in families else None
            if kind in wanted and task.id not in excluded and task.demonstrate is not None:
                num_tries[kind] += 1
                example = _solved_example(task, seed=seed * 1_000_003 + index, envs=envs)
                if example and all(example.turns != other.turns for other in found[kind]):
                    found[kind].append(example)

    search(families)
    if any(len(found[family]) < count for family in families):
        search([None])
    spare = [example for got in found.values() for example in got]
    if not spare:
        tried = f"the expert solved none of {num_tries.total()} training tasks"
        none = "no task of the train split has an expert"
        raise ConfigError(f"{tried if num_tries else none}, so there is no worked example: give --examples FILE")
    return {
        family: (*found[family], *(example for example in spare if example not in found[family]))[:count]
        for family in families
    }


def _solved_example(task: Task, *, seed: int, envs: EnvRunner) -> Example | None:
    try:
        played = demonstration(
            task, renderer=MessageRenderer(), layout=_text_only, tagged=True, seed=seed, envs=envs
        )  # fmt: skip
    except EpisodesFailedError:
        return None
    return Example(task.id, tuple(_with_thoughts(task, played))) if played.success and played.turns else None


def _text_only(renderer: Renderer, task: Task, observations: Sequence[Observation], turns: Sequence[Turn]) -> list[int]:
    if observations[-1].images:
        raise ConfigError(
            "worked examples are text, and the environment shows images: set task.options.observation=text, or play "
            "--prompting reflexion --shots 0"
        )
    return renderer.prompt([{"role": "user", "content": observations[-1].text}])


def _with_thoughts(task: Task, played: Trajectory) -> list[ExampleTurn]:
    """The turns of a demonstration. Experts have no thoughts: each says what was seen and which action follows."""
    before, _, after = task.answer_format.format(action="\0").partition("\0")
    turns = []
    for number, turn in enumerate(played.turns):
        action = turn.text.removeprefix(before).removesuffix(after)
        first_line = turn.observation.partition("\n")[0]
        seen = f"I see{_quoted(first_line)}." if number else "I have read the task."
        step = "The last step" if number == len(played.turns) - 1 else "The next step"
        turns.append(ExampleTurn(turn.observation, f"{seen} {step} is{_quoted(action)}.", action))
    return turns


def _quoted(text: str) -> str:
    """A short text in quotation marks; a long one, or one with tags or several lines, is only pointed at."""
    line = text.strip()
    return f' "{line}"' if len(line) <= _MAX_QUOTED and not re.search(r"[<\n]", line) else " this"


def examples_in(path: str) -> dict[str, tuple[Example, ...]]:
    """The examples in a user's JSON or TOML file (its name ends in .toml).

    Family -> a list of examples, each a list of turns; or a list of turns, which is one example:

        {"red": [{"observation": "red code ?", "thought": "I do not know the digit yet.", "action": "look"}, ...]}
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--examples: {clipped(path, 300)} cannot be read") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"--examples: {path} has more than {MAX_FILE_BYTES:,} bytes")
    kind, loads = ("TOML", tomllib.loads) if path.lower().endswith(".toml") else ("JSON", json.loads)
    try:
        table = loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--examples: {path} is not valid {kind}: {clipped(str(error), 200)}") from error
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"--examples: {path} must be a table: family = list of examples")
    return {family: tuple(_family_examples(family, entry, path)) for family, entry in table.items()}


def _family_examples(family: str, entry: Any, path: str) -> list[Example]:
    where = f"--examples: {path}: {clipped(family, 100)}"
    if not isinstance(entry, list) or not entry:
        raise ConfigError(f"{where} must be a list of examples, each a list of turns")
    episodes = [entry] if all(isinstance(turn, dict) for turn in entry) else entry
    examples = []
    for number, turns in enumerate(episodes):
        place = f"{where}[{number}]"
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{place} must be a list of turns")
        examples.append(
            Example(f"{family}[{number}]", tuple(_turn(turn, f"{place}[{n}]") for n, turn in enumerate(turns)))
        )
    return examples


def _turn(entry: Any, where: str) -> ExampleTurn:
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise ConfigError(f"{where} must be a table of texts: {', '.join(_TURN_KEYS)}")
    for key in entry:
        if key not in _TURN_KEYS:
            raise ConfigError(f"{where} has an unknown key {clipped(key, 60)!r}: a turn has {', '.join(_TURN_KEYS)}")
    if not entry.get("action", "").strip():
        raise ConfigError(f"{where} has no action")
    return ExampleTurn(entry.get("observation", ""), entry.get("thought", ""), entry["action"])
