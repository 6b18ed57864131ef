"""The interpreter as its users see it: what it runs, what it remembers, what it says, and that it leaves nothing."""

from __future__ import annotations

import http.server
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_rl.sandbox import Interpreter, Limits, Result, SandboxUnavailable
from spear_rl.sandbox.client import interpreter
from spear_rl.sandbox.client.fusion import showing_last_value
from spear_rl.sandbox.isolation.syscalls import COMPUTING, numbers

HERE = Path(__file__).parent
LIMITS = Limits(seconds=10.0, memory_mb=256, output_chars=1000)
ISOLATING = ("namespaces", "landlock")
LANDLOCK_CALLS = "444,445,446"
UNSHARE, PRCTL = {"x86_64": ("272", "157"), "aarch64": ("97", "167")}.get(platform.machine(), ("0", "0"))

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the isolating backends are Linux's")


def made(backend: str, limits: Limits = LIMITS, **options: object) -> Interpreter:
    try:
        return Interpreter(limits, backend=backend, **options)
    except SandboxUnavailable as error:
        if backend in ISOLATING:
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module", params=[*ISOLATING, "unsafe-subprocess"])
def pool(request) -> Iterator[Interpreter]:
    with made(request.param) as interpreter:
        yield interpreter


@pytest.fixture(scope="module", params=ISOLATING)
def jail(request) -> Iterator[Interpreter]:
    with made(request.param) as interpreter:
        yield interpreter


# What it runs


def test_printed_text_and_a_trailing_value_come_back_in_order(pool):
    result = pool.run("print('a')\nx = 2\nx + 1")
    assert (result.stdout, result.error, result.ok, result.timed_out) == ("a\n3\n", None, True, False)
    assert 0 < result.seconds < LIMITS.seconds


@pytest.mark.parametrize(
    ("code", "shown"),
    [("", ""), ("None", ""), ("x = 1", ""), ("'text'", "'text'\n"), ("1, 2", "(1, 2)\n"), ("1;", "1\n"), ("# no", "")],
)
def test_only_a_trailing_expression_with_a_value_is_shown(pool, code, shown):
    assert pool.run(code).stdout == shown


def test_numpy_and_sympy_are_there(pool):
    code = """
import numpy as np
from sympy import Eq, Rational, factorint, integrate, solve, symbols
x = symbols("x")
print(solve(Eq(x**2 - 5*x + 6, 0), x), integrate(x**2, (x, 0, 1)), Rational(1, 3) + Rational(1, 6), factorint(360))
print(np.linalg.solve(np.array([[2., 0.], [0., 4.]]), np.array([2., 8.])), int(np.arange(10).sum()))
"""
    assert pool.run(code).stdout == "[2, 3] 1/3 1/2 {2: 3, 3: 2, 5: 1}\n[1. 2.] 45\n"


def test_modules_not_loaded_beforehand_can_be_imported(pool):
    code = "import tabnanny, html.entities, sympy.physics.optics\nhtml.entities.name2codepoint['lt']"
    result = pool.run(code)
    assert result.stdout == "60\n", result


def test_a_package_that_was_not_asked_for_is_unknown(jail):
    assert jail.run("import pytest").error.endswith("ModuleNotFoundError: No module named 'pytest'\n")
    assert jail.run("import torch").error.endswith("ModuleNotFoundError: No module named 'torch'\n")
    assert jail.run("import spear_rl").error.endswith("ModuleNotFoundError: No module named 'spear_rl'\n")


def test_what_is_written_to_the_descriptors_is_captured(pool):
    result = pool.run(
        "import os, sys\nos.write(1, b'one ')\nprint('two')\nos.write(2, b'three ')\nsys.stderr.write('four')\nNone"
    )
    assert (result.stdout, result.stderr) == ("one two\n", "three four")


def test_there_is_nothing_to_read_from(pool):
    assert "EOFError" in pool.run("input()").error


