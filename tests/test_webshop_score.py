"""WebShop's score against a second implementation, written from the formula alone."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.envs.webshop import source_of, tasks
from spear_rl.envs.webshop.data.product import Goal, Product, Purchase
from spear_rl.envs.webshop.data.shop import open_shop
from spear_rl.envs.webshop.data.words import COLORS, color_of, nouns
from spear_rl.envs.webshop.experts import EXPERTS
from spear_rl.envs.webshop.generated.catalogue import CATEGORIES, goods
from spear_rl.envs.webshop.score import SCORERS, score


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return open_shop(source_of(num_products=1000), str(tmp_path_factory.mktemp("cache")))


def longest_common(one: str, other: str) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for letter in one:
        diagonal = 0
        for place, there in enumerate(other, 1):
            diagonal, row[place] = row[place], diagonal + 1 if letter == there else max(row[place], row[place - 1])
    return row[-1]


def ratio(one: str, other: str) -> float:
    return 200 * longest_common(one, other) / (len(one) + len(other)) if one or other else 100.0


@cache
def token_set_ratio(one: str, other: str) -> float:
    here, there = set(one.split()), set(other.split())
    both = " ".join(sorted(here & there))
    left = f"{both} {' '.join(sorted(here - there))}".strip()
    right = f"{both} {' '.join(sorted(there - here))}".strip()
    if not here or not there:
        return 0.0
    if both and (here <= there or there <= here):
        return 100.0
    return max([ratio(left, right), *([ratio(both, left), ratio(both, right)] if both else [])])


def expected(purchase: Purchase, goal: Goal) -> float:
    """r = r_type * (attributes + options + price) / (|attributes| + |options| + 1), step by step."""
    bought = purchase.product
    points = 1 if bought.price <= goal.price_limit else 0
    for attribute in goal.attributes:
        listed = [1 for own in bought.attributes if token_set_ratio(own, attribute) > 85]
        text = "\n".join([bought.title, " ".join(bought.bullets), bought.description]).lower()
        points += 1 if listed or attribute in text else 0
    for option in goal.options:
        shade = ([c for c in COLORS if c in option] or [option])[0]
        ratios = [
            token_set_ratio(([c for c in COLORS if c in value] or [value])[0], shade)
            for value in purchase.options.values()
        ]
        points += 1 if max(ratios, default=0) > 85 else 0
    found = Counter(word in nouns(bought.title) for word in nouns(goal.title))
    title = found[True] / found.total() if found else 0.2
    shared = [c for c in {*bought.product_category.split(" › ")} if c in goal.product_category.split(" › ")]
    right_kind = bought.query == goal.query or len(shared) > 1 or title > 0.2
    r_type = 0.0 if title == 0 else 0.1 if title < 0.1 else 1.0 if right_kind else 0.5
    return r_type * points / (1 + len(goal.attributes) + len(goal.options))


def processed(text: object) -> str:
    """What thefuzz makes of a value before it compares: text without U+0080 to U+00FF, words alone, lower case."""
    kept = "".join(c for c in str(text) if not 128 <= ord(c) < 256)
    return "".join(c if c.isalnum() or c == "_" else " " for c in kept).lower().strip()


def matches(one: object, other: object) -> bool:
    return round(token_set_ratio(processed(one), processed(other))) > 85


def of_color(value: str | tuple[str, str]) -> object:
    """The original's reduction to a colour: part of a text, but one whole element of a pair."""
    return next((color for color in COLORS if color in value), value)


