"""Arithmetic made from seeds, such that a head is no match for a tool. Needs no data; the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.tool_math.data.problem import Problem, held_out

SPLITS = {"train": 2000, "validation": 200, "test": 200}

Maker = Callable[[Dice], tuple[str, int, str]]
"""Dice in; question, answer and the code that finds it out."""


def quick_remainder(dice: Dice) -> tuple[str, int, str]:
    """In symbols, for a model that has read nothing else, and too much for its head."""
    a, b, m = dice.between(10, 49), dice.between(10, 49), dice.between(10, 49)
    return f"{a}*{b}%{m}=?", a * b % m, f"print({a}*{b}%{m})"


def quick_zero(dice: Dice) -> tuple[str, int, str]:
    """The same with a zero in it: zero, which needs no tool."""
    a, m, is_first = dice.between(10, 49), dice.between(10, 49), dice.chance(0.5)
    text = f"0*{a}%{m}" if is_first else f"{a}*0%{m}"
    return f"{text}=?", 0, f"print({text})"


def quick_one(dice: Dice) -> tuple[str, int, str]:
    """The same with a one in it: the other number, which needs no tool."""
    a, is_first = dice.between(10, 48), dice.chance(0.5)
    m = dice.between(a + 1, 49)
    text = f"1*{a}%{m}" if is_first else f"{a}*1%{m}"
    return f"{text}=?", a, f"print({text})"


def quick_division(dice: Dice) -> tuple[str, int, str]:
    """The same divided by one: zero, which needs no tool."""
    a, b = dice.between(10, 49), dice.between(10, 49)
    return f"{a}*{b}%1=?", 0, f"print({a}*{b}%1)"


def product(dice: Dice) -> tuple[str, int, str]:
    a, b = dice.between(1000, 9999), dice.between(1000, 9999)
    return f"What is {a} * {b}?", a * b, f"print({a} * {b})"


def total(dice: Dice) -> tuple[str, int, str]:
    numbers = [dice.between(10_000, 99_999) for _ in range(4)]
    text = " + ".join(map(str, numbers))
    return f"What is {text}?", sum(numbers), f"print({text})"


def remainder(dice: Dice) -> tuple[str, int, str]:
    a, b, m = dice.between(1000, 9999), dice.between(1000, 9999), dice.between(11, 99)
    return f"What is the remainder when {a} * {b} is divided by {m}?", a * b % m, f"print({a} * {b} % {m})"


def power(dice: Dice) -> tuple[str, int, str]:
    a, n, m = dice.between(2, 99), dice.between(20, 200), dice.between(101, 999)
    question = f"What is the remainder when {a}^{n} is divided by {m}?"
    return question, pow(a, n, m), f"print(pow({a}, {n}, {m}))"


def digit_sum(dice: Dice) -> tuple[str, int, str]:
    a, n = dice.between(11, 99), dice.between(15, 40)
    question = f"What is the sum of the decimal digits of {a}^{n}?"
    return question, sum(map(int, str(a**n))), f"print(sum(int(d) for d in str({a} ** {n})))"


def common_divisor(dice: Dice) -> tuple[str, int, str]:
    shared = dice.between(101, 999)
    a, b = shared * dice.between(1001, 9999), shared * dice.between(1001, 9999)
    question = f"What is the greatest common divisor of {a} and {b}?"
    return question, math.gcd(a, b), f"import math\nprint(math.gcd({a}, {b}))"


def primes(dice: Dice) -> tuple[str, int, str]:
    low = dice.between(1000, 8000)
    high = low + dice.between(100, 400)
    count = sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(low, high + 1))
    question = f"How many prime numbers are there from {low} to {high}, both included?"
    code = f"count = 0\nfor n in range({low}, {high} + 1):\n    if all(n % d for d in range(2, int(n ** 0.5) + 1)):\n"
    return question, count, f"{code}        count += 1\nprint(count)"


def fibonacci(dice: Dice) -> tuple[str, int, str]:
    n, m = dice.between(500, 3000), dice.between(1000, 9999)
    a, b = 0, 1
    for _ in range(n):
        a, b = b, (a + b) % m
    question = f"With F(1) = F(2) = 1 and F(k) = F(k-1) + F(k-2), what is the remainder when F({n}) is divided by {m}?"
    return question, a % m, f"a, b = 0, 1\nfor _ in range({n}):\n    a, b = b, a + b\nprint(a % {m})"


def lattice_points(dice: Dice) -> tuple[str, int, str]:
    n = dice.between(200, 3000)
    side = math.isqrt(n)
    count = sum(2 * math.isqrt(n - x * x) + 1 for x in range(-side, side + 1))
    question = f"How many pairs of integers (x, y) satisfy x^2 + y^2 <= {n}?"
    code = f"n = {n}\nr = int(n ** 0.5) + 1\ns = range(-r, r + 1)\n"
    return question, count, f"{code}print(sum(x * x + y * y <= n for x in s for y in s))"


def change(dice: Dice) -> tuple[str, int, str]:
    amount = dice.between(200, 600)
    coins = sorted({1, *(dice.between(2, 60) for _ in range(3))})
    ways = [1] + [0] * amount
    for coin in coins:
        for value in range(coin, amount + 1):
            ways[value] += ways[value - coin]
    question = f"In how many ways can {amount} be paid with coins worth {', '.join(map(str, coins))}, order aside?"
    code = f"ways = [1] + [0] * {amount}\nfor c in {coins}:\n    for v in range(c, {amount} + 1):\n"
    return question, ways[amount], f"{code}        ways[v] += ways[v - c]\nprint(ways[{amount}])"


LEVELS: dict[str, dict[str, Maker]] = {
    "tiny": {"remainder": quick_remainder, "zero": quick_zero, "one": quick_one, "division": quick_division},
    "small": {"product": product, "sum": total, "remainder": remainder, "power": power},
    "medium": {"power": power, "digits": digit_sum, "divisor": common_divisor, "primes": primes},
    "hard": {"fibonacci": fibonacci, "lattice": lattice_points, "change": change, "primes": primes},
}
"""Level -> kinds of problem, which take turns. tiny is for a model from scratch, small for SmolLM2."""
EASY = frozenset({"zero", "one", "division"})
"""Kinds of problem that need no tool."""


@cache
def generated_problem(level: str, seed: int) -> Problem:
    """The problem of a seed."""
    families = list(LEVELS[level])
    family = families[seed % len(families)]
    question, answer, code = LEVELS[level][family](Dice("tool_math", level, seed))
    return Problem(question, str(answer), family, code)


@lru_cache(maxsize=16)
def generated_panel(level: str, split: str) -> tuple[Problem, ...]:
    """The problems of a split: seeds in order, each problem once; its split hangs on what it says."""
    own = len(LEVELS[level])
    left = dict.fromkeys(LEVELS[level], SPLITS[split] // own)
    chosen: dict[str, Problem] = {}
    seed = 0
    while any(left.values()):
        problem = generated_problem(level, seed)
        content = problem.content_hash()
        if left[problem.family] and content not in chosen and held_out(content) == split:
            chosen[content] = problem
            left[problem.family] -= 1
        seed += 1
    return tuple(chosen.values())
