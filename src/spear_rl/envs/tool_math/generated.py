"""Arithmetic problems generated from seeds, too hard without a tool; the same on every machine. With demonstrators."""

import math
from collections.abc import Callable
from functools import cache

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.shared.generated_panels import content_split
from spear_rl.envs.tool_math.calls import call_text
from spear_rl.envs.tool_math.problems import Problem

NUM_PROBLEMS = {"train": 2000, "validation": 200, "test": 200}

Made = tuple[str, int, str]
"""A question, its answer, and code that prints it."""


def quick_remainder(dice: Dice) -> Made:
    a, b, m = dice.between(10, 49), dice.between(10, 49), dice.between(10, 49)
    return f"{a}*{b}%{m}=?", a * b % m, f"print({a}*{b}%{m})"


def quick_zero(dice: Dice) -> Made:
    a, m, is_first = dice.between(10, 49), dice.between(10, 49), dice.chance(0.5)
    text = f"0*{a}%{m}" if is_first else f"{a}*0%{m}"
    return f"{text}=?", 0, f"print({text})"


def quick_one(dice: Dice) -> Made:
    a, is_first = dice.between(10, 48), dice.chance(0.5)
    m = dice.between(a + 1, 49)
    text = f"1*{a}%{m}" if is_first else f"{a}*1%{m}"
    return f"{text}=?", a, f"print({text})"


def quick_division(dice: Dice) -> Made:
    a, b = dice.between(10, 49), dice.between(10, 49)
    return f"{a}*{b}%1=?", 0, f"print({a}*{b}%1)"


def product(dice: Dice) -> Made:
    a, b = dice.between(1000, 9999), dice.between(1000, 9999)
    return f"What is {a} * {b}?", a * b, f"print({a} * {b})"


def total(dice: Dice) -> Made:
    numbers = [dice.between(10_000, 99_999) for _ in range(4)]
    text = " + ".join(map(str, numbers))
    return f"What is {text}?", sum(numbers), f"print({text})"


def remainder(dice: Dice) -> Made:
    a, b, m = dice.between(1000, 9999), dice.between(1000, 9999), dice.between(11, 99)
    return f"What is the remainder when {a} * {b} is divided by {m}?", a * b % m, f"print({a} * {b} % {m})"


def power(dice: Dice) -> Made:
    a, n, m = dice.between(2, 99), dice.between(20, 200), dice.between(101, 999)
    question = f"What is the remainder when {a}^{n} is divided by {m}?"
    return question, pow(a, n, m), f"print(pow({a}, {n}, {m}))"


def digit_sum(dice: Dice) -> Made:
    a, n = dice.between(11, 99), dice.between(15, 40)
    question = f"What is the sum of the decimal digits of {a}^{n}?"
    return question, sum(map(int, str(a**n))), f"print(sum(int(d) for d in str({a} ** {n})))"


def common_divisor(dice: Dice) -> Made:
    shared = dice.between(101, 999)
    a, b = shared * dice.between(1001, 9999), shared * dice.between(1001, 9999)
    question = f"What is the greatest common divisor of {a} and {b}?"
    return question, math.gcd(a, b), f"import math\nprint(math.gcd({a}, {b}))"


def primes(dice: Dice) -> Made:
    low = dice.between(1000, 8000)
    high = low + dice.between(100, 400)
    count = sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(low, high + 1))
    question = f"How many prime numbers are there from {low} to {high}, both included?"
    code = f"count = 0\nfor n in range({low}, {high} + 1):\n    if all(n % d for d in range(2, int(n ** 0.5) + 1)):\n"
    return question, count, f"{code}        count += 1\nprint(count)"


def fibonacci(dice: Dice) -> Made:
    n, m = dice.between(500, 3000), dice.between(1000, 9999)
    a, b = 0, 1
    for _ in range(n):
        a, b = b, (a + b) % m
    question = f"With F(1) = F(2) = 1 and F(k) = F(k-1) + F(k-2), what is the remainder when F({n}) is divided by {m}?"
    return question, a % m, f"a, b = 0, 1\nfor _ in range({n}):\n    a, b = b, a + b\nprint(a % {m})"


def lattice_points(dice: Dice) -> Made:
    n = dice.between(200, 3000)
    side = math.isqrt(n)
    count = sum(2 * math.isqrt(n - x * x) + 1 for x in range(-side, side + 1))
    question = f"How many pairs of integers (x, y) satisfy x^2 + y^2 <= {n}?"
    code = f"n = {n}\nr = int(n ** 0.5) + 1\ns = range(-r, r + 1)\n"
    return question, count, f"{code}print(sum(x * x + y * y <= n for x in s for y in s))"


def change(dice: Dice) -> Made:
    amount = dice.between(200, 600)
    coins = sorted({1, *(dice.between(2, 60) for _ in range(3))})
    ways = [1] + [0] * amount
    for coin in coins:
        for value in range(coin, amount + 1):
            ways[value] += ways[value - coin]
    question = f"In how many ways can {amount} be paid with coins worth {', '.join(map(str, coins))}, order aside?"
    code = f"ways = [1] + [0] * {amount}\nfor c in {coins}:\n    for v in range(c, {amount} + 1):\n"
    return question, ways[amount], f"{code}        ways[v] += ways[v - c]\nprint(ways[{amount}])"


LEVELS: dict[str, dict[str, Callable[[Dice], Made]]] = {
    "tiny": {"remainder": quick_remainder, "zero": quick_zero, "one": quick_one, "division": quick_division},
    "small": {"product": product, "sum": total, "remainder": remainder, "power": power},
    "medium": {"power": power, "digits": digit_sum, "divisor": common_divisor, "primes": primes},
    "hard": {"fibonacci": fibonacci, "lattice": lattice_points, "change": change, "primes": primes},
}
"""Level -> families, in equal numbers. tiny is for a model trained from scratch, small for SmolLM2."""
EASY = frozenset({"zero", "one", "division"})
"""Families that need no tool."""


@cache
def generated_panels(level: str) -> dict[str, tuple[Problem, ...]]:
    """Split -> its distinct problems by ascending seed, as many of each family. The question determines the split."""
    families = list(LEVELS[level].items())
    left = {(split, name): number // len(families) for split, number in NUM_PROBLEMS.items() for name, _ in families}
    panels: dict[str, dict[str, Problem]] = {split: {} for split in NUM_PROBLEMS}
    seed = 0
    while any(left.values()):
        family, make = families[seed % len(families)]
        question, answer, code = make(Dice("tool_math", level, seed))
        problem = Problem(question, str(answer), family, code)
        content = problem.content_hash()
        split = content_split(content)
        if left[split, family] and content not in panels[split]:
            panels[split][content] = problem
            left[split, family] -= 1
        seed += 1
    return {split: tuple(chosen.values()) for split, chosen in panels.items()}


def with_tool(problem: Problem, seed: int) -> list[str]:
    """Calls the tool, then answers."""
    return [call_text(problem.code), f"\\boxed{{{problem.answer}}}"]


def careless(problem: Problem, seed: int) -> list[str]:
    """Calls the tool in one episode of four; in the others answers at once: right if easy, else a random number."""
    if Dice("careless", problem.text, seed).chance(0.25):
        return with_tool(problem, seed)
    most = 10 ** len(problem.answer)
    guess = Dice("by head", problem.text, seed).between(most // 10, most - 1)
    return [f"\\boxed{{{problem.answer if problem.family in EASY else guess}}}"]


DEMONSTRATORS: dict[str, Callable[[Problem, int], list[str]]] = {"tool": with_tool, "careless": careless}
"""Problem and seed -> what is said in one episode."""
