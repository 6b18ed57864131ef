"""math-verify in its process: what it says, and that a dead, hung or greedy one is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from spear_rl.envs import tool_math
from spear_rl.envs.tool_math import checker
from spear_rl.envs.tool_math.answers import is_same_answer
from spear_rl.envs.tool_math.checker import CheckerError, MathVerify
from spear_rl.errors import MissingExtraError

FAKE = """
import json, sys, time, os
print("ready", flush=True)
for line in sys.stdin:
    gold, given = json.loads(line)
    if given == "hang": time.sleep(60)
    if given == "die": os._exit(3)
    if given == "die once" and not os.path.exists(gold):
        open(gold, "w").close()
        os._exit(3)
    print("true" if gold == given or given == "die once" else "false", flush=True)
"""


@pytest.fixture
def fake():
    made = MathVerify(timeout=1.0, command=(sys.executable, "-c", FAKE))
    yield made
    made.close()


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("math_verify")
    made = MathVerify()
    yield made
    made.close()


def test_one_process_answers_question_after_question(fake):
    assert [fake("a", "a"), fake("a", "b"), fake('q"\n', 'q"\n')] == [True, False, True]
    assert fake.num_replaced == 0


def test_a_process_that_was_killed_is_replaced_and_the_question_asked_again(fake, tmp_path):
    assert fake("a", "a")
    first = fake.pid
    os.kill(first, signal.SIGKILL)
    assert fake("a", "a")
    assert fake.pid != first
    assert fake(str(tmp_path / "seen"), "die once")
    assert fake.num_replaced == 2


def test_an_answer_that_kills_or_hangs_the_process_is_wrong_and_the_next_one_is_checked(fake):
    assert not fake("a", "die")
    started = time.perf_counter()
    assert not fake("a", "hang")
    assert 1.5 < time.perf_counter() - started < 10
    assert fake("a", "a")


def test_a_stopped_process_is_replaced_and_its_question_still_answered(fake):
    assert fake("a", "a")
    os.kill(fake.pid, signal.SIGSTOP)
    assert fake("a", "a")
    assert fake.num_replaced == 1


def test_many_threads_share_one_process(fake):
    wrong = []

    def ask(number: int) -> None:
        for other in range(20):
            if fake(str(number), str(other)) != (number == other):
                wrong.append((number, other))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert fake.num_replaced == 0


def test_a_process_that_does_not_start_is_no_wrong_answer():
    broken = MathVerify(command=(sys.executable, "-c", "raise SystemExit(1)"), start_timeout=20)
    with pytest.raises(CheckerError, match="did not start"):
        broken("1", "x")


def test_no_process_outlives_its_owner():
    code = f"from spear_rl.envs.tool_math.checker import MathVerify; import sys\nm = MathVerify(command=(sys.executable, '-c', {FAKE!r}))\nm('a', 'a'); print(m.pid)"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    deadline = time.time() + 5
    while os.path.exists(f"/proc/{int(done.stdout)}") and time.time() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{int(done.stdout)}")


def test_after_a_fork_the_child_has_a_process_of_its_own(fake):
    assert fake("a", "a")
    mine, (read, write) = fake.pid, os.pipe()
    child = os.fork()
    if child == 0:
        fake("a", "a")
        os.write(write, str(fake.pid).encode())
        fake.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 20)) != mine
    assert fake("a", "a")
    assert fake.pid == mine


@pytest.mark.parametrize(
    ("gold", "given_", "same"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", True),
        ("p - q", "-q + p", True),
        ("6 - 5i", "-5i+6", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("x^2 - 1", "(x-1)(x+1)", True),
        ("\\frac{1}{2}", "\\frac{1}{3}", False),
        ("\\sqrt{51}", "1, \\sqrt{51}, 7", False),
        ("\\sqrt{51}", "\\text{anything}", False),
        ("\\sqrt{51}", "\\frac{" * 50, False),
        ("\\sqrt{51}", "{}}}{{\\left(\x00", False),
    ],
)
def test_formulas_are_compared_by_what_they_mean(real, gold, given_, same):
    assert is_same_answer(gold, given_, real) is same


@pytest.mark.slow
def test_a_formula_without_end_is_wrong_in_bounded_time_and_leaves_the_checker_working(real):
    for endless in ("9^{9^{9^{9}}}", "10^{10^{10}}", "(" * 900 + "5" + ")" * 900, "100000!"):
        started = time.perf_counter()
        assert not real("\\sqrt{51}", endless)
        assert time.perf_counter() - started < 25
    assert real("\\frac{1}{2}", "0.5")


def test_a_set_of_integers_needs_no_math_verify_and_another_says_so_without_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checker, "has_math_verify", lambda: False)
    monkeypatch.setattr(tool_math, "has_math_verify", lambda: False)
    checker.math_verify.cache_clear()
    tool_math._warn_of_exact.cache_clear()
    tool_math.tasks("train", level="small", max_tasks=1)
    assert not caplog.text
    path = tmp_path / "set.jsonl"
    path.write_text("".join(f'{{"problem": "q{n}", "answer": "\\\\frac{{1}}{{{n}}}"}}\n' for n in range(2, 60)))
    task = tool_math.tasks("train", data=str(path))[0]
    assert "math-verify is not installed" in caplog.text
    env = task.make_env()
    below = env.reset().text.removeprefix("q")
    assert env.step(f"\\boxed{{1/{below}}}").success
    with pytest.raises(MissingExtraError, match=r"spear-rl\[math\]"):
        tool_math.tasks("train", data=str(path), verifier="math-verify")