def test_dataclasses_pickles_and_main_work_as_in_a_script(pool):
    code = """
from dataclasses import dataclass
import pickle
@dataclass
class Point:
    x: int
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(3))))
"""
    assert pool.run(code).stdout == "Point(x=3)\n"


def test_leaving_is_the_end_of_a_cell_and_not_an_error(pool):
    with pool.session() as session:
        assert session.run("x = 1\nprint('a')\nexit()\nprint('b')").stdout == "a\n"
        assert session.run("import sys\nsys.exit(0)").error is None
        assert session.run("sys.exit('why')").error == "SystemExit: why"
        assert session.run("x").stdout == "1\n"


def test_a_files_scratch_is_private_and_goes_with_its_episode():
    with made("namespaces") as jail:
        with jail.session() as session, jail.session() as other:
            assert session.run("open('a.txt', 'w').write('hello')").stdout == "5\n"
            assert (
                session.run("import os, tempfile\nopen('a.txt').read(), os.listdir('.')").stdout
                == "('hello', ['a.txt'])\n"
            )
            assert session.run("tempfile.TemporaryFile().write(b'x')").stdout == "1\n"
            assert other.run("import os\nos.listdir('.')").stdout == "[]\n"
        assert jail.run("import os\nos.listdir('.')").stdout == "[]\n"


def test_the_jail_does_not_even_tell_what_exists():
    with made("namespaces") as jail:
        code = f"import os\n[os.path.exists(p) for p in ('/etc/passwd', '/proc', {str(HERE)!r}, '/scratch')]"
        assert jail.run(code).stdout == "[False, False, False, True]\n"


def test_the_jail_does_not_tell_who_and_where_it_is():
    with made("namespaces") as jail:
        code = "import os\nos.uname().nodename, os.getuid(), os.getgid(), set(os.getgroups()) - {1000, 65534}"
        assert jail.run(code).stdout == "('sandbox', 1000, 1000, set())\n"


def test_what_a_child_finds_of_its_server_does_not_name_the_trainers_import_path(jail):
    code = """
import sys
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    if isinstance(settings := frame.f_locals.get("settings"), dict):
        print(settings)
"""
    assert set(jail.run(code).stdout.split()) == {"{}"}


def test_an_alarm_works_as_a_time_limit_of_the_codes_own(pool):
    code = """
import signal
def late(*_):
    raise TimeoutError("mine")
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    while True:
        pass
except TimeoutError as error:
    print(error)
"""
    assert pool.run(code).stdout == "mine\n"


# What it remembers


def test_variables_last_for_an_episode_and_no_longer(pool):
    with pool.session() as one, pool.session() as two:
        assert one.run("x = 1\ndef f():\n    return x").error is None
        assert two.run("x = 2").error is None
        assert one.run("x = x + 10\nf()").stdout == "11\n"
        assert two.run("x").stdout == "2\n"
    assert "NameError" in pool.run("x").error
    with pool.session() as three:
        assert "NameError" in three.run("f()").error
        assert three.run("1 + 1").stdout == "2\n"


def test_nothing_done_to_the_interpreter_reaches_another_episode(pool):
    spoil = """
import builtins, gc, sys, sympy, numpy, math, random, os
builtins.print = lambda *a: None
sympy.solve = numpy.sum = math.sqrt = lambda *a: "spoiled"
sys.modules["json"] = None
sys.path.insert(0, "/nowhere")
sys.settrace(lambda *a: None)
gc.disable()
sys.setrecursionlimit(123)
os.environ["SPOILED"] = "1"
"""
    check = """
import gc, json, math, numpy, os, sympy, sys
x = sympy.Symbol("x")
print(sympy.solve(x - 1), numpy.sum([1, 2]), math.sqrt(4), gc.isenabled(), sys.getrecursionlimit())
print("SPOILED" in os.environ)
"""
    expected = pool.run(check).stdout
    assert expected.startswith("[1] 3 2.0 True")
    for _ in range(3):
        with pool.session() as session:
            assert session.run(spoil).error is None
        assert pool.run(check).stdout == expected


