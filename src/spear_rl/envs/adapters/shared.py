"""What the adapters share: optional packages, panels of seeds, answers in free text, demonstrations by random play."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from spear_rl.envs.shared.answer_tags import ParsedAnswer
from spear_rl.envs.shared.dice import Dice
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.rollout.env import Environment
from spear_rl.rollout.rendering.conversation import without_thoughts

SPLITS = {"train": 2000, "validation": 200, "test": 200}
"""Tasks per split."""
FIRST_SEED = {"train": 0, "validation": 1_000_000, "test": 2_000_000}
"""Seed of the first task of a split; the others follow, so no two splits share a seed."""
EXPERTS = ("random", "none")
ANSWER_FORMAT = "<action>{action}</action>"
_NLTK_DATA = re.compile(r"nltk\.download\('(\w+)'\)")
MAX_ANSWER = 10_000
"""Characters of an action; longer answers are not passed on."""


def package(name: str, *, extra: str) -> Any:
    """The module `name`; MissingExtraError names the extra that has it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = f"task.env={extra}:... needs {error.name}, which is not installed"
        raise MissingExtraError(f"{missing}: pip install 'spear-rl[{extra}]'") from error
    except ImportError as error:
        raise ConfigError(f"task.env={extra}:... cannot import {name}: {in_words(error)}") from error


def seeds(split: str, max_tasks: int | None) -> Iterator[tuple[str, int]]:
    """(the end of a task's id, its seed) of every task of a split."""
    first = FIRST_SEED[split]
    numbered = ((f"{split}/{number:05d}", first + number) for number in range(SPLITS[split]))
    return islice(numbered, max_tasks)


def answered(text: str) -> ParsedAnswer:
    """The action in a policy's answer, as it is written: in the last action tag, or the whole text without thoughts."""
    said = without_thoughts(text)
    end = said.rfind("</action>")
    start = said.rfind("<action>", 0, end) if end >= 0 else -1
    if start < 0 and "<action>" in said:
        return ParsedAnswer("", "unclosed_tag")
    action = (said if start < 0 else said[start + len("<action>") : said.find("</action>", start)]).strip()
    if not action or "\0" in action or "</action>" in action:
        return ParsedAnswer("", "no_action")
    return ParsedAnswer("", "too_long") if len(action) > MAX_ANSWER else ParsedAnswer(action)


def state_key(*what: object) -> str:
    return hashlib.sha256(repr(what).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def best_random_play(
    make_env: Callable[[], Environment], tries: int, max_turns: int, actions: Sequence[str], seed: int
) -> list[str]:
    """The moves of the first random episode that is solved; if none of `tries` is, of the one with the most reward.

    Args:
        actions: to draw from; if empty, the environment's choices are.
    """
    env, dice = make_env(), Dice("random play", seed)
    best = (False, float("-inf"), 0, list[str]())
    try:
        for _ in range(tries):
            best = max(best, _random_episode(env, dice, actions, max_turns), key=lambda entry: entry[:3])
            if best[0]:
                break
    finally:
        env.close()
    return best[3]


def _random_episode(
    env: Environment, dice: Dice, actions: Sequence[str], max_turns: int
) -> tuple[bool, float, int, list[str]]:
    """(solved, reward, minus the number of moves, the moves) of one episode; refused moves are taken back."""
    seen, taken, refused = env.reset(), list[str](), set[str]()
    total, is_solved = 0.0, False
    while len(taken) < max_turns:
        left = [action for action in actions or seen.choices if action not in refused]
        if not left:
            break
        action = dice.choice(left)
        result = env.step(action)
        if result.invalid:
            refused.add(action)
            seen = env.reset()
            for earlier in taken:
                seen = env.step(earlier).observation
            continue
        taken.append(action)
        refused.clear()
        seen, total = result.observation, total + result.reward
        is_solved = total > 0 if result.success is None else result.success
        if result.done:
            break
    return is_solved, total, -len(taken), taken


def missing_word_list(error: BaseException) -> str:
    """The nltk data that an error says is missing, with the command that fetches it; empty for any other error."""
    found = _NLTK_DATA.search(str(error))
    return f"nltk's data {found[1]!r}: python -m nltk.downloader {found[1]}" if found else ""


def one_line(error: BaseException) -> str:
    """What a package says about a mistake, on one line."""
    return clipped(re.sub(r"\*{3,}|-{3,}|={3,}", "", in_words(error)), 300)
