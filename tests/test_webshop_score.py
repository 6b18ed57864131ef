"""WebShop's score against a second implementation, written from the formula alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.envs.webshop import source_of
from spear_rl.envs.webshop.data.product import Goal, Product, Purchase
from spear_rl.envs.webshop.data.shop import open_shop
from spear_rl.envs.webshop.data.words import COLORS, color_of, nouns
from spear_rl.envs.webshop.generated.catalogue import CATEGORIES, goods
from spear_rl.envs.webshop.score import score


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
