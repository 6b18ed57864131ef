"""Every attack on every isolating backend: it fails, the pool still serves, and nothing is left on the host."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_attacks import ATTACKS, FORBIDDEN, PRELUDE, Attack, header_numbers, numbers_here
from spear_rl.sandbox import Interpreter, Limits, Result, SandboxUnavailable
from spear_rl.sandbox.isolation import seccomp
from spear_rl.sandbox.isolation.syscalls import (
    ARCHITECTURES,
    CHECKED,
    COMPUTING,
    PIVOT_ROOT,
    PRETENDED,
    RETIRED,
    SCRATCH,
    numbers,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the isolating backends are Linux's")

LIMITS = Limits(seconds=1.0, memory_mb=64, output_chars=2000, disk_mb=4, max_files=32)
BACKENDS = ("namespaces", "landlock")
FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", os.getcwd(), os.path.expanduser("~"))

# A process of the host with something to steal: a secret in its memory, its environment and an open file; sockets; and
# a log of all that happens to it.
VICTIM = """
import ctypes, os, select, signal, socket, sys
target, mark = sys.argv[1:]
log = os.open(target + "/log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM}:
    signal.signal(number, lambda n, f: os.write(log, b"signal %d\\n" % n))
memory = ctypes.create_string_buffer(os.environ["SPEAR_SECRET"].encode(), 40)
file = open(target + "/secret.txt")
tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
local, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
local.bind(target + "/socket")
abstract.bind("\\0" + mark)
local.listen()
abstract.listen()
print(ctypes.addressof(memory), file.fileno(), tcp.getsockname()[1], udp.getsockname()[1], flush=True)
before = os.sched_getaffinity(0)
while True:
    for ready in select.select([tcp, udp, local, abstract], [], [])[0]:
        os.write(log, b"contact\\n")
        if ready is udp:
            udp.recv(100)
        else:
            ready.accept()[0].close()
"""


class Host:
    """What there is to steal or to break, and whether it was."""

    def __init__(self) -> None:
        self.token, self.mark = "tok" + secrets.token_hex(12), "spear" + secrets.token_hex(8)
        self.target = Path(tempfile.mkdtemp(prefix="spear-target-"))
        self.target.chmod(0o777)  # so that it is not the user's rights that stop anyone
        self.secret = self.target / "secret.txt"
        self.restore()
        environment = {"SPEAR_SECRET": self.token, "PATH": os.environ.get("PATH", "")}
        self.victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(self.target), self.mark], stdout=subprocess.PIPE, env=environment
        )
        assert self.victim.stdout is not None
        self.address, self.fd, self.port, self.udp = map(int, self.victim.stdout.readline().split())
        (self.target / "socket").chmod(0o777)
        # A descriptor that an exec would inherit.
        self.leak = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self.leak, True)
        site = Path(pytest.__file__).parent.parent
        self.words = {
            "secret": self.secret, "target": self.target, "token": self.token, "mark": self.mark,
            "pid": self.victim.pid, "address": self.address, "fd": self.fd, "port": self.port, "udp": self.udp,
            "parent": os.getpid(), "cwd": os.getcwd(), "home": os.path.expanduser("~"), "package": pytest.__file__,
            "site": site, "machine": platform.machine(), **numbers_here(),
        }  # fmt: skip

    def restore(self) -> None:
        """Put everything back as it was before an attack."""
        shutil.rmtree(self.target / ".ssh", ignore_errors=True)
        for path in [*self.target.glob("spear*"), self.secret, self.target / "link"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (self.target / "log").write_text("")
        (self.target / ".ssh").mkdir()
        (self.target / ".ssh" / "id_rsa").write_text(self.token)
        self.secret.write_text(self.token)
        self.secret.chmod(0o666)
        self.target.chmod(0o777)
        (self.target / "link").symlink_to(self.secret)
        os.utime(self.secret, (1000, 1000))
        for folder in FOLDERS:
            for path in Path(folder).glob(f"{getattr(self, 'mark', '-')}*"):
                path.unlink()

    def code(self, attack: Attack) -> str:
        return PRELUDE + re.sub(r"@(\w+)@", lambda found: str(self.words[found[1]]), attack.code)

    def harm(self, result: Result) -> list[str]:
        """What an attack achieved, as seen from outside and in what it printed."""
        shown = result.stdout + result.stderr + (result.error or "")
        out = [line for line in shown.splitlines() if line.startswith("PWNED")]
        if self.token in shown:
            out.append("the secret got out")
        out += [f"left {path}" for folder in [*FOLDERS, self.target] for path in Path(folder).glob(f"{self.mark}*")]
        if set(os.listdir(self.target)) != {".ssh", "link", "log", "secret.txt", "socket"}:
            out.append(f"the folder holds {os.listdir(self.target)}")
        if contacts := (self.target / "log").read_text():
            out.append(f"the victim noticed {contacts}")
        if not self.secret.exists() or self.secret.read_text() != self.token:
            out.append("the file changed")
        else:
            status = self.secret.stat()
            if (status.st_mode & 0o7777, status.st_mtime, status.st_nlink) != (0o666, 1000, 1):
                out.append(f"the file's record changed: {status}")
            if any(name.startswith("user.") for name in os.listxattr(self.secret)):
                out.append("the file has an attribute")
        if self.target.stat().st_mode & 0o7777 != 0o777 or not (self.target / ".ssh" / "id_rsa").exists():
            out.append("the folder changed")
        if self.victim.poll() is not None:
            out.append("the victim died")
        elif os.getpriority(os.PRIO_PROCESS, self.victim.pid) != os.getpriority(os.PRIO_PROCESS, 0):
            out.append("the victim's priority changed")
        elif os.sched_getaffinity(self.victim.pid) != os.sched_getaffinity(0):
            out.append("the victim's cores changed")
        return out

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.victim.stdout.close()
        os.close(self.leak)
        shutil.rmtree(self.target)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture(scope="module")
def pool(request) -> Iterator[Interpreter]:
    try:
        interpreter = Interpreter(LIMITS, backend=request.param)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with interpreter:
        yield interpreter


def descendants(root: int) -> dict[int, str]:
    """pid -> state and threads of every process below one."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = (int(fields[1]), f"{fields[0]} with {fields[17]} threads")
    out: dict[int, str] = {}
    while grown := {pid: how for pid, (up, how) in parents.items() if (up == root or up in out) and pid not in out}:
        out |= grown
    return out


def quiet(interpreter: Interpreter) -> dict[int, str]:
    """The processes of an idle pool; waits for a moment until there are no more than those."""
    return quiet_with(interpreter, sessions=0)


def quiet_with(interpreter: Interpreter, *, sessions: int) -> dict[int, str]:
    assert interpreter._server is not None
    root = interpreter._server._process.pid
    expected = sessions + interpreter._spares + (1 if interpreter.backend == "namespaces" else 0)
    deadline = time.monotonic() + 10
    while len(found := descendants(root)) != expected and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(found) == expected, found
    assert all("with 1 threads" in how for how in found.values()), found
    return found


def host_state() -> list[object]:
    """What of the host must be the same before and after: mounts, and queues and shared memory in the kernel."""
    kinds = [Path("/proc/sysvipc") / kind for kind in ("shm", "sem", "msg")]
    return [
        Path("/proc/self/mountinfo").read_text(),
        *(path.read_text().count("\n") for path in kinds if path.exists()),
        Path("/proc/sys/kernel/core_pattern").read_text(),
        os.uname().nodename,
    ]


@pytest.mark.parametrize("attack", [pytest.param(attack, id=name) for name, attack in ATTACKS])
@pytest.mark.parametrize("pool", BACKENDS, indirect=True, scope="module")
def test_an_attack_fails_and_leaves_nothing(pool, host, attack):
    host.restore()
    before = host_state()
    with pool.session() as session:
        result = session.run(host.code(attack))
        after = session.run("'alive'")
    assert host.harm(result) == []
    assert host.harm(after) == []
    assert len(result.stdout) <= LIMITS.output_chars
    assert len(result.stderr) <= LIMITS.output_chars
    assert len(result.error or "") <= LIMITS.output_chars
    assert result.seconds < LIMITS.seconds + 5
    if attack.ends == "refused":
        assert "refused" in result.stdout, result
    elif attack.ends == "lost":
        assert result.state_lost or after.state_lost, result
    elif attack.ends == "memory":
        assert result.out_of_memory or result.timed_out, result
    elif attack.ends == "failed":
        assert result.error is not None, result
    elif attack.ends == "done":
        assert result.error is None, result
    else:
        assert attack.ends == "any"
    assert pool.run("6 * 7").stdout == "42\n"
    quiet(pool)
    assert host_state() == before


@pytest.mark.parametrize("attack", [pytest.param(attack, id=name) for name, attack in ATTACKS if attack.control])
def test_the_same_attack_succeeds_where_nothing_isolates(unsafe, host, attack):
    if attack.control == "root" and os.getuid() != 0:
        pytest.skip("only root can do this harm")
    host.restore()
    result = unsafe.run(host.code(attack))
    time.sleep(0.05)
    found = host.harm(result)
    clean_up_queues()
    host.restore()
    os.setpriority(os.PRIO_PROCESS, host.victim.pid, os.getpriority(os.PRIO_PROCESS, 0)) if os.getuid() == 0 else None
    os.sched_setaffinity(host.victim.pid, os.sched_getaffinity(0))
    assert found


@pytest.fixture(scope="module")
def unsafe() -> Iterator[Interpreter]:
    with Interpreter(LIMITS, backend="unsafe-subprocess") as interpreter:
        yield interpreter


def clean_up_queues() -> None:
    """Remove what an unhindered attack leaves in the kernel."""
    libc, key = ctypes.CDLL(None), 0x5EA4
    for kind, remove in (("shm", libc.shmctl), ("msg", libc.msgctl)):
        if (
            (number := getattr(libc, f"{kind}get")(key, 0)) >= 0
            if kind == "msg"
            else (number := libc.shmget(key, 0, 0)) >= 0
        ):
            remove(number, 0, None)
    if (number := libc.semget(key, 0, 0)) >= 0:
        libc.semctl(number, 0, 0)
    for name in Path("/dev/mqueue").glob("spear*"):
        name.unlink()


@pytest.mark.parametrize("pool", BACKENDS, indirect=True, scope="module")
def test_no_forbidden_system_call_reaches_the_kernel(pool):
    """The filter answers EPERM or ENOSYS before the arguments are looked at; the kernel would say EFAULT or worse."""
    calls = {name: number for name, number in numbers_here().items() if name in FORBIDDEN}
    assert len(calls) > 150
    code = (
        PRELUDE
        + f"""
import errno
for name, number in {calls!r}.items():
    try:
        print(name, "PWNED", kernel(number, -1, -1, -1, -1, -1, -1))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            print(name, "reached the kernel:", error)
print("done")
"""
    )
    result = pool.run(code)
    assert result.stdout == "done\n", result


@pytest.mark.parametrize("pool", BACKENDS, indirect=True, scope="module")
def test_no_system_call_but_the_named_ones_reaches_the_kernel(pool):
    named = COMPUTING | CHECKED | PRETENDED | (SCRATCH if pool.backend == "namespaces" else {})
    # The kernel exempts its own uretprobe and uprobe of x86_64 from every filter; they only answer its trampolines.
    exempt = {335, 336} if platform.machine() == "x86_64" else set()
    others = sorted(set(range(451)) - exempt - set(numbers(named, platform.machine()).values()))
    code = (
        PRELUDE
        + f"""
for number in {others!r}:
    try:
        print(number, "PWNED", kernel(number, -1, -1, -1, -1, -1, -1))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            print(number, "reached the kernel:", error)
print("done")
"""
    )
    assert pool.run(code).stdout == "done\n"


def answer(steps: seccomp.Program, machine: str, number: int, arguments: tuple[int, ...]) -> int:
    """What a filter answers to a system call: a small model of the kernel's machine that runs it."""
    words = [number, ARCHITECTURES[machine], 0, 0]
    for argument in (*arguments, 0, 0, 0, 0, 0, 0)[:6]:
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    accumulator, place = 0, 0
    while True:
        operation, if_true, if_false, operand = steps[place]
        place += 1
        if operation == seccomp.LOAD:
            accumulator = words[operand // 4]
        elif operation == seccomp.AND:
            accumulator &= operand
        elif operation == seccomp.RETURN:
            return operand
        else:
            holds = accumulator == operand if operation == seccomp.EQUAL else accumulator >= operand
            place += if_true if holds else if_false


PID = 4711
any_word = st.integers(0, (1 << 64) - 1)
plausible = st.one_of(any_word, st.integers(-300, 300), st.sampled_from([PID, PID | 1 << 32, ~PID << 3 | 2, 1 << 32]))


def is_allowed(name: str, a: tuple[int, ...]) -> bool:
    """The rules in the words of the manual pages, written a second time."""
    low = [value & 0xFFFFFFFF for value in a]
    if name in ("clock_gettime", "clock_getres", "clock_nanosleep"):
        return low[0] <= 11
    if name == "sched_getaffinity":
        return low[0] in (0, PID)
    if name in ("kill", "tgkill"):
        return low[0] == PID
    if name == "prlimit64":
        return low[0] in (0, PID) and a[2] == 0
    if name == "futex":
        is_timed = low[1] & 256 and low[1] & 127 in (0, 9)
        is_private = low[1] & 128 != 0
        return is_private and low[1] & 127 in (0, 1, 3, 4, 5, 9, 10) and (low[1] < 256 or (is_timed and low[1] < 512))
    if name == "getrandom":
        return not low[2] & 2
    if name == "mmap":
        return not low[3] & (0x40000 | 0x2000)
    assert name == "madvise"
    return low[2] in (0, 1, 2, 3, 4, 8, 14, 15, 16, 17, 22, 23)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", sorted(set(CHECKED) - {"open", "openat", "fcntl", "ioctl"}))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_filter_looks_at_the_arguments_on_both_processors(machine, name, data):
    steps = seccomp.program(PID, has_scratch=True, truncates=True, machine=machine)
    drawn = tuple(data.draw(plausible) & (1 << 64) - 1 for _ in range(6))
    expected = seccomp.ALLOW if is_allowed(name, drawn) else seccomp.REFUSE | errno.EPERM
    assert answer(steps, machine, numbers(CHECKED, machine)[name], drawn) == expected


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@settings(max_examples=300, deadline=None)
@given(
    flags=st.integers(0, (1 << 32) - 1),
    command=st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 36, 37, 1024, 1030, 1031, 1032]),
)
def test_the_filter_looks_at_the_flags_of_open_files_on_both_processors(machine, flags, command):
    steps = seccomp.program(PID, has_scratch=True, truncates=True, machine=machine)
    is_harmless = not flags & (0o20000 | 0o1000000 | {"x86_64": 0o40000, "aarch64": 0o200000}[machine])
    known = numbers(CHECKED, machine)

    def passes(name: str, *arguments: int) -> bool:
        return answer(steps, machine, known[name], arguments) == seccomp.ALLOW

    assert passes("openat", -100, 0, flags) == is_harmless
    assert passes("fcntl", 5, command, flags) == (command in (0, 1, 2, 3, 1030) or (command == 4 and is_harmless))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_is_pretended_never_reaches_the_kernel(machine):
    steps = seccomp.program(PID, has_scratch=True, truncates=True, machine=machine)
    for number in numbers(PRETENDED, machine).values():
        assert answer(steps, machine, number, ()) == seccomp.REFUSE  # with errno 0: success


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("has_scratch", [True, False])
def test_the_filter_gives_every_number_its_answer_on_both_processors(machine, has_scratch):
    steps = seccomp.program(PID, has_scratch=has_scratch, truncates=True, machine=machine)
    plain = set(numbers(COMPUTING | SCRATCH if has_scratch else COMPUTING, machine).values())
    pretended, retired = (set(numbers(table, machine).values()) for table in (PRETENDED, RETIRED))
    for number in set(range(600)) - set(numbers(CHECKED, machine).values()):
        expected = seccomp.REFUSE | errno.EPERM
        if number in plain:
            expected = seccomp.ALLOW
        elif number in pretended:
            expected = seccomp.REFUSE
        elif number in retired or number > 450:
            expected = seccomp.REFUSE | errno.ENOSYS
        assert answer(steps, machine, number, ()) == expected, number
    assert answer(steps, machine, 0x40000000 | 39, ()) == seccomp.KILL
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    assert answer(steps, other, 0, ()) == seccomp.KILL


