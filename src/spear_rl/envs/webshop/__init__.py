"""WebShop in pure Python, with a generated catalogue or WebShop's own files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from spear_rl.envs.webshop.data.entries import found_files
from spear_rl.envs.webshop.data.goals import SPLITS
from spear_rl.envs.webshop.data.product import Goal
from spear_rl.envs.webshop.data.shop import Shop, Source, open_shop
from spear_rl.envs.webshop.env import REWARD, Rules, WebShopEnv
from spear_rl.envs.webshop.experts import EXPERTS
from spear_rl.envs.webshop.generated.catalogue import NUM_TINY, SEED
from spear_rl.envs.webshop.score import SCORERS
from spear_rl.envs.webshop.session import MAX_TURNS, PAGE_SIZE
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
"""The policy's instructions: as in the paper, with reasoning, or short, without reasoning, for a small model."""

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
    scorer: Annotated[str, OneOf(SCORERS, "scorer")] = "spear",
    families: Sequence[str] = (),
    max_tasks: Annotated[int, Range(0, 10_000_000)] | None = None,
    cache: Folder = "",
) -> Sequence[Task]:
    """The goals of a split, in an order that depends on the seed alone; `max_tasks` keeps the first ones."""
    source = source_of(level=level, num_products=num_products, data=data, size=size, goals=goals, seed=seed)
    paid: Literal["success", "score"] = "score" if pays == "score" else "success"
    rules = Rules(view, reward, paid, max_turns, page_size or page_size_of(source), scorer)
    shop = open_shop(source, cache)
    numbers = [int(number) for number in shop.split(split)]
    if families:
        numbers = [number for number in numbers if shop.goal(number).category in families]
    return LazyTasks(partial(_task, split, source, cache, rules, expert, PROMPTS[prompt]), numbers[:max_tasks])


def page_size_of(source: Source) -> int:
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
    kind: Literal["human", "synthetic"] = "synthetic" if goals == "synthetic" else "human"
    if data or level == "files":
        return Source("files", num_products, kind, seed, found_files(data, size=size))
    if level == "tiny":
        return Source("tiny", num_products or NUM_TINY, kind, seed)
    return Source("standard", num_products or NUM_STANDARD, kind, seed)


@dataclass(frozen=True, eq=False)
class LazyTasks(Sequence[Task]):
    """Tasks that are made on access: a full catalogue has very many goals."""

    make: Callable[[int], Task]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        numbers = self.numbers[index]
        return tuple(map(self.make, numbers)) if isinstance(index, slice) else self.make(numbers)


def _task(split: str, source: Source, cache: str, rules: Rules, expert: str, instructions: str, number: int) -> Task:
    return Task(
        id=f"webshop/{source.level}/{split}/{number:06d}",
        make_env=partial(webshop_env, source, cache, number, rules),
        family=open_shop(source, cache).goal(number).category,
        instructions=instructions,
        answer_format="<action>{action}</action>",
        demonstrate=partial(demonstration, source, cache, number, expert, rules.page_size),
    )


def webshop_env(source: Source, cache: str, number: int, rules: Rules) -> WebShopEnv:
    """The environment of a goal. `reset` opens the shop, which happens once per process."""
    return WebShopEnv(partial(_shop_and_goal, source, cache, number), rules)


def demonstration(source: Source, cache: str, number: int, expert: str, page_size: int, seed: int) -> list[str]:
    return EXPERTS[expert](*_shop_and_goal(source, cache, number), page_size, seed)


def _shop_and_goal(source: Source, cache: str, number: int) -> tuple[Shop, Goal]:
    shop = open_shop(source, cache)
    return shop, shop.goal(number)