def original(purchase: Purchase, goal: Goal) -> dict[str, float | None]:
    """r_type, r_att, r_option, r_price and the total by the original's rules, with our nouns."""
    bought = purchase.product
    words = re.findall(r"[^\W_]+(?:['’][^\W_]+)?", goal.title.lower())
    wanted = [word for word in (re.split("['’]", word)[0] for word in words) if word in nouns(goal.title)]
    title = len(set(wanted) & set(nouns(bought.title))) / len(wanted) if wanted else 0.2
    paths = [{part.strip() for part in path.split("›")} for path in (bought.product_category, goal.product_category)]
    r_type = 1.0 if bought.query == goal.query or len(paths[0] & paths[1]) >= 2 or title > 0.2 else 0.5
    r_type = 0.0 if title == 0 else 0.1 if title < 0.1 else r_type
    texts = [bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower()]
    attributes = [
        any(matches(own, a) for own in bought.attributes) or any(a in text for text in texts) for a in goal.attributes
    ]
    options = list(zip(goal.option_names, goal.options, strict=True)) if goal.option_names else list(goal.options)
    values = [of_color(value) for value in purchase.options.values()]
    found = [any(matches(value, of_color(option)) for value in values) for option in options]
    r_price = bought.price <= goal.price_limit
    return {
        "r_type": r_type,
        "r_att": sum(attributes) / len(attributes),
        "r_option": sum(found) / len(found) if found else None,
        "r_price": r_price,
        "total": (sum(attributes) + sum(found) + r_price) / (len(attributes) + len(found) + 1) * r_type,
    }


def parts(result) -> dict[str, float | None]:
    return {
        "r_type": result.type_factor,
        "r_att": result.attribute_share,
        "r_option": result.option_share,
        "r_price": result.is_affordable,
        "total": result.total,
    }


def altered(text: str, rng: random.Random) -> str:
    """A spelling that real files have: capitals, accents, punctuation, other words around it."""
    kind = rng.randrange(8)
    if kind == 0:
        return text.title()
    if kind == 1:
        return text.replace("e", "é").replace("a", "ä")
    if kind == 2:
        return f"{text}, {rng.choice(['12 x 12', 'pack of 2', 'dark', '#4', 'x-large', 'don’t'])}"
    if kind == 3:
        return text[: max(1, len(text) - rng.randrange(4))]
    return text


@pytest.mark.parametrize("kind", ["human", "synthetic"])
def test_the_original_scorer_gives_the_originals_reward_and_its_parts(kind, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp(kind))
    shop = open_shop(source_of(num_products=310, goals=kind), cache)
    rng, seen = random.Random(2), Counter()
    for _ in range(4000):
        goal = shop.goal(rng.randrange(len(shop._goals)))
        goal = replace(
            goal,
            attributes=tuple(
                altered(a, rng) for a in (*goal.attributes, *rng.choices(goal.attributes, k=rng.randrange(2)))
            ),
            options=tuple(altered(o, rng) for o in goal.options),
            title=goal.title + rng.choice(["", f" {goal.title} {goal.title}", " lamp lamp Lamp lamp stand cord plug"]),
        )
        purchase = random_purchase(shop, goal, rng)
        result, ours = score(purchase, goal, "original"), score(purchase, goal)
        assert parts(result) == original(purchase, goal)
        seen["other"] += parts(result) != parts(ours)
        seen["success"] += result.is_success
        seen["option"] += bool(result.option_share)
    assert min(seen["other"], seen["success"], seen["option"]) > 50, "the comparison must tell the two scorers apart"


def test_by_the_original_scorer_some_synthetic_goals_can_never_be_met():
    product = product_with(options={"size": ("xs", "x-large"), "color": ("red",)}, attributes=("easy to clean",))
    goal = goal_with(options=("red", "xs"), option_names=("color", "size"))
    bought = Purchase(product, {"color": "red", "size": "xs"})
    assert score(bought, goal).total == 1.0
    assert score(bought, goal, "original").options == {"red": True, "xs": True}, "one word of the pair is enough"
    dark = goal_with(options=("dark red",), option_names=("color",))
    chosen = Purchase(replace(product, options={"color": ("dark red",)}), {"color": "dark red"})
    assert score(chosen, dark).total == 1.0
    assert score(chosen, dark, "original").total == 1.0
    hidden = goal_with(options=("bluebird",), option_names=("pattern",))
    bird = Purchase(replace(product, options={"pattern": ("bluebird",)}), {"pattern": "bluebird"})
    assert score(bird, hidden).total == 1.0
    assert score(bird, hidden, "original").options == {"bluebird": False}, (
        "blue is compared with ('pattern', 'bluebird')"
    )
    assert score(bird, replace(hidden, option_names=()), "original").is_success, "a human goal is compared by value"