def test_a_filter_made_out_to_a_process_is_the_one_assembled_for_it():
    pids = seccomp.PLACEHOLDER_PID, PID
    made = [seccomp.assembled(seccomp.program(pid, has_scratch=True, truncates=True)) for pid in pids]
    assert seccomp.for_process(made[0], PID) == made[1]


# What two episodes at once can do: the first prepares something and waits, the second looks for it.


@dataclass(frozen=True)
class Pair:
    name: str
    first: str
    second: str
    """@first@ is the process number of the first. Prints PWNED where it learns something."""
    control: bool = True
    backends: tuple[str, ...] = BACKENDS


# fmt: off
PAIRS = [
    Pair("a futex on a file both can read", """
import mmap
file = open(os.__file__, "rb")
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
word = ctypes.c_uint.from_address(page).value
try:
    kernel(@futex@, page, 0, word, ctypes.create_string_buffer(struct.pack("ll", 3, 0), 16), 0, 0)
except OSError:
    pass
""", """
import mmap
file = open(os.__file__, "rb")
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
attempt(lambda: kernel(@futex@, page, 1, 1, 0, 0, 0))
"""),
    Pair("processor time of the other", "deadline = time.time() + 2\nwhile time.time() < deadline:\n    pass", """
for kind in (2, 6):
    attempt(time.clock_gettime, ctypes.c_int(~@first@ << 3 | kind).value)
attempt(os.sched_getaffinity, @first@)
"""),
    Pair("flags of the standard input", """
import fcntl
fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
time.sleep(2)
""", """
import fcntl
print("PWNED" if fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND) else "refused")
""", control=False),
    Pair("a futex owned by the other", "time.sleep(2)", """
answers = []
for pid in (@first@, 4194302):
    word = ctypes.create_string_buffer(struct.pack("I", pid), 16)
    try:
        answers.append(kernel(@futex@, word, 6 | 128, 1, ctypes.create_string_buffer(16), 0, 0))
    except OSError as error:
        answers.append(error.errno)
print("refused" if answers == [errno.EPERM] * 2 else f"PWNED {answers}")
"""),
    Pair("the number of inodes that were made", "time.sleep(2)", """
attempt(lambda: [os.fstat(os.pipe()[0]).st_ino for _ in range(3)])
"""),
    Pair("a file in the scratch", "open('/tmp/@mark@', 'w').write('x')\ntime.sleep(2)",
         "print('PWNED' if os.path.exists('/tmp/@mark@') else 'refused')", backends=("namespaces",)),
    Pair("what the server knows of the other", "time.sleep(2)", """
import gc
frame = sys._getframe()
while frame:
    here = frame.f_locals.get("self")
    for name, value in getattr(here, "__dict__", {}).items():
        if isinstance(value, dict) and @first@ in value.values():
            print("PWNED", name)
    frame = frame.f_back
print("refused")
""", control=False),
]
# fmt: on