def test_a_failed_cell_keeps_the_variables(pool):
    with pool.session() as session:
        assert "ZeroDivisionError" in session.run("x = 5\n1 / 0").error
        result = session.run("x")
    assert (result.stdout, result.state_lost) == ("5\n", False)


def test_the_same_seed_gives_the_same_numbers(pool):
    code = "import random, numpy\n(random.random(), numpy.random.rand(), list({'a', 'b', 'c'}))"
    drawn = []
    for seed in (7, 7, 8, None, None):
        with pool.session(seed=seed) as session:
            drawn.append(session.run(code).stdout)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4


def test_after_a_time_out_the_state_is_lost_and_the_session_goes_on():
    with made("auto", Limits(seconds=0.5)) as pool, pool.session() as session:
        assert session.run("x = 1").state_lost is False
        late = session.run("print('before')\nwhile True:\n    pass")
        assert (late.timed_out, late.state_lost, late.stdout) == (True, True, "before\n")
        assert late.error.startswith("Timed out after 0.5 seconds.")
        assert 0.5 <= late.seconds < 5
        after = session.run("x")
        assert after.state_lost
        assert "NameError" in after.error
        again = session.run("y = 2\ny")
        assert (again.stdout, again.state_lost, again.timed_out) == ("2\n", False, False)


def test_memory_is_bounded_and_can_be_given_back(pool):
    with pool.session() as session:
        full = session.run(f"x = [bytes(1 << 20) for _ in range({2 * LIMITS.memory_mb})]")
        assert full.out_of_memory
        assert "MemoryError" in full.error
        assert session.run("y = bytes(100 << 20)\nlen(y)").stdout == f"{100 << 20}\n"


def test_nothing_runs_between_two_cells(jail):
    """Not even a signal handler on a timer: the process is stopped."""
    code = """
import os, signal
def spin(*_):
    while True:
        pass
signal.signal(signal.SIGALRM, spin)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
os.write(4, b"d" + bytes(4))  # a forged reply, so that nobody calls the timer off
spin()
"""
    with jail.session() as session:
        assert session.run(code).error is None
        until(lambda: list(processes_below(server_of(jail)).values()).count("T") == 1)
        [stopped] = [pid for pid, state in processes_below(server_of(jail)).items() if state == "T"]
        for _ in range(20):  # others may run: the pool fills up meanwhile
            time.sleep(0.01)
            assert processes_below(server_of(jail))[stopped] == "T"


# What it says


def test_a_traceback_shows_the_codes_own_lines_and_no_path_of_the_host(pool):
    error = pool.run("import sympy\n\ndef f(x):\n    return sympy.sqrt(x, y=3, z=4)\n\nf(2)").error
    assert error.startswith('Traceback (most recent call last):\n  File "<cell 1>", line 6, in <module>\n    f(2)\n')
    assert '  File "<cell 1>", line 4, in f\n    return sympy.sqrt(x, y=3, z=4)\n' in error
    assert error.splitlines()[-1].startswith("TypeError")
    for code in ("import json\njson.loads('{')", "from sympy import nothing_like_it", "import numpy\nnumpy.zeros(-1)"):
        error = pool.run(code).error
        assert sys.prefix not in error
        assert sys.base_prefix not in error
        assert "site-packages" not in error
        assert "spear_rl" not in error


def test_a_traceback_counts_lines_as_the_parser_does(pool):
    error = pool.run("x = 'a\u2028b\x0cc'\n1 / 0\n").error
    assert '  File "<cell 1>", line 2, in <module>\n    1 / 0\n' in error


def test_a_syntax_error_points_at_its_place(pool):
    error = pool.run("x = 1\nif x\n    pass").error
    assert error.splitlines()[0] == '  File "<cell 1>", line 2'
    assert error.endswith("SyntaxError: expected ':'\n")


