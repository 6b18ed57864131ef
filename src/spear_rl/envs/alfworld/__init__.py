"""ALFWorld's own games, on the household simulator (backend `fast`) or on ALFWorld's engine (backend `textworld`)."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from spear_rl.envs.alfworld.games import EXPERTS, demonstration, fast_env
from spear_rl.envs.alfworld.panel import HELD_OUT, SPLITS, games_of, interleaved
from spear_rl.envs.alfworld.stock import require_stock_engine, stock_env
from spear_rl.envs.household.env import REWARD
from spear_rl.envs.household.families import FAMILIES as TYPES
from spear_rl.envs.shared.answer_tags import RULES
from spear_rl.rollout.env import Task
from spear_rl.settings.ranges import FilePath, OneOf, Range, has_checked_options

__all__ = ["BACKENDS", "EXPERTS", "HELD_OUT", "PROMPTS", "SPLITS", "TYPES", "tasks"]

BACKENDS = ("fast", "textworld")
ORDERS = ("turns", "sorted")

PROMPTS = {
    "paper": (
        "You act in a household that is described to you in text, and you have to complete the task you are given. "
        "At every step you read what you see now and which actions are possible. "
        "First reason step by step about the situation within <think> </think>. "
        "Then choose exactly one of the possible actions and give it within <action> </action>."
    ),
    "short": "You act in a house. Choose one of the possible actions and answer <action>...</action>.",
}
"""Instructions: as in the paper, with thoughts; or one sentence without, for small models."""


@has_checked_options
def tasks(
    split: str = "train",
    *,
    data: Annotated[str, FilePath(may_be_empty=True)] = "",
    backend: Annotated[str, OneOf(BACKENDS, "backend")] = "fast",
    types: Sequence[Annotated[str, OneOf(TYPES, "type")]] = (),
    expert: Annotated[str, OneOf(EXPERTS, "expert")] = "search",
    prompt: Annotated[str, OneOf(PROMPTS, "prompt")] = "paper",
    reward: Annotated[float, Range(0, 1_000_000, "(]")] = REWARD,
    invalid: Annotated[str, OneOf(RULES, "rule")] = "strict",
    order: Annotated[str, OneOf(ORDERS, "order")] = "turns",
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
    hold_out_scenes: Annotated[int, Range(0, 1_000_000)] | Sequence[Annotated[int, Range(0, 1_000_000)]] = 0,
    cache: Annotated[str, FilePath(may_be_empty=True)] = "",
) -> Sequence[Task]:
    """The first `max_tasks` games of a split: with the types alternating (order turns), or sorted by id.

    Args:
        hold_out_scenes: leaves the games in these scenes, or in this many of each type of room, out of train; they are
            the split held_out.
    """
    if backend == "textworld":
        require_stock_engine()
    games = games_of(split, hold_out=hold_out_scenes, data=data, cache=cache)
    entries = [entry for entry in games if not types or entry.family in types]
    if order == "turns":
        entries = interleaved(entries)
    make_env = partial(fast_env, cache=cache) if backend == "fast" else stock_env
    return tuple(
        Task(
            id=entry.id,
            make_env=partial(make_env, entry.path, entry.sha256, reward=reward, invalid=invalid),
            family=entry.family,
            instructions=PROMPTS[prompt],
            answer_format=RULES[invalid],
            demonstrate=partial(demonstration, entry.path, entry.sha256, cache, expert),
        )
        for entry in entries[:max_tasks]
    )
