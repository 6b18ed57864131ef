"""ALFWorld's own games: on the household's simulator, which plays them to the letter, or on the stock engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from spear_rl.envs.alfworld.games import EXPERTS, demonstration, fast_env
from spear_rl.envs.alfworld.panel import SPLITS, in_turns, playable_games
from spear_rl.envs.alfworld.stock import require_stock_engine, stock_env
from spear_rl.envs.household.env import REWARD
from spear_rl.envs.household.sentences import FAMILIES as TYPES
from spear_rl.rollout.env import Task

__all__ = ["BACKENDS", "EXPERTS", "PROMPTS", "SPLITS", "TYPES", "tasks"]

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
"""What the policy is told: the paper's way, with thoughts, or in a few words for a small model, without."""


def tasks(
    split: str = "train",
    *,
    data: str = "",
    backend: str = "fast",
    types: Sequence[str] = (),
    expert: str = "search",
    prompt: str = "paper",
    reward: float = REWARD,
    order: str = "turns",
    max_tasks: int | None = None,
    cache: str = "",
) -> Sequence[Task]:
    """The games of a split: types taking turns, or sorted by id; `max_tasks` keeps the first ones of that order."""
    _check("backend", backend, BACKENDS)
    _check("expert", expert, EXPERTS)
    _check("prompt", prompt, PROMPTS)
    _check("order", order, ORDERS)
    for name in types:
        _check("type", name, TYPES)
    if backend == "textworld":
        require_stock_engine()
    entries = [entry for entry in playable_games(split, data=data, cache=cache) if not types or entry.family in types]
    if order == "turns":
        entries = in_turns(entries)
    return tuple(
        Task(
            id=entry.id,
            make_env=partial(fast_env, entry.path, entry.sha256, cache, reward)
            if backend == "fast"
            else partial(stock_env, entry.path, entry.sha256, reward),
            family=entry.family,
            instructions=PROMPTS[prompt],
            answer_format="<action>{action}</action>",
            demonstrate=partial(demonstration, entry.path, entry.sha256, cache, expert),
        )
        for entry in entries[:max_tasks]
    )


def _check(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: there is {', '.join(known)}")
