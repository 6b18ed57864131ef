"""Every attack on every isolating backend: it fails, the pool still serves, and nothing is left on the host."""

from __future__ import annotations

import ctypes
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
from pathlib import Path

import pytest

from sandbox_attacks import ATTACKS, FORBIDDEN, PRELUDE, Attack, header_numbers, numbers_here
from spear_rl.sandbox import Interpreter, Limits, Result, SandboxUnavailable
from spear_rl.sandbox.syscalls import CHECKED, COMPUTING, PIVOT_ROOT, RETIRED, SCRATCH, numbers

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
    assert interpreter._server is not None
    root = interpreter._server._process.pid
    expected = interpreter._spares + (1 if interpreter.backend == "namespaces" else 0)
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
    calls = numbers_here()
    del calls["tgkill"]
    assert len(calls) > 100
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
    ours = numbers(COMPUTING | SCRATCH | CHECKED | RETIRED, machine) | {"pivot_root": PIVOT_ROOT[machine]}
    theirs = {name: both[column] for name, both in FORBIDDEN.items() if both[column] is not None}
    for name, number in (ours | theirs).items():
        assert known[name] == number, name
    absent = set(COMPUTING | SCRATCH | CHECKED) - set(ours)
    assert not absent & set(known), "a call this processor has is missing"
    assert not set(theirs) & (set(ours) - {"pivot_root", "clone3", "openat2"}), "what is forbidden is not allowed"