def played(pool: Interpreter, host: Host, pair: Pair) -> Result:
    with pool.session() as one, pool.session() as two, ThreadPoolExecutor(1) as threads:
        two.run("2")
        pid = int(one.run("import os\nos.getpid()").stdout)
        first, second = (
            host.code(Attack(pair.name, code.replace("@first@", str(pid)))) for code in (pair.first, pair.second)
        )
        waiting = threads.submit(one.run, first)
        time.sleep(0.4)
        result = two.run(second)
        waiting.result()
    return result


@pytest.mark.parametrize("pair", [pytest.param(pair, id=f"channels: {pair.name}") for pair in PAIRS])
@pytest.mark.parametrize("pool", BACKENDS, indirect=True, scope="module")
def test_two_episodes_cannot_reach_each_other(pool, host, pair):
    if pool.backend not in pair.backends:
        pytest.skip("docs/security.md says what this backend leaves open")
    host.restore()
    result = played(pool, host, pair)
    assert host.harm(result) == []
    assert "refused" in result.stdout, result


@pytest.mark.parametrize("pair", [pytest.param(pair, id=pair.name) for pair in PAIRS if pair.control])
def test_two_processes_reach_each_other_where_nothing_isolates(unsafe, host, pair):
    host.restore()
    result = played(unsafe, host, pair)
    host.restore()
    assert "PWNED" in result.stdout, result