def test_causes_are_told(pool):
    error = pool.run("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e").error
    assert "ZeroDivisionError" in error
    assert "direct cause" in error
    assert error.endswith("ValueError: second\n")


def test_long_output_is_cut_and_the_variables_stay(pool):
    with pool.session() as session:
        result = session.run("x = 3\nfor n in range(100000):\n    print(n)")
        assert result.truncated
        assert len(result.stdout) == LIMITS.output_chars
        assert result.stdout.startswith("0\n1\n2\n")
        exact = session.run(f"print('é' * {LIMITS.output_chars}, end='')")
        assert (len(exact.stdout), exact.truncated) == (LIMITS.output_chars, False)
        assert session.run("x").stdout == "3\n"


@pytest.mark.parametrize(
    "spoiling", ["while True:\n    sys.stdout.write('x' * 1000000)", "sys.stdout.close()", "sys.stdout = None"]
)
def test_a_spoiled_output_is_as_good_as_new_in_the_next_cell(pool, spoiling):
    with pool.session() as session:
        session.run("import sys\ny = 5\n" + spoiling)
        after = session.run("print('clean')\ny")
    assert (after.stdout, after.error) == ("clean\n5\n", None)


def test_many_open_files_are_no_obstacle():
    held = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("no more than 4096 files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        with made("auto") as pool, pool.session() as session:
            assert session.run("1").stdout == "1\n"
            assert pool.run("2").stdout == "2\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_long_error_keeps_its_end(pool):
    error = pool.run("raise ValueError('x' * 100000 + 'the end')").error
    assert len(error) <= LIMITS.output_chars
    assert error.endswith("the end\n")


def test_code_too_long_is_answered_and_not_run(pool):
    with pool.session() as session:
        session.run("x = 1")
        assert "characters" in session.run("x = 2\n" + "#" * LIMITS.code_chars).error
        assert session.run("x").stdout == "1\n"
        assert session.run("y = '''" + "a" * (LIMITS.code_chars - 100) + "'''\nlen(y)").stdout.strip().isdigit()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=200))
def test_any_text_comes_back_as_it_was_printed(jail, text):
    result = jail.run(f"import sys\nsys.stdout.write({text!r})\nNone")
    assert result.stdout == text.encode("utf-8", "replace").decode()[: LIMITS.output_chars], result


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(code=st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_any_text_at_all_can_be_given_as_code(jail, code):
    result = jail.run(code)
    assert isinstance(result, Result)
    assert not result.timed_out


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": 0}, {"seconds": float("inf")}, {"seconds": True}, {"memory_mb": 0}, {"disk_mb": 1.5},
     {"output_chars": -1}, {"max_files": "9"}, {"seconds": float("nan")}],
)  # fmt: skip
def test_limits_that_bound_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=f"Limits.{next(iter(wrong))}"):
        Limits(**wrong)


def test_wrong_use_is_said_at_once():
    with pytest.raises(ValueError, match="backend is one of"):
        Interpreter(backend="docker")
    with pytest.raises(ValueError, match="url"):
        Interpreter(backend="sandbox-fusion")
    with pytest.raises(ValueError, match="url"):
        Interpreter(url="http://localhost")
    interpreter = made("auto")
    with pytest.raises(TypeError, match="code is a str"):
        interpreter.run(b"1")
    session = interpreter.session()
    session.close()
    with pytest.raises(RuntimeError, match="session is closed"):
        session.run("1")
    interpreter.close()
    interpreter.close()
    for use in (lambda: interpreter.run("1"), interpreter.session):
        with pytest.raises(RuntimeError, match="interpreter is closed"):
            use()


# How it holds


@pytest.mark.slow
def test_a_thousand_calls_in_a_row(jail):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        assert jail.run(f"x = {number}\nx * 2").stdout == f"{number * 2}\n"
    assert len(os.listdir("/proc/self/fd")) == before
    assert settled(jail)


