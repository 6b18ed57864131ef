"""tool_math's verdict on what policies box: spellings of an integer, statements, copies of the question."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.envs import tool_math
from spear_rl.envs.tool_math import chosen_verifier
from spear_rl.envs.tool_math.panel import Source, entries
from spear_rl.envs.tool_math.problems import Problem
from spear_rl.envs.tool_math.verification.answers import integer, is_copied, is_same_answer, normalised
from spear_rl.envs.tool_math.verification.checker import MathVerify
from spear_rl.errors import UserError

# fmt: off
IS_42 = [
    "42", " 42\n", "042", "+42", "42.", "42,", "42.0", "42.00", "42.0 .", "{42}", "(42)", r"\left(42\right)", r"\(42\)", "$42$",
    "x=42", "x = 42", "42=x", "= 42", "n=42.", "x_1 = 42", "x_{12}=42", r"\theta = 42^\circ", "AB = 42", "f(3) = 42", "P(2, 3)=42",
    r"\angle ABC = 42^\circ", "[ABC] = 42", r"\text{Area} = 42", r"\text{Area} = 42\text{ cm}^2", r"x = \text{42}",
    r"\text{x = 42}", r"\mathbf{x=42}", "(x = 42)", "{x=42}", "x={42}", r"\text{x = 42 m}", r"\text{\$42}", r"42\,^{\circ}\mathrm{C}",
    r"\text{42}", r"\text{ 42 }", r"\mathbf{42}", r"\mathrm{42}", r"\textbf{42}", r"\boldsymbol{42}", r"\underline{42}", r"\boxed{42}",
    r"\displaystyle 42", r"\,42", r"42\ ", r"42\!", "42_{10}", r"42\text{.}",
    r"42\%", "42%", r"42 \%", r"42\text{ percent}", r"42\text{\%}",
    r"\$42", r"\$42.00", r"\$ 42", "$42", r"\text{\$}42", "€42", "£42", r"42\text{ dollars}", r"42 \text{ USD}", "42 dollars",
    r"42^\circ", r"42^{\circ}", "42°", r"42\degree", "42 degrees", r"42\text{ degrees}", r"42^\circ\text{C}", r"42^\circ F",
    r"42 \text{ cm}", r"42\text{cm}", r"42\mathrm{cm}", r"42~\text{cm}", r"42\,\text{cm}", r"42\text{ cm}^2", r"42\text{ cm}^{3}",
    r"42 \mbox{ inches}^2", r"42 \text{ cm}.", r"\text{42 cm}", r"\text{42 m}", r"42\text{ m}", "42 cm", r"42 \text{ square units}",
    r"42 \text{ sq. ft}", r"42\text{ km/h}", r"42\text{ m/s}", r"42 \text{ miles per hour}", r"42 \text{ ways}", r"42\text{ hours}",
]
IS_NOT_42 = [
    # statements
    "41=42", "42=41", r"\neq 42", r"\ne 42", r"x\neq 42", "x!=42", "!=42", "≠42", r"\not=42", r"\not 42", r"\lnot 42", r"\text{not }42",
    r"\text{not} = 42", "> 42", "< 42", "x>42", "x < 42", r"\geq 42", r"\ge 42", r"\leq 42", r"\le 42", "≥42", ">=42", "x>=42",
    r"\approx 42", r"x\approx 42", r"\sim 42", r"\text{about }42", r"\text{at least }42", r"42\text{ or more}",
    "2x=42", "x^2=42", "-x=42", "x/2=42", "xy=42", "n(n+1)=42", "N(N+1)=42", "x(2)=42", "|x|=42", "x=41=42", r"6\cdot7=42", "x+1=42",
    # several numbers
    "4 2", r"4\,2", r"4\ 2", r"4\;2", "4~2", "4{2}", "{4}{2}", r"\text{4}2", r"\text{4 2}", r"\text{4}\text{2}", "42, 43", "41, 42", "42,43",
    "42;43", "42 43", r"42\text{ or }43", "42 or 43", r"42\text{ and }43", "(42, 43)", "(42,)", "42:1", "42-43", r"42\text{ to }43",
    r"42 \pm 1", r"\pm 42", r"42\text{ 000}", "x=42, y=43", r"x = 42 \text{ or } x=43",
    # another number, or one that is not worked out
    "42_5", "42_{5}", "42_8", r"42_\text{five}", r"42\text{ base five}", "42_10", "42.5", "0,042", "4,2", "42,0", "--42", "+-42", "-42",
    r"\overline{42}", r"\hat{42}", r"\phantom{42}", "42^1", "42^2", "42!", r"42\pi", "42x", "42i", "42 m", "42k", r"42\text{k}",
    r"42\text{ million}", r"42 \text{ thousand}", r"42\text{ dozen}", r"42\text{ and a half}", r"42\text{ squared}", r"42^\text{nd}",
    r"42\text{nd}", "42nd", "42'", "42...", r"42\ldots", r"42\pmod 5", r"42\bmod 5", r"42\text{ mod }5", r"42\text{ cm}^{42}",
    "4.2e1", "42e0", "4.2E1", "0x2A", "42/1", r"\frac{84}{2}", r"\frac{42}{1}", r"\sqrt{1764}", r"42\cdot 1", "42+0", "6*7", r"6\times 7",
    "[42]", r"\{42\}", "|42|", r"\lfloor 42.5 \rfloor", r"\lceil 41.5 \rceil", "**42**", r"\text{forty-two}", "forty-two", "", "\u0664\u0662",
]
THOUSANDS = {
    "1,234": "1234", "1{,}234": "1234", r"1\,234": "1234", r"1,\!234": "1234", r"1{,}\!234": "1234", r"11,\! 111,\! 100": "11111100",
    "1,234,567.0": "1234567", r"\$1,234": "1234", r"1,234\text{ cm}": "1234", "1,234,": "1234", "32,349": "32349",
    "-1,234": "-1234", "\u22121234": "-1234", "- 1234": "-1234", r"-\$1234": "-1234", "-0": "0", "x=-1,234": "-1234",
}
NOT_THOUSANDS = {
    "32, 349": "32349", r"32,\ 349": "32349", r"32,\,349": "32349", r"32,\quad 349": "32349", "32 349": "32349", r"32\ 349": "32349",
    "12,34": "1234", "1,2345": "12345", "1234,567": "1234567", "1,234,56": "123456", "1.234": "1234", "1_234": "1234", "1;234": "1234",
    "0,123": "123", "1,,234": "1234", "1 , 234": "1234", "1'234": "1234",
}
# fmt: on


def no_checker(gold: str, given_: str) -> bool:
    raise AssertionError(f"{given_} was given to the checker")


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("math_verify")
    made = MathVerify(timeout=60.0)
    yield made
    made.close()


@pytest.mark.parametrize("checker", [integer, normalised], ids=["integer", "exact"])
def test_an_integer_is_right_in_the_spellings_of_the_table_and_in_no_other(checker):
    assert [text for text in IS_42 if not is_same_answer("42", text, checker)] == []
    wrong = [text for text in IS_NOT_42 if is_same_answer("42", text, checker)]
    assert wrong == ([] if checker is integer else ["42/1", r"\frac{84}{2}", r"\frac{42}{1}"])
    assert [text for text, number in THOUSANDS.items() if not is_same_answer(number, text, checker)] == []
    assert [text for text, number in NOT_THOUSANDS.items() if is_same_answer(number, text, checker)] == []


def test_a_reference_may_be_spelled_so_too():
    assert [text for text in IS_42 if not is_same_answer(text, "42", no_checker)] == []
    assert [
        text for text in IS_42 if "%" not in text and chosen_verifier("auto", Problem("q", text)) != "integer"
    ] == []


def test_by_math_verify_a_formula_may_stand_for_an_integer_but_a_statement_may_not(real):
    formulas = {"4.2e1", "42e0", "4.2E1", "42/1", r"\frac{84}{2}", r"\frac{42}{1}", r"\sqrt{1764}", r"42\cdot 1", "42+0",
                "6*7", r"6\times 7", "[42]", r"\{42\}", "42^1", "--42", r"\lfloor 42.5 \rfloor", r"\lceil 41.5 \rceil"}  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda text: is_same_answer("42", text, real), IS_NOT_42))
    assert {text for text, same in zip(IS_NOT_42, said, strict=True) if same} <= formulas
    assert is_same_answer("42", r"6\times 7", real)


@settings(max_examples=300)
@given(st.integers(0, 10**7), st.text('0123456789 ,.\\!{}()=x<>_^-+%$"textcm', max_size=14))
def test_whatever_stands_around_a_number_no_other_number_is_taken_for_it(number, noise):
    for text in (f"{noise}{number}", f"{number}{noise}"):
        if is_same_answer(str(number), text, integer):
            digits = re.sub(
                r"\.0*(?!\d)|\^\{?[23]\}?|_\{10\}|x_\w|_\{\w*\}=|x\(.*\)=|c?m[23](?!\d)", "", text
            )  # m2 is a unit
            assert int(re.sub(r"\D", "", digits) or "-1") == number, text


def test_what_is_counted_is_a_unit_where_the_question_counts_it():
    question = "How many red apples are there, and what is the number of positive divisors?"
    for unit in ("apples", "red apples", "apple", "positive divisors"):
        assert is_same_answer("42", f"42 \\text{{ {unit}}}", integer, question)
        assert is_same_answer("42", f"42 {unit}", integer, question)
    for unit in ("pears", "million apples", "apples or more", "red apples and 1 pear"):
        assert not is_same_answer("42", f"42 \\text{{ {unit}}}", integer, question)
    assert not is_same_answer("42", r"42 \text{ apples}", integer)


def test_letters_that_the_question_joins_have_a_value():
    for text in ("m+n = 42", "m + n=42"):
        assert is_same_answer("42", text, integer, "Find $m+n$.")
        assert not is_same_answer("42", text, integer, "Find $m$ and $n$.")
    assert not is_same_answer("42", "2m = 42", integer, "Find $2m$.")


@pytest.mark.parametrize(
    ("gold", "given_", "same"),
    [
        (r"\frac{1}{2}", r"x = \frac{1}{2}", True),
        (r"\frac{1}{2}", r"P(A) = 0.5", True),
        (r"\frac{1}{2}", r"\frac13 = \frac12", False),
        (r"\frac{1}{2}", r"x^2 = \frac12", False),
        (r"\frac{1}{2}", r"\neq \frac12", False),
        (r"\frac{1}{2}", r"\approx 0.5", False),
        (r"\frac{1}{2}", r"> \frac12", False),
        (r"\frac{1}{2}", r"\frac12 \text{ or } \frac13", False),
        ("-2,1", r"x=-2 \text{ or } x=1", True),
        ("4.5", "4.5_6", False),
        ("204_5", "204_{5}", True),
        ("204_5", "204_6", False),
        (r"10\%", "10", True),
        (r"10\%", "0.1", True),
        (r"10\%", "0.2", False),
        ("y = 2x + 3", "2x+3", True),
    ],
)
def test_a_statement_is_no_value(real, gold, given_, same):
    assert is_same_answer(gold, given_, real) is same


def test_a_formula_that_the_question_asks_for_has_a_value(real):
    gold, given_ = r"\frac{3}{5}", r"\cos A = \frac35"
    assert is_same_answer(gold, given_, real, r"Find $\cos A$.")
    assert not is_same_answer(gold, given_, real, r"Find it.")
    assert not is_same_answer(gold, r"\frac12 = \frac35", real, r"Is it $\frac12$?")


def test_the_verifier_is_chosen_for_each_problem(tmp_path):
    pytest.importorskip("math_verify")
    rows = [{"problem": f"What is $6 \\cdot {n}$?", "answer": str(6 * n)} for n in range(2, 60)]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"problem": "Half?", "answer": "\\frac{1}{2}"}]))
    tasks = tool_math.tasks("test", test_data=str(path))
    for task in tasks:
        env = task.make_env()
        question = env.reset().text
        if question == "Half?":
            assert env.step("\\boxed{0.5}").success
        elif question.endswith(("2$?", "3$?")):
            factor = re.findall(r"\d+", question)[1]
            assert not env.step(f"\\boxed{{{factor} \\cdot 6}}").success


COPIES = [
    (r"Write $\frac{6}{8}$ in lowest terms.", r"\frac{3}{4}", r"\frac{6}{8}"),
    (r"Write $\frac{6}{8}$ in lowest terms.", r"\frac{3}{4}", r"x = \dfrac{6}{8}"),
    (r"Compute \[\sin \frac{\pi}{3} + \frac12.\]", r"\frac{\sqrt{3}+1}{2}", r"\sin\frac{\pi}{3}+\frac{1}{2}"),
    (r"Compute \(\sqrt{8}\).", r"2\sqrt{2}", r"(\sqrt{8})"),
    (r"Compute \(\sqrt{8}\).", r"2\sqrt{2}", r"1 \cdot \sqrt{8} + 0"),
    (r"Expand $(x-1)(x+1)$.", "x^2-1", r"\left(x - 1\right)\left(x+1\right)"),
    ("What is 1/2 + 1/3?", r"\frac{5}{6}", "1/2+1/3"),
    (r"If $a = \frac{2}{4} \times 1.5$, what is $a$?", r"\frac{3}{4}", r"\frac{2}{4}\cdot 1.5"),
]


@pytest.mark.parametrize(("question", "gold", "copy"), COPIES)
def test_a_formula_of_the_question_is_no_answer(real, question, gold, copy):
    assert not is_same_answer(gold, copy, real, question)
    assert is_same_answer(gold, gold, real, question)
    assert is_same_answer(gold, copy, real, "What is it?")


def test_an_answer_that_stands_in_the_question_is_right_where_the_reference_is_that():
    question = "Which of $\\sqrt{53}$ and $\\frac{1}{2}$ is greater, asks Evelyn, $x$ or $2x+3$?"
    for gold, given_ in [("\\sqrt{53}", "\\sqrt{53}"), ("\\frac{1}{2}", "\\dfrac12"), ("\\text{Evelyn}", "Evelyn"),
                         ("y = 2x+3", "2x + 3"), ("2x+3", "y=2x+3")]:  # fmt: skip
        assert not is_copied(gold, given_, question)
    assert not is_copied("\\frac{3}{2}", "3/2", "Is it $13/2$, $3/21$ or $3/2.5$?")


@pytest.mark.slow
def test_every_reference_of_math_500_is_right_and_no_formula_of_its_question_that_is_not_the_reference(real):
    folder = os.environ.get("SPEAR_RL_MATH_DATA", "")
    try:
        problems = [entry.problem for entry in entries("test", Source("math500", "", folder))]
    except (UserError, ValueError) as error:
        pytest.skip(str(error))

    def right(problem: Problem, text: str) -> bool:
        checker = integer if chosen_verifier("auto", problem) == "integer" else real
        return is_same_answer(problem.answer, text, checker, problem.text)

    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda problem: right(problem, problem.answer), problems))
        assert [p.answer for p, is_right in zip(problems, verdicts, strict=True) if not is_right] == []
        copies = [
            (problem, text.strip(" .,;?\n"))
            for problem in problems
            for part in re.split(r"(?<!\\)\$\$?|\\[\[\]()]", problem.text)[1::2]
            for text in {part, *part.split("=")}
        ]
        won = pool.map(lambda copy: right(*copy), copies)
        assert {
            copy[1] for copy, is_right in zip(copies, won, strict=True) if is_right and copy[0].answer != copy[1]
        } == set()