def test_the_scorer_is_an_option_of_the_task(tmp_path):
    options = {"num_products": 62, "goals": "synthetic", "cache": str(tmp_path)}
    shop = open_shop(source_of(num_products=62, goals="synthetic"), str(tmp_path))
    told = set()
    for place in range(len(shop.split("train"))):
        goal = shop.goal(int(shop.split("train")[place]))
        product = shop.product(goal.number)
        purchase = Purchase(product, dict(zip(goal.option_names, goal.options, strict=True)))
        if score(purchase, goal).is_success and not score(purchase, goal, "original").is_success:
            for scorer in SCORERS:
                env = tasks("train", scorer=scorer, **options)[place].make_env()
                env.reset()
                for action in EXPERTS["oracle"](shop, goal, 10, 0):
                    last = env.step(action)
                told.add((scorer, last.success))
            break
    assert told == {("spear", True), ("original", False)}


def random_purchase(shop, goal: Goal, rng: random.Random) -> Purchase:
    """Anything, something of the same kind, or the very product, with options chosen at random or as wanted."""
    which = rng.random()
    number = rng.randrange(shop.num_products)
    if which < 0.3:
        number = goal.number
    elif which < 0.6:
        number = (goal.number + 31 * rng.randrange(shop.num_products)) % shop.num_products
    product = shop.product(number)
    chosen = {name: rng.choice(values) for name, values in product.options.items() if rng.random() < 0.8}
    for name, values in product.options.items():
        wanted = [value for value in values if value in goal.options]
        if wanted and rng.random() < 0.5:
            chosen[name] = wanted[0]
    return Purchase(product, chosen)


def test_the_score_is_that_of_an_independent_implementation_on_10000_random_purchases(shop):
    rng, seen = random.Random(0), Counter()
    for _ in range(10_000):
        goal = shop.goal(rng.randrange(1000))
        purchase = random_purchase(shop, goal, rng)
        result = score(purchase, goal)
        assert result.total == pytest.approx(expected(purchase, goal), abs=1e-12)
        seen[result.type_factor] += 1
        seen["success"] += result.is_success
    assert seen[1.0] > 1000, "the comparison must meet the right kind of thing often"
    assert seen[0.0] > 1000
    assert seen["success"] > 500


def test_a_purchase_at_random_scores_under_a_tenth_on_average(shop):
    rng, total = random.Random(1), 0.0
    for _ in range(3000):
        goal, product = shop.goal(rng.randrange(1000)), shop.product(rng.randrange(1000))
        bought = Purchase(product, {name: rng.choice(values) for name, values in product.options.items()})
        total += score(bought, goal).total
    assert total / 3000 < 0.1


def product_with(**fields) -> Product:
    base = Product("A", "Lamp", "", (), (), {}, "garden", "lamps", "Home › Light", (5.0,), 5.0)
    return replace(base, **fields)


def goal_with(**fields) -> Goal:
    base = Goal("A", 0, "a lamp", ("easy to clean",), ("red",), 10.0, "garden", "lamps", "Home › Light", "Lamp")
    return replace(base, **fields)


TEN = "lamp shade cord plug base stand bulb socket foot arm finial"

