"""Every attack on the checker, as an answer and as a reference: nothing is executed, and nothing is paid for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checker_attacks import ATTACKS, COSTS, NAMES, Attack, payload
from spear_rl.envs.tool_math.verification.answers import is_same_answer
from spear_rl.envs.tool_math.verification.checker import MODULE, CheckerError, MathVerify, is_admissible
from spear_rl.sandbox import Interpreter, Limits, Result, SandboxUnavailable

pytest.importorskip("math_verify")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the isolating backends are Linux's")

HERE = Path(__file__).parent
GOLD = r"\sqrt{51}"
TOKEN = "executed-7431"
INSIDE = ("mpf", "mpc")
"""Classes that sympy's generated code sees where there is no numpy."""

STEAL = "import os;f=open(os.environ['MARK'],'w');f.write(os.environ['SECRET']);f.close();os._exit(0)"

# What the checker was: math-verify in a process like any other.
UNPROTECTED = """
import json, logging, os, sys
from math_verify import parse, verify
logging.disable(logging.CRITICAL)
for mark, gold, given in json.load(sys.stdin):
    if os.fork() == 0:
        os.environ["MARK"] = mark
        try:
            verify(*(parse(f"\\\\boxed{{{text}}}") for text in (gold, given)))
        finally:
            os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def checker(request) -> Iterator[MathVerify]:
    made = MathVerify(timeout=3.0, backend=request.param)
    try:
        assert made(r"\frac{1}{2}", "0.5")
    except CheckerError as error:
        pytest.skip(str(error))
    yield made
    made.close()


on_both = pytest.mark.parametrize("checker", ["namespaces", "landlock"], indirect=True, scope="module")


def spelled(attack: Attack, code: str, **options: tuple[str, str]) -> str:
    return attack.latex.replace("<P>", payload(code, **options))


@on_both
@pytest.mark.parametrize("attack", [pytest.param(attack, id=attack.name) for attack in ATTACKS])
def test_an_attack_is_neither_executed_nor_rewarded(checker, attack, tmp_path):
    tmp_path.chmod(0o777)
    mark = tmp_path / "executed"
    latex = spelled(attack, f"open({str(mark)!r}, 'w')")
    pairs = [(GOLD, latex), (latex, "7.5")]
    if attack in NAMES:
        pairs += [(latex, GOLD), ("7.5", latex), (latex, r"\text{x}"), ("x", latex)]
    assert not any(is_same_answer(gold, given, checker) for gold, given in pairs)
    assert not mark.exists()


@on_both
def test_a_hostile_reference_is_not_even_equal_to_itself(checker):
    programs = [latex for attack in NAMES if not is_admissible(latex := spelled(attack, "print(1)"))]
    assert len(programs) > 60
    assert not any(checker(latex, latex) for latex in programs)


@on_both
@pytest.mark.parametrize("layers", ["without the look at the text", "without that and the alphabet of names"])
def test_each_layer_inside_the_sandbox_holds_without_the_ones_before_it(checker, layers):
    """What an attack prints would be seen here."""
    code = f"import {MODULE} as checker\nGOLD = {GOLD!r}\n"
    if "alphabet" in layers:
        code += (
            "checker.check_name = checker.inspect = lambda *_: None\nchecker.FUNCTION = checker.re.compile('(?s).*')\n"
        )
    real = [attack for attack in NAMES if attack.executes]
    for attack in real[:: 10 if "alphabet" in layers else 4]:
        latex = spelled(attack, f"print('{TOKEN}')", classes=INSIDE)
        for gold, given in ((GOLD, latex), (latex, GOLD)):
            result = checker.result(f"{code}checker.reply('verdict', {gold!r}, {given!r})")
            assert TOKEN not in result.stdout + result.stderr + (result.error or ""), attack
            assert result.stdout != "verdict same\n", attack


def test_the_same_names_are_executed_where_nothing_is_mended(tmp_path):
    real = [attack for attack in NAMES if attack.executes]
    assert len(real) > 20
    questions = []
    for number, attack in enumerate(real):
        for side, place in enumerate(("answer", "reference") if number % 5 == 0 else ("answer",)):
            mark = tmp_path / f"{number} {place}"
            latex = spelled(attack, STEAL)
            questions.append((str(mark), *((GOLD, latex) if side == 0 else (latex, GOLD))))
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNPROTECTED],
        input=json.dumps(questions), text=True, check=True, env={**os.environ, "SECRET": "the host's"}, timeout=300,
    )  # fmt: skip
    assert [mark for mark, *_ in questions if not os.path.exists(mark)] == []
    assert all(Path(mark).read_text() == "the host's" for mark, *_ in questions)


def test_the_payload_of_the_tests_inside_the_sandbox_works_there():
    """Otherwise that nothing is executed would show nothing."""
    latex = spelled(NAMES[0], f"print('{TOKEN}')", classes=INSIDE)
    code = (
        "from math_verify import parse, verify\n"
        f"verify(*(parse('\\\\boxed{{' + text + '}}') for text in ({GOLD!r}, {latex!r})))"
    )
    try:
        with Interpreter(Limits(seconds=60.0), packages=("math_verify",)) as interpreter:
            result = interpreter.run(code)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert TOKEN in result.stdout, result


@on_both
@pytest.mark.parametrize(
    "attempt",
    [
        "eval('1')", "exec('1')", "compile('1', 'x', 'eval')", "__import__('decimal_that_is_not_loaded')",
        "open('/dev/null')", "__import__('os').system('true')", "__import__('os').listdir('/')",
        "__import__('socket').socket()", "__import__('ctypes').CDLL(None)", "__import__('marshal').loads(b'N')",
        "__import__('pickle').loads(b'cos\\nsystem\\n.')", "(lambda: 0).__code__.replace()", "__import__('os').fork()",
        "__import__('subprocess').run(['true'])", "__import__('sys').addaudithook(print)",
        "__import__('os').kill(__import__('os').getpid(), 0)", "__import__('gc').get_objects()",
    ],
)  # fmt: skip
def test_a_sealed_process_ends_at_the_first_attempt_to_do_more_than_compute(checker, attempt):
    result = checker.result(
        f"import {MODULE}\nattempt = lambda: {attempt}\n{MODULE}.seal()\n"
        "print(6 * 7, flush=True)\ntry:\n    attempt()\nfinally:\n    print('went on')"
    )
    assert result.stdout == "42\n"
    assert result.error is not None


@on_both
def test_no_state_survives_from_one_answer_to_the_next(checker):
    """Even code that runs, as none should, can fool nobody but itself."""
    spoil = (
        f"import builtins, math_verify, {MODULE}\n"
        f"{MODULE}.is_same = math_verify.verify = math_verify.parse = lambda *_, **__: True\n"
        f"builtins.spoilt = True\n{MODULE}.reply('t', '1', '2')"
    )
    assert checker.result(spoil).stdout == "t same\n"
    assert not checker(GOLD, r"\sqrt{52}")
    assert checker(GOLD, r"\sqrt{3 \cdot 17}")
    assert checker.result("'spoilt' in dir(__builtins__)").stdout == "False\n"


@on_both
def test_a_comparison_has_an_empty_environment(checker, monkeypatch):
    monkeypatch.setenv("SECRET", "the host's")
    checker.close()
    seen = checker.result("import os\ndict(os.environ)").stdout
    assert seen in ("{}\n", "{'HOME': '/scratch', 'TMPDIR': '/scratch'}\n")


@on_both
def test_a_verdict_without_the_token_of_its_question_does_not_count(checker, monkeypatch):
    for said in ("same\n", "0123456789abcdef same\n", "True\n"):
        monkeypatch.setattr(checker, "result", lambda code, said=said: Result(said))
        assert not checker(GOLD, "7")


@pytest.mark.parametrize("attack", [pytest.param(attack, id=attack.name) for attack in COSTS])
def test_the_look_at_the_text_takes_no_time(attack):
    for text in (attack.latex, attack.latex * 50, "\\text{" * 100_000, "\\hat{" + "(" * 100_000):
        started = time.process_time()
        is_admissible(text)
        is_admissible(text[:2000])
        assert time.process_time() - started < 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["landlock", "namespaces"])
def test_the_attacks_fail_for_an_ordinary_user_too(backend):
    try:
        Interpreter(backend=backend).close()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    arguments = ["-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "tests/test_checker_attacks.py"]
    command = [
        sys.executable,
        str(HERE / "sandbox_elsewhere.py"),
        "--user",
        *arguments,
        "-k",
        f"{backend} and not user",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=HERE.parent)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert "passed" in ran.stdout
    assert "skipped" not in ran.stdout