@pytest.fixture
def sharing(tmp_path, monkeypatch) -> str:
    """A package that keeps a piece of shared memory, as some libraries do."""
    (tmp_path / "sharing.py").write_text("import mmap\nmemory = mmap.mmap(-1, 4096)\nmemory[:4] = b'born'\n")
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "sharing"


@pytest.mark.parametrize("backend", [*BACKENDS, "unsafe-subprocess"])
def test_shared_memory_of_a_package_is_private_to_an_episode(sharing, backend):
    try:
        pool = Interpreter(backend=backend, packages=[sharing])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with pool, pool.session() as one, pool.session() as two:
        assert two.run("import sharing\nbytes(sharing.memory[:4])").stdout == "b'born'\n"
        assert one.run("import sharing\nsharing.memory[:4] = b'wave'\nbytes(sharing.memory[:4])").stdout == "b'wave'\n"
        seen = two.run("bytes(sharing.memory[:4])").stdout
    assert seen == ("b'wave'\n" if backend == "unsafe-subprocess" else "b'born'\n")


@pytest.mark.parametrize("pool", BACKENDS, indirect=True, scope="module")
def test_an_episode_cannot_evict_a_librarys_pages_nor_flush_the_disk(pool):
    """The calls are answered with success and not carried out."""
    code = (
        "import os\nf = os.open(os.__file__, os.O_RDONLY)\nos.fsync(f), os.fdatasync(f), os.posix_fadvise(f, 0, 0, 4)"
    )
    assert pool.run(code).stdout == "(None, None, None)\n"
    assert pool.run("import os\nos.fsync(12345)").ok, "the kernel would say EBADF"


