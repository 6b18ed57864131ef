"""math-verify in the sandbox: what it says, and that a dead, hung or greedy comparison harms no other."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from spear_rl.envs import tool_math
from spear_rl.envs.tool_math.panel import Source, entries
from spear_rl.envs.tool_math.verification import checker
from spear_rl.envs.tool_math.verification.answers import is_same_answer
from spear_rl.envs.tool_math.verification.checker import MODULE, CheckerError, MathVerify
from spear_rl.errors import MissingExtraError, UserError
from tool_math_answers import ANSWERS

HERE = Path(__file__).parent
LANDLOCK_CALLS = "444,445,446"
UNSHARE = {"x86_64": "272", "aarch64": "97"}.get(platform.machine(), "0")

# Plain math-verify, for comparison; it sees legitimate answers only.
PLAIN = """
import json, logging, sys
from math_verify import parse, verify
logging.disable(logging.CRITICAL)
for gold, given in json.load(sys.stdin):
    parsed = [parse(f"\\\\boxed{{{text}}}", parsing_timeout=30) for text in (gold, given)]
    print(bool(verify(*parsed, timeout_seconds=30)))
"""


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("math_verify")
    made = MathVerify(timeout=60.0)
    yield made
    made.close()


def plain(pairs: list[tuple[str, str]]) -> list[bool]:
    command = [sys.executable, "-W", "ignore", "-c", PLAIN]
    ran = subprocess.run(command, input=json.dumps(pairs), text=True, capture_output=True, check=True)
    return [line == "True" for line in ran.stdout.split()]


def test_right_answers_are_right_near_misses_wrong_and_plain_math_verify_says_the_same(real):
    assert len(ANSWERS) >= 80
    pairs = [(gold, other) for gold, right, wrong in ANSWERS for other in (right, wrong)]
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda pair: is_same_answer(*pair, real), pairs))
    assert [
        pair for pair, same, wanted in zip(pairs, said, [True, False] * len(ANSWERS), strict=True) if same != wanted
    ] == []
    assert [pair for pair, same, theirs in zip(pairs, said, plain(pairs), strict=True) if same != theirs] == []


def test_an_answer_is_right_when_it_is_spelled_like_the_reference(real):
    for gold, *_ in ANSWERS:
        assert is_same_answer(gold, f" {gold}\n", real)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math500", "gsm8k", "aime24"])
def test_every_reference_of_the_known_sets_is_right_by_way_of_the_sandbox(real, name):
    folder = os.environ.get("SPEAR_RL_MATH_DATA", "")
    try:
        answers = sorted({entry.problem.answer for entry in entries("test", Source(name, "", folder, "small", "", ""))})
    except (UserError, ValueError) as error:
        pytest.skip(str(error))

    def is_right_inside(answer: str) -> bool:
        """math-verify's own verdict: the text alone would settle it before."""
        return real.result(f"import {MODULE}\n{MODULE}.reply('t', {answer!r}, {answer!r})").stdout == "t same\n"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda answer: is_same_answer(answer, answer, real), answers))
        right = list(pool.map(is_right_inside, answers))
    assert [answer for answer, is_right in zip(answers, right, strict=True) if not is_right] == []


def test_a_server_that_was_killed_is_replaced_and_the_question_still_answered(real):
    assert real(r"\frac12", "0.5")
    first, before = real.pid, real.num_replaced
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while real.pid == first and time.monotonic() < deadline:  # it takes a moment to die
        assert real(r"\frac12", "0.5")
    assert real.pid != first
    assert real.num_replaced == before + 1


def test_a_server_that_is_killed_during_a_comparison_is_no_wrong_answer(real, tmp_path):
    assert real(r"\frac12", "0.5")
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.3):
            with suppress(ProcessLookupError, TypeError):  # there is none just now
                os.kill(real.pid, signal.SIGKILL)
            stop.wait(8)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        assert all(real("x^2-1", f"(x-1)(x+1)+{number}-{number}") for number in range(5))
    finally:
        stop.set()
        thread.join()


def test_a_comparison_that_dies_or_hangs_is_a_wrong_answer_and_the_next_one_is_made():
    pytest.importorskip("math_verify")
    hasty = MathVerify(timeout=1.0)
    try:
        assert hasty.result("import os\nos._exit(0)").error
        assert hasty.result("while True: pass").timed_out
        assert hasty.result("x = bytearray(1 << 34)").error
        assert hasty.result(f"import {MODULE}\n{MODULE}.reply('t', '1/2', '0.5')").stdout == "t same\n"
        assert hasty.num_replaced == 0
    finally:
        hasty.close()


def test_many_threads_are_answered_side_by_side(real):
    def ask(number: int) -> list[bool]:
        return [real(f"\\sqrt{{{number}}}", f"{{{other}}}^{{1/2}}") for other in (number, number + 1)]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(2, 34))) == [[True, False]] * 32


def test_where_nothing_isolates_it_refuses_in_one_sentence_and_goes_without_when_told_to():
    pytest.importorskip("math_verify")
    code = (
        "from spear_rl.envs.tool_math.verification.checker import MathVerify\nprint(MathVerify(BACKEND)('1/2', '0.5'))"
    )
    command = [sys.executable, str(HERE / "sandbox_elsewhere.py"), "--without", f"{LANDLOCK_CALLS},{UNSHARE}", "-c"]
    refused = subprocess.run([*command, code.replace("BACKEND", "")], capture_output=True, text=True, cwd=HERE.parent)
    assert "CheckerError: math-verify cannot compare answers safely here" in refused.stderr
    assert "task.options.verifier=exact" in refused.stderr
    assert refused.stdout == ""
    unsafe = code.replace("BACKEND", "backend='unsafe-subprocess'")
    ran = subprocess.run([*command, unsafe], capture_output=True, text=True, cwd=HERE.parent)
    assert ran.stdout == "True\n", ran.stderr


def test_a_checker_that_cannot_start_is_an_error_a_user_can_mend_and_no_wrong_answer(monkeypatch):
    monkeypatch.setattr(checker, "_source", lambda: "raise SystemExit('broken')")
    with pytest.raises(CheckerError, match=r"task\.options\.verifier=exact"):
        MathVerify()("1/2", "0.5")
    assert issubclass(CheckerError, UserError)


def test_no_process_outlives_its_owner():
    pytest.importorskip("math_verify")
    for last in ("pass", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"):
        code = f"from spear_rl.envs.tool_math.verification.checker import MathVerify\nm = MathVerify()\nm('1/2', '0.5'); print(m.pid, flush=True)\n{last}"  # noqa: E501
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        deadline = time.time() + 20
        while os.path.exists(f"/proc/{int(done.stdout)}") and time.time() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{int(done.stdout)}")


def test_after_a_fork_the_child_has_a_server_of_its_own(real):
    assert real(r"\frac12", "0.5")
    mine, (read, write) = real.pid, os.pipe()
    with real._lock:  # as if another thread held it
        child = os.fork()
    if child == 0:
        status = b"wrong"
        try:
            if real(r"\frac12", "0.5") and not real(r"\frac12", "0.6"):
                status = str(real.pid).encode()
            real.close()
        finally:
            os.write(write, status)
            os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 20)) != mine
    assert real(r"\frac12", "0.5")
    assert real.pid == mine


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
        assert time.perf_counter() - started < 75
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
