"""WebShop in pure Python: an embedded catalogue, or WebShop's own files where a user has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, overload

from spear_rl.envs.webshop.data.files import found_files
from spear_rl.envs.webshop.data.goals import SPLITS
from spear_rl.envs.webshop.data.product import Goal
from spear_rl.envs.webshop.data.shelf import Shop, Source, opened_shop
from spear_rl.envs.webshop.env import REWARD, Rules, WebShopEnv
from spear_rl.envs.webshop.generated.catalogue import SEED
from spear_rl.envs.webshop.generated.tiny import NUM_TINY
from spear_rl.envs.webshop.session import MAX_TURNS, PAGE_SIZE
from spear_rl.envs.webshop.shoppers import EXPERTS
from spear_rl.envs.webshop.views import VIEWS
from spear_rl.rollout.env import Task
from spear_rl.settings.ranges import FilePath, Length, OneOf, Range, has_checked_options

__all__ = ["EXPERTS", "LEVELS", "PROMPTS", "SPLITS", "VIEWS", "Rules", "Source", "WebShopEnv", "source_of", "tasks"]

LEVELS = ("standard", "tiny", "files")
NUM_STANDARD = 4000

PROMPTS = {
    "paper": (
        "You are an agent that shops on a website for somebody, and you have to buy what the instruction asks for. "
        "At every step you read the page you are on and which actions are possible. "
        "First reason step by step about the situation within <think> </think>. "
        "Then choose exactly one of the possible actions, with words of your own in a search, "
        "and give it within <action> </action>."
    ),
    "short": "You shop on a website. Choose one of the possible actions and answer <action>...</action>.",
}
"""What the policy is told: the paper's way, with thoughts, or in a few words for a small model, without."""


NumProducts = Annotated[int, Range(0, 2_000_000)]
Seed = Annotated[int, Range(0, 2**31 - 1)]
Goals = Annotated[str, OneOf(("human", "synthetic"), "goals")]
Folder = Annotated[str, FilePath(may_be_empty=True)]


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    level: Annotated[str, OneOf(LEVELS, "level")] = "standard",
    num_products: NumProducts = 0,
    data: Folder = "",
    size: Annotated[str, Length(0, 32, "characters")] = "",
    goals: Goals = "human",
    seed: Seed = SEED,
    view: Annotated[str, OneOf(VIEWS, "view")] = "text",
    expert: Annotated[str, OneOf(EXPERTS, "expert")] = "oracle",
    prompt: Annotated[str, OneOf(PROMPTS, "prompt")] = "paper",
    reward: Annotated[float, Range(0, 1_000_000, "(]")] = REWARD,
    pays: Annotated[str, OneOf(("success", "score"), "pays")] = "success",
    max_turns: Annotated[int, Range(1, 10_000, unit="turns")] = MAX_TURNS,
    page_size: Annotated[int, Range(0, 100)] = 0,
    families: Sequence[str] = (),
    max_tasks: Annotated[int, Range(0, 10_000_000)] | None = None,
    cache: Folder = "",
) -> Sequence[Task]:
    """The goals of a split, in an order that the seed alone decides; `max_tasks` keeps the first ones."""
    source = source_of(level=level, num_products=num_products, data=data, size=size, goals=goals, seed=seed)
    rules = Rules(
        view=view,
        reward=reward,
        pays="score" if pays == "score" else "success",
        max_turns=max_turns,
        page_size=page_size or page_size_of(source),
    )
    shop = opened_shop(source, cache)
    numbers = [int(number) for number in shop.split(split)]
    if families:
        numbers = [number for number in numbers if shop.goal(number).category in families]
    return Panel(split, source, cache, rules, expert, PROMPTS[prompt], numbers[:max_tasks])


def page_size_of(source: Source) -> int:
    """Results on a page."""
    return 4 if source.level == "tiny" else PAGE_SIZE


@has_checked_options
def source_of(
    *,
    level: Annotated[str, OneOf(LEVELS, "level")] = "standard",
    num_products: NumProducts = 0,
    data: Folder = "",
    size: Annotated[str, Length(0, 32, "characters")] = "",
    goals: Goals = "human",
    seed: Seed = SEED,
) -> Source:
    """What a shop is made from, by options; a folder of WebShop's files given as `data` is the level `files`."""
    level = "files" if data else level
    kind: Literal["human", "synthetic"] = "synthetic" if goals == "synthetic" else "human"
    if level == "files":
        files = found_files(data, size=size)
        return Source("files", num_products, kind, seed, files)
    if level == "tiny":
        return Source("tiny", num_products or NUM_TINY, kind, seed)
    return Source("standard", num_products or NUM_STANDARD, kind, seed)


class Panel(Sequence[Task]):
    """The tasks of a split; one is made when it is looked at, for a full catalogue has very many."""

    def __init__(
        self,
        split: str,
        source: Source,
        cache: str,
        rules: Rules,
        expert: str,
        instructions: str,
        numbers: Sequence[int],
    ) -> None:
        self._split, self._source, self._cache, self._rules = split, source, cache, rules
        self._expert, self._instructions, self._numbers = expert, instructions, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Task]: ...
    def __getitem__(self, place: int | slice) -> Task | Sequence[Task]:
        if isinstance(place, slice):
            return tuple(self._task(number) for number in self._numbers[place])
        return self._task(self._numbers[place])

    def _task(self, number: int) -> Task:
        goal = opened_shop(self._source, self._cache).goal(number)
        return Task(
            id=f"webshop/{self._source.level}/{self._split}/{number:06d}",
            make_env=partial(webshop_env, self._source, self._cache, number, self._rules),
            family=goal.category,
            instructions=self._instructions,
            answer_format="<action>{action}</action>",
            demonstrate=partial(demonstration, self._source, self._cache, number, self._expert, self._rules.page_size),
        )


def webshop_env(source: Source, cache: str, number: int, rules: Rules) -> WebShopEnv:
    """An episode of a goal. The shop is opened by `reset`: a worker does it once."""
    return WebShopEnv(partial(_begun, source, cache, number), rules)


def demonstration(source: Source, cache: str, number: int, expert: str, page_size: int, seed: int) -> list[str]:
    """An expert's actions for a goal."""
    shop, goal = _begun(source, cache, number)
    return EXPERTS[expert](shop, goal, page_size, seed)


def _begun(source: Source, cache: str, number: int) -> tuple[Shop, Goal]:
    shop = opened_shop(source, cache)
    return shop, shop.goal(number)