@pytest.mark.parametrize("pool", BACKENDS, indirect=True, scope="module")
def test_the_kernel_ends_an_episode_before_the_trainer_and_queues_no_signal_for_it(pool):
    with pool.session() as session:
        session.run("1")
        deadline = time.monotonic() + 30  # a spare takes its limits a moment after it was forked
        while time.monotonic() < deadline:
            try:
                folders = [Path(f"/proc/{pid}") for pid in quiet_with(pool, sessions=1)]
                scores = {(folder / "oom_score_adj").read_text().strip() for folder in folders}
                limits = [(folder / "limits").read_text() for folder in folders]
            except (FileNotFoundError, ProcessLookupError):  # one was still being reaped, and a spare not yet forked
                continue
            pending = [re.search(r"Max pending signals\s+(\d+)\s+(\d+)", text).groups() for text in limits]
            if pending.count(("0", "0")) == pool._spares + 1:
                break
        assert scores == {"1000"}
        assert pending.count(("0", "0")) == pool._spares + 1  # every child, not the jail's first process


@pytest.mark.parametrize("pool", BACKENDS, indirect=True, scope="module")
def test_a_system_call_that_does_not_exist_yet_is_unknown(pool):
    result = pool.run(PRELUDE + "for n in range(451, 1024):\n    try:\n        kernel(n)\n        print(n)\n"
                      "    except OSError as e:\n        assert e.errno == 38, (n, e)\nprint('done')")  # fmt: skip
    assert result.stdout == "done\n", result


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_tables_agree_with_the_c_headers(machine):
    known = header_numbers(machine)
    if not known:
        pytest.skip("no C headers here")
    column = ["x86_64", "aarch64"].index(machine)
    tables = COMPUTING | SCRATCH | CHECKED | PRETENDED | RETIRED
    ours = numbers(tables, machine) | {"pivot_root": PIVOT_ROOT[machine]}
    theirs = {name: both[column] for name, both in FORBIDDEN.items() if both[column] is not None}
    for name, number in (ours | theirs).items():
        assert known[name] == number, name
    absent = set(tables) - set(ours)
    assert not absent & set(known), "a call this processor has is missing"
    assert not set(theirs) & (set(ours) - {"pivot_root", "clone3", "openat2"}), "what is forbidden is not allowed"