@pytest.mark.slow
def test_sixty_four_sessions_at_once(jail):
    def play(number: int) -> list[str]:
        with jail.session() as session:
            session.run(f"x = {number}")
            return [session.run("x += 1\nx").stdout for _ in range(5)]

    with ThreadPoolExecutor(64) as threads:
        played = list(threads.map(play, range(64)))
        once = list(threads.map(lambda n: jail.run(f"{n} ** 2").stdout, range(64)))
    assert played == [[f"{number + 1 + turn}\n" for turn in range(5)] for number in range(64)]
    assert once == [f"{number**2}\n" for number in range(64)]
    assert settled(jail)


def test_sixty_four_open_sessions_keep_apart(pool):
    sessions = [pool.session() for _ in range(64)]
    for number, session in enumerate(sessions):
        assert session.run(f"x = {number}").ok
    assert [session.run("x").stdout for session in sessions] == [f"{number}\n" for number in range(64)]
    for session in sessions:
        session.close()


def test_waiting_for_a_place_does_not_count_as_running():
    with made("auto", Limits(seconds=1.0), max_running=1) as pool, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(pool.run, ["import time\ntime.sleep(0.6)\n7"] * 4))
    assert [result.stdout for result in results] == ["7\n"] * 4


@on_linux
def test_a_server_that_dies_is_replaced(caplog):
    with made("auto") as pool:
        with pool.session() as session:
            session.run("x = 1")
            old = server_of(pool)
            family = {old, *processes_below(old)}
            os.kill(old, signal.SIGKILL)
            until(lambda: not any(is_running(pid) for pid in family - {old}))
            lost = session.run("x")
            assert lost.state_lost
            assert lost.error
            assert session.run("1").stdout == "1\n"
        assert pool.run("2").stdout == "2\n"
        assert server_of(pool) != old


@on_linux
def test_a_new_server_runs_nothing_before_it_has_passed_the_self_test(monkeypatch):
    def no_room(*_: object, **__: object) -> None:
        raise interpreter.NoProcessError("no room")

    with made("auto") as pool:
        if pool.backend == "unsafe-subprocess":
            pytest.skip("nothing isolates here")
        old = server_of(pool)
        os.kill(old, signal.SIGKILL)
        until(lambda: not is_running(old))
        with monkeypatch.context() as patched:
            patched.setattr(interpreter.Interpreter, "_test_isolation", no_room)
            with pytest.raises(SandboxUnavailable, match="no room"):
                pool.run("1")
        monkeypatch.setattr(interpreter, "SELF_TEST", "print('sockets')")
        with pytest.raises(SandboxUnavailable, match="does not isolate on this machine: sockets"):
            pool.run("1")


PARENT = """
import os, sys, threading, time
from spear_rl.sandbox import Interpreter, Limits
pool = Interpreter(Limits(seconds=60), backend=sys.argv[1])
sessions = [pool.session() for _ in range(3)]
sessions[0].run("x = 1")
for session in sessions[1:]:
    threading.Thread(target=session.run, args=("while True:\\n    pass",), daemon=True).start()
time.sleep(0.3)
if sys.argv[2] == "forked" and os.fork() == 0:
    os.close(1)
    time.sleep(20)  # holds every descriptor of its parent
    os._exit(0)
print(pool._server._process.pid, flush=True)
time.sleep(60)
"""


@on_linux
@pytest.mark.parametrize("how", ["alone", "forked"])
@pytest.mark.parametrize("backend", ISOLATING)
def test_killing_the_parent_leaves_nothing(backend, how):
    made(backend).close()
    mounts = Path("/proc/self/mountinfo").read_text()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, backend, how], stdout=subprocess.PIPE)
    server = int(parent.stdout.readline())
    family = {server, *processes_below(server)}
    assert len(family) >= 4
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(is_running(pid) for pid in family))
    assert Path("/proc/self/mountinfo").read_text() == mounts


