"""Scripted policies for demonstrations and as references: `oracle` reads the goal, `rules` and `hasty` do not."""

import re
from collections.abc import Callable, Iterator

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.webshop.data.product import NO_LIMIT, Goal, Product
from spear_rl.envs.webshop.data.shop import Shop
from spear_rl.envs.webshop.data.words import FILLER_WORDS, color_of, is_match, normalised, ratio
from spear_rl.envs.webshop.session import BUY, NEXT, PREVIOUS, Kind, Page, Session, parsed_action

_LIMIT = re.compile(r",? (?:and )?price lower than ([\d.]+) dollars\.?$")
_NUM_OPENED = 2  # products that `rules` opens before it decides: more would leave no turns to buy one


def price_limit_in(instruction: str) -> float:
    found = _LIMIT.search(instruction)
    return float(found[1]) if found else NO_LIMIT


def query_in(instruction: str) -> str:
    """The words of an instruction worth searching for."""
    words = re.findall(r"[\w'&]+", _LIMIT.sub("", instruction.lower()))
    return " ".join(word for word in words if word not in FILLER_WORDS)


def oracle(shop: Shop, goal: Goal, page_size: int, seed: int) -> list[str]:
    """The fewest actions that buy the product of the goal; the seed decides the order of its options."""
    words, title = query_in(goal.instruction), goal.title.lower()
    for query in (words, title, f"{words} {title}"):
        results = shop.results(query)
        if goal.number in results:
            break
    else:
        return [f"search[{query}]"]
    num_pages = results.index(goal.number) // page_size
    values = [_nearest(shop.product(goal.number), wanted.lower()) for wanted in goal.options]
    options = Dice("oracle", seed).shuffled([value for value in values if value])
    names = [*[NEXT] * num_pages, goal.asin.lower(), *options, BUY]
    return [f"search[{query}]", *(f"click[{name}]" for name in names)]


def rules(shop: Shop, goal: Goal, page_size: int, seed: int) -> list[str]:
    """Searches for the instruction's words, opens a few affordable products, and buys the one that fits best."""
    session, actions = Session(shop, goal, page_size=page_size), []
    for action in _rules(session):
        actions.append(action)
        session.act(parsed_action(action))
    return actions


def hasty(shop: Shop, goal: Goal, page_size: int, seed: int) -> list[str]:
    """A weak policy: buys any product of the first page, and often without choosing options."""
    dice, session = Dice("hasty", seed), Session(shop, goal, page_size=page_size)
    search = f"search[{query_in(goal.instruction)}]"
    session.act(parsed_action(search))
    listed = session.page.listed
    if not listed:
        return [search]
    product = _affordable_first(session.page)[0] if dice.chance(0.35) else dice.choice(listed)
    values = _wanted_values(product, goal.instruction) if dice.chance(0.7) else []
    return [search, *(f"click[{name}]" for name in (product.asin.lower(), *values, BUY))]


EXPERTS: dict[str, Callable[[Shop, Goal, int, int], list[str]]] = {"oracle": oracle, "rules": rules, "hasty": hasty}


def _rules(session: Session) -> Iterator[str]:
    instruction = session.page.instruction
    yield f"search[{query_in(instruction)}]"
    opened: list[tuple[float, Product]] = []
    for product in _affordable_first(session.page)[:_NUM_OPENED]:
        yield f"click[{product.asin.lower()}]"
        yield "click[features]"
        opened.append((_fit(product, instruction), product))
        yield f"click[{PREVIOUS}]"
        if opened[-1][0] == 1.0:
            break
        yield f"click[{PREVIOUS}]"
    if not opened:
        return
    best = max(opened, key=lambda entry: entry[0])[1]
    if session.page.kind == Kind.RESULTS:
        yield f"click[{best.asin.lower()}]"
    for name in (*_wanted_values(best, instruction), BUY):
        yield f"click[{name}]"


def _affordable_first(page: Page) -> list[Product]:
    limit = price_limit_in(page.instruction)
    return sorted(page.listed, key=lambda product: product.pricing[0] > limit)


def _fit(product: Product, instruction: str) -> float:
    """Fraction of the instruction's words that are on the product's page and in its features."""
    words = query_in(instruction).split()
    values = [value for values in product.options.values() for value in values]
    text = " ".join([product.title, *product.bullets, *values]).lower()
    return sum(word in text for word in words) / max(len(words), 1)


def _wanted_values(product: Product, instruction: str) -> list[str]:
    """The longest value of every option that the instruction names."""
    text = f" {normalised(_LIMIT.sub('', instruction))} "
    spoken = [[value for value in values if normalised(value)] for values in product.options.values()]
    named = ([value for value in values if f" {normalised(value)} " in text] for values in spoken)
    return [max(values, key=len) for values in named if values]


def _nearest(product: Product, wanted: str) -> str:
    """The option value that the score takes for the wanted one; empty if there is none."""
    values = [value for values in product.options.values() for value in values]
    if wanted in values:
        return wanted
    color = color_of(wanted)
    best = max(values, default="", key=lambda value: ratio(color_of(value), color))
    return best if is_match(color_of(best), color) else ""