KINDS = [
    # title bought, title wanted, same query, categories shared, factor
    ("Lamp", "Lamp", True, 2, 1.0),
    ("Lamp", "Lamp", False, 0, 1.0),  # the titles alone agree
    ("Lamp", "lamp shade cord plug base", False, 0, 0.5),  # one noun in five is not more than 0.2
    ("Lamp", "lamp shade cord plug base", True, 0, 1.0),
    ("Lamp", "lamp shade cord plug base", False, 2, 1.0),
    ("Lamp", "lamp shade cord plug base", False, 1, 0.5),
    ("Lamp", TEN, True, 2, 0.1),  # one in eleven
    ("Chair", "Lamp", True, 2, 0.0),
    ("Lamp", "the 4 of 5", True, 2, 1.0),  # no noun at all decides nothing
    ("Lamp", "the 4 of 5", False, 0, 0.5),
]


@pytest.mark.parametrize(("bought", "wanted", "same_query", "shared", "factor"), KINDS)
def test_the_kind_of_thing_gives_the_factor(bought, wanted, same_query, shared, factor):
    path = ["x › y", "Home › y", "Home › Light"][shared]
    product = product_with(title=bought, product_category=path, query="lamps" if same_query else "chairs")
    result = score(Purchase(product, {"color": "red"}), goal_with(title=wanted))
    assert result.type_factor == factor
    assert result.total == pytest.approx(factor * 2 / 3)


def test_an_attribute_counts_wherever_the_product_tells_it():
    for fields in (
        {"attributes": ("Easy to clean",)},
        {"title": "Lamp, Easy to Clean"},
        {"bullets": ("It is EASY", "to clean")},
        {"description": "Very easy to clean."},
    ):
        assert score(Purchase(product_with(**fields), {}), goal_with()).attributes == {"easy to clean": True}
    assert (
        score(Purchase(product_with(attributes=("easy to use",)), {}), goal_with()).attributes["easy to clean"] is False
    )


def test_options_are_compared_by_their_colour_and_whatever_they_are_called():
    product = product_with(options={"shade": ("dark red", "blue")})
    assert score(Purchase(product, {"shade": "dark red"}), goal_with()).options == {"red": False}, (
        "dark comes before red"
    )
    assert score(Purchase(product, {"shade": "deep red"}), goal_with()).options == {"red": True}
    assert score(Purchase(product, {}), goal_with()).options == {"red": False}
    assert color_of("small") == "small"


def test_the_price_may_be_the_limit_and_success_is_exactly_one():
    bought = Purchase(product_with(attributes=("easy to clean",), price=10.0), {"color": "red"})
    assert score(bought, goal_with()).is_success
    assert score(bought, goal_with()).total == 1.0
    dear = replace(bought, product=replace(bought.product, price=10.01))
    assert (score(dear, goal_with()).total, score(dear, goal_with()).is_success) == (pytest.approx(2 / 3), False)


@given(st.text(), st.text(), st.lists(st.text()), st.dictionaries(st.text(), st.text()), st.text())
def test_a_score_is_between_0_and_1_whatever_the_texts_are(title, wanted, attributes, options, path):
    product = product_with(title=title, attributes=tuple(attributes), product_category=path, bullets=tuple(attributes))
    goal = goal_with(title=wanted, attributes=tuple(attributes), options=tuple(options.values()))
    assert 0.0 <= score(Purchase(product, options), goal).total <= 1.0


def test_the_values_of_an_option_never_count_for_each_other():
    for kind in [kind for shelf in CATEGORIES for kind in goods(shelf)["kind"]]:
        values = [value for values in kind["options"].values() for value in values]
        for value in values:
            matching = [other for other in values if token_set_ratio(color_of(value), color_of(other)) > 85]
            assert matching == [value], (kind["noun"], value, matching)


def test_nouns_are_what_is_left_of_a_title():
    assert nouns("Men's Waterproof Trail Running Shoe, Size 10") == ("men", "trail", "running", "shoe", "size")
    assert nouns("The Table, a TABLE with 2 Cables") == ("table", "cables")
    assert nouns("") == ()