@on_linux
def test_closing_leaves_nothing_even_with_code_running(jail):
    with made(jail.backend) as pool:
        session = pool.session()
        thread = threading.Thread(target=lambda: session.run("while True:\n    pass"))
        thread.start()
        time.sleep(0.3)
        family = {server_of(pool), *processes_below(server_of(pool))}
    thread.join(20)
    assert not thread.is_alive()
    assert not any(is_running(pid) for pid in family)


def test_an_interpreter_works_beside_torch_and_threads_and_never_loads_torch():
    code = """
import sys
from spear_rl.sandbox import Interpreter
assert "torch" not in sys.modules and "numpy" not in sys.modules
import threading, torch
threads = [threading.Thread(target=lambda: torch.ones(100, 100) @ torch.ones(100, 100)) for _ in range(4)]
for thread in threads:
    thread.start()
with Interpreter(backend=sys.argv[1]) as pool:
    print(pool.run("import sys\\n'torch' in sys.modules").stdout)
"""
    ran = subprocess.run([sys.executable, "-c", code, made_backend()], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "False\n\n", ran.stderr


def test_an_interpreter_is_not_used_in_a_forked_process(pool):
    pid = os.fork()
    if pid == 0:
        try:
            pool.run("1")
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert pool.run("1").stdout == "1\n"


# Lesser machines


def elsewhere(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "sandbox_elsewhere.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=HERE.parent)


SHOW = """
from spear_rl.sandbox import Interpreter
with Interpreter() as i:
    print(i.backend, i.run("import sympy\\n6 * 7").stdout)
"""


@on_linux
def test_where_user_namespaces_are_missing_landlock_is_used():
    made("landlock").close()
    ran = elsewhere("--without", UNSHARE, "-c", SHOW)
    assert ran.stdout.split() == ["landlock", "42"], ran.stderr


@on_linux
def test_where_landlock_is_missing_namespaces_are_used():
    made("namespaces").close()
    ran = elsewhere("--without", LANDLOCK_CALLS, "-c", SHOW)
    assert ran.stdout.split() == ["namespaces", "42"], ran.stderr


@on_linux
def test_where_neither_exists_nothing_runs_unless_asked_for_in_so_many_words():
    ran = elsewhere("--without", f"{LANDLOCK_CALLS},{UNSHARE}", "-c", SHOW)
    assert "SandboxUnavailable: this machine cannot isolate untrusted code" in ran.stderr
    assert "unsafe-subprocess" in ran.stderr
    assert "42" not in ran.stdout
    unsafe = SHOW.replace("Interpreter()", "Interpreter(backend='unsafe-subprocess')")
    ran = elsewhere("--without", f"{LANDLOCK_CALLS},{UNSHARE}", "-c", unsafe)
    assert ran.stdout.split() == ["unsafe-subprocess", "42"], ran.stderr


@on_linux
def test_an_ordinary_user_gets_the_same():
    backends = [backend for backend in ISOLATING if not unusable(backend)]
    for backend in backends:
        ran = elsewhere("--user", "-c", SHOW.replace("Interpreter()", f"Interpreter(backend={backend!r})"))
        assert ran.stdout.split() == [backend, "42"], ran.stderr


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "backend"),
    [(["--user"], "landlock"), (["--user"], "namespaces"), (["--without", LANDLOCK_CALLS], "namespaces")],
    ids=["landlock as a user", "namespaces as a user", "namespaces without Landlock"],
)
def test_the_quick_attacks_fail_on_lesser_machines_too(place, backend):
    made(backend).close()
    pytest_arguments = ["-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "tests/test_sandbox_attacks.py"]
    # Without Landlock the names of the folders that lead to the libraries can be listed.
    groups = "files or others or channels or network or processes or named_ones or evict or queues_no_signal"
    quick = f"{backend} and ({groups}) and not (list and folders) and not package"
    ran = elsewhere(*place, *pytest_arguments, "-k", quick)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


# SandboxFusion


class Fusion(http.server.BaseHTTPRequestHandler):
    """A service that speaks SandboxFusion's documented schema and runs the code with plain subprocesses."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, asked))
        canned = self.server.canned
        reply = (
            canned if canned is not None else self._ran(asked) if self.path == "/run_code" else self._notebook(asked)
        )
        body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(self.server.code)
        self.end_headers()
        self.wfile.write(body)

    def _ran(self, asked: dict) -> dict:
        assert asked["language"] == "python"
        try:
            ran = subprocess.run(
                [sys.executable, "-c", asked["code"]], capture_output=True, text=True, timeout=asked["run_timeout"]
            )
        except subprocess.TimeoutExpired:
            late = {
                "status": "TimeLimitExceeded",
                "execution_time": None,
                "return_code": None,
                "stdout": "",
                "stderr": "",
            }
            return {"status": "Failed", "message": "", "compile_result": None, "run_result": late, "files": {}}
        record = {
            "status": "Finished",
            "execution_time": 0.1,
            "return_code": ran.returncode,
            "stdout": ran.stdout,
            "stderr": ran.stderr,
        }
        status = "Success" if ran.returncode == 0 else "Failed"
        return {
            "status": status,
            "message": "",
            "compile_result": None,
            "run_result": record,
            "executor_pod_name": None,
            "files": {},
        }

    def _notebook(self, asked: dict) -> dict:
        import contextlib
        import io

        space, cells = {}, []
        for source in asked["cells"]:
            out, record = io.StringIO(), {"stdout": "", "stderr": "", "display": [], "error": []}
            try:
                with contextlib.redirect_stdout(out):
                    try:
                        value = eval(source, space)
                    except SyntaxError:
                        exec(source, space)
                    else:
                        record["display"] = [] if value is None else [{"text/plain": repr(value)}]
            except Exception as error:
                name = type(error).__name__
                record["error"] = [
                    {"ename": name, "evalue": str(error), "traceback": [f"\x1b[0;31m{name}\x1b[0m: {error}"]}
                ]
            record["stdout"] = out.getvalue()
            cells.append(record)
        driver = {"status": "Finished", "execution_time": 1.0, "return_code": 0, "stdout": "", "stderr": ""}
        return {"status": "Success", "message": "", "driver": driver, "cells": cells, "files": {}}

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def service():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    server.asked, server.canned, server.code = [], None, 200
    server.url = f"http://127.0.0.1:{server.server_port}/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_fusion_runs_code_and_shows_the_last_value(service):
    pool = Interpreter(Limits(seconds=5.0, output_chars=20), backend="sandbox-fusion", url=service.url)
    result = pool.run("print('a')\nx = 2; x + 1  # three")
    assert (result.stdout, result.error) == ("a\n3\n", None)
    path, asked = service.asked[0]
    assert path == "/run_code"
    assert (asked["language"], asked["run_timeout"], asked["compile_timeout"]) == ("python", 5.0, 5.0)
    assert pool.run("1 / 0").error.endswith("division by zero\n")
    long = pool.run("print('y' * 100)")
    assert (long.stdout, long.truncated) == ("y" * 20, True)


def test_fusion_times_out(service):
    pool = Interpreter(Limits(seconds=0.5), backend="sandbox-fusion", url=service.url)
    result = pool.run("while True: pass")
    assert result.timed_out
    assert result.error.startswith("Timed out after 0.5 seconds")


def test_fusion_keeps_an_episodes_variables_by_running_its_cells_again(service):
    pool = Interpreter(backend="sandbox-fusion", url=service.url)
    with pool.session(seed=3) as session, pool.session() as other:
        assert session.run("x = 1\nprint('set')").stdout == "set\n"
        assert session.run("x + 1").stdout == "2\n"
        assert session.run("1 / 0").error == "ZeroDivisionError: division by zero"
        assert session.run("x").stdout == "1\n"
        assert "NameError" in other.run("x").error
    assert [len(asked["cells"]) for path, asked in service.asked] == [2, 3, 4, 5, 1]
    assert {path for path, _ in service.asked} == {"/run_jupyter"}


def test_fusion_a_notebook_out_of_time_leaves_the_cell_out(service):
    pool = Interpreter(backend="sandbox-fusion", url=service.url)
    with pool.session() as session:
        session.run("x = 1")
        late = {"status": "TimeLimitExceeded", "execution_time": 5, "return_code": None, "stdout": "", "stderr": ""}
        service.canned = {"status": "SandboxError", "message": "", "driver": late, "cells": [], "files": {}}
        assert session.run("slow()").timed_out
        service.canned = None
        assert session.run("x").stdout == "1\n"


@pytest.mark.parametrize(
    ("reply", "code"),
    [(b"not json", 200), (b"[]", 200), (b"{}", 200), (b"[" * 100000, 200), (b"{}", 500), (b"x" * (20 << 20), 200),
     (b'{"status": "SandboxError", "message": "no"}', 200), (b'{"status": "Success", "run_result": 3}', 200)],
)  # fmt: skip
def test_fusion_a_service_that_fails_is_not_the_codes_fault(service, reply, code):
    service.canned, service.code = reply, code
    pool = Interpreter(backend="sandbox-fusion", url=service.url)
    with pytest.raises(SandboxUnavailable, match="SandboxFusion"):
        pool.run("1")
    with pytest.raises(SandboxUnavailable, match="SandboxFusion"), pool.session() as session:
        session.run("1")


def test_fusion_that_is_not_there_is_said():
    with pytest.raises(SandboxUnavailable, match="SandboxFusion at http"):
        Interpreter(backend="sandbox-fusion", url="http://127.0.0.1:9").run("1")


@given(
    before=st.sampled_from(["", "é = 'é'; ", "x = [1,\n 2]\n", "# é\n", "x = 'a\u2028b\x0cc'\n", "x = 1\r\n"]),
    after=st.sampled_from(["", "  # é", "\n\n"]),
    value=st.sampled_from(["1, 2", "(3\n + 4)", "'é' * 2", "lambda: 0", "[n for n in (1,)]", "1 if 1 else 2"]),
)
def test_fusion_showing_the_last_value_changes_nothing_else(before, after, value):
    shown = []
    code = showing_last_value(before + value + after).replace("__import__('sys').displayhook", "hook")
    exec(code, {"hook": shown.append})
    expected = eval(value)
    assert shown == [expected] or callable(expected)
    assert code.count("\n") == (before + value + after).count("\n")


# Helpers of the tests above


def server_of(pool: Interpreter) -> int:
    return pool._server._process.pid


def unusable(backend: str) -> bool:
    try:
        Interpreter(backend=backend).close()
    except SandboxUnavailable:
        return True
    return False


def made_backend() -> str:
    return "unsafe-subprocess" if unusable("auto") else "auto"


def processes_below(root: int) -> dict[int, str]:
    """pid -> state letter of every process below one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = (int(fields[1]), fields[0])
    out: dict[int, str] = {}
    while grown := {pid: how for pid, (up, how) in parents.items() if (up == root or up in out) and pid not in out}:
        out |= grown
    return out


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def settled(pool: Interpreter) -> bool:
    """Whether the pool comes to rest with nothing but its spare processes."""
    expected = pool._spares + (1 if pool.backend == "namespaces" else 0)
    until(lambda: len(processes_below(server_of(pool))) == expected)
    return True


def test_the_filter_knows_both_processors():
    for machine in ("x86_64", "aarch64"):
        assert len(set(numbers(COMPUTING, machine).values())) == len(numbers(COMPUTING, machine))
