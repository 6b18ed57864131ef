"""Policies to learn from and to compare with: they see pages, and say what an agent would say.

`oracle` reads the goal. `rules` knows the instruction alone, and so does `hasty`, which leaves much to improve on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.colors import color_of
from spear_rl.envs.webshop.data.extra import fuzz, plain
from spear_rl.envs.webshop.data.product import NO_LIMIT, Goal, Product
from spear_rl.envs.webshop.data.shelf import Shop
from spear_rl.envs.webshop.score import MATCH
from spear_rl.envs.webshop.session import NEXT, PREVIOUS, Kind, Page, Session

_LIMIT = re.compile(r",? (?:and )?price lower than ([\d.]+) dollars\.?$")
_FILLER = frozenset(
    """
    a an am and are as at be buy can choose color come comes could find for from get give have help i in is it like
    looking me my need of on or please searching should show size that the this to want which with would you
    """.split()  # noqa: SIM905 - read as words
)
_NUM_LOOKS = 2
"""Products that `rules` opens before it decides: more would leave no turns to buy one."""


def price_limit_in(instruction: str) -> float:
    """The limit that an instruction names."""
    found = _LIMIT.search(instruction)
    return float(found[1]) if found else NO_LIMIT


def query_in(instruction: str) -> str:
    """The words of an instruction worth searching for."""
    words = re.findall(r"[\w'&]+", _LIMIT.sub("", instruction.lower()))
    return " ".join(word for word in words if word not in _FILLER)


def oracle(shop: Shop, goal: Goal, page_size: int, seed: int) -> list[str]:
    """The shortest visit that buys what the goal was made from; another seed chooses options in another order."""
    for query in (query_in(goal.instruction), goal.title.lower(), f"{query_in(goal.instruction)} {goal.title.lower()}"):
        results = shop.results(query)
        if goal.number in results:
            break
    place = results.index(goal.number) // page_size if goal.number in results else 0
    said = [f"search[{query}]", *[f"click[{NEXT}]"] * place]
    if goal.number not in results:
        return said
    said.append(f"click[{goal.asin.lower()}]")
    values = [_nearest(shop.product(goal.number), wanted) for wanted in goal.options]
    said += [f"click[{value}]" for value in Dice("oracle", seed).shuffled([value for value in values if value])]
    return [*said, "click[buy now]"]


def rules(shop: Shop, goal: Goal, page_size: int, seed: int) -> list[str]:
    """Searches with the instruction's words, looks into a few affordable products, and buys the most fitting one."""
    session, said = Session(shop, goal, page_size=page_size), []
    for action in _ruled(session):
        said.append(action)
        _act(session, action)
    return said


def hasty(shop: Shop, goal: Goal, page_size: int, seed: int) -> list[str]:
    """As somebody in a hurry: takes any product of the first page, and often forgets to choose."""
    dice, session = Dice("hasty", seed), Session(shop, goal, page_size=page_size)
    said = [f"search[{query_in(goal.instruction)}]"]
    _act(session, said[-1])
    listed = session.page.listed
    if not listed:
        return said
    product = _fitting(session.page)[0] if dice.chance(0.35) else dice.choice(listed)
    said.append(f"click[{product.asin.lower()}]")
    if dice.chance(0.7):
        said += [f"click[{value}]" for value in _asked_for(product, goal.instruction)]
    return [*said, "click[buy now]"]


EXPERTS: dict[str, Callable[[Shop, Goal, int, int], list[str]]] = {"oracle": oracle, "rules": rules, "hasty": hasty}


def _ruled(session: Session) -> Iterator[str]:
    instruction = session.page.instruction
    yield f"search[{query_in(instruction)}]"
    looks: list[tuple[float, Product]] = []
    for product in _fitting(session.page)[:_NUM_LOOKS]:
        yield f"click[{product.asin.lower()}]"
        yield "click[features]"
        looks.append((_fit(product, instruction), product))
        yield f"click[{PREVIOUS}]"
        if looks[-1][0] == 1.0:
            break
        yield f"click[{PREVIOUS}]"
    if not looks:
        return
    best = max(looks, key=lambda look: look[0])[1]
    if session.page.kind == Kind.RESULTS:
        yield f"click[{best.asin.lower()}]"
    for value in _asked_for(best, instruction):
        yield f"click[{value}]"
    yield "click[buy now]"


def _fitting(page: Page) -> list[Product]:
    """The products of a page of results, the affordable ones first, else in its order."""
    limit = price_limit_in(page.instruction)
    return sorted(page.listed, key=lambda product: product.pricing[0] > limit)


def _fit(product: Product, instruction: str) -> float:
    """Share of the instruction's words that the product's page and features have."""
    words = query_in(instruction).split()
    values = [value for values in product.options.values() for value in values]
    text = " ".join([product.title, *product.bullets, *values]).lower()
    return sum(word in text for word in words) / max(len(words), 1)


def _asked_for(product: Product, instruction: str) -> list[str]:
    """Of every option the longest value that the instruction names."""
    text = f" {plain()(_LIMIT.sub('', instruction))} "
    chosen = []
    for values in product.options.values():
        named = [value for value in values if f" {plain()(value)} " in text]
        if named:
            chosen.append(max(named, key=len))
    return chosen


def _nearest(product: Product, wanted: str) -> str:
    """The option value that counts as the wanted one; empty where there is none."""
    values = [value for values in product.options.values() for value in values]
    if wanted in values:
        return wanted
    ratios = [(fuzz().token_set_ratio(color_of(value), color_of(wanted), processor=plain()), value) for value in values]
    best = max(ratios, default=(0.0, ""), key=lambda entry: entry[0])
    return best[1] if best[0] > MATCH else ""


def _act(session: Session, action: str) -> None:
    verb, _, words = action.removesuffix("]").partition("[")
    (session.search if verb == "search" else session.click)(words)
