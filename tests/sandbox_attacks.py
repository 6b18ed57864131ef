"""Attacks on the sandbox as data. Words between @ stand for things of the host that the test puts there.

Every piece of code starts after PRELUDE. `attempt` prints "refused" or "PWNED"; what an attack does to the host is
looked for from outside as well.
"""

# ruff: noqa: E501 (an attack a line)
from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from spear_rl.sandbox.isolation.syscalls import CHECKED

PRELUDE = """
import ctypes, errno, os, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action, *arguments):
    try:
        value = action(*arguments)
    except (OSError, RuntimeError, ImportError, ValueError, EOFError, MemoryError, subprocess.SubprocessError) as error:
        print("refused", type(error).__name__, error)
        return None
    print("PWNED", value)
    return value
def kernel(number, *arguments):
    ctypes.set_errno(0)
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if value < 0:
        raise OSError(ctypes.get_errno(), "")
    return value
"""


@dataclass(frozen=True)
class Attack:
    name: str
    code: str
    ends: str = "refused"
    """refused: every attempt says so. lost: the process is killed or dies. memory: out of memory. failed: it ends with
    an error. done: it runs to its end, and the damage is looked for outside. any: how it ends does not matter."""
    control: str = ""
    """Where the same code without isolation does its harm, which shows that the attack is real: "", always or root."""


def _attempts(*actions: str) -> str:
    return "\n".join(f"attempt(lambda: {action})" for action in actions)


# fmt: off
FILES = [
    Attack("read a file", _attempts("open('@secret@').read()"), control="always"),
    Attack("read /etc/passwd", _attempts("open('/etc/passwd').read()", "open('/etc/hostname').read()"), control="always"),
    Attack("read ssh keys", _attempts("open('@target@/.ssh/id_rsa').read()", "os.listdir('@home@/.ssh')",
                                      "open(os.path.expanduser('~/.bashrc')).read()"), control="always"),
    Attack("list folders", _attempts("os.listdir('@target@')", "os.listdir('@home@')", "os.listdir('/etc')",
                                     "os.listdir('/proc')"), control="always"),
    Attack("walk up from the working folder", _attempts("open('../' * 30 + '@secret@'[1:]).read()"), control="always"),
    Attack("open a path first and the file through it",
           _attempts("open(f\"/proc/self/fd/{os.open('@secret@', os.O_PATH)}\").read()"), control="always"),
    Attack("open through a folder's descriptor",
           _attempts("os.open('secret.txt', os.O_RDONLY, dir_fd=os.open('@target@', os.O_PATH))"), control="always"),
    Attack("a symlink to a secret", _attempts("(os.symlink('@secret@', '@mark@'), open('@mark@').read())",
                                              "(os.symlink('@secret@', '@target@/@mark@'))"), control="always"),
    Attack("a hard link to a secret", _attempts("os.link('@secret@', '@target@/@mark@')", "os.link('@secret@', '@mark@')"),
           control="always"),
    Attack("follow a symlink the host has", _attempts("open('@target@/link').read()"), control="always"),
    Attack("read where a link points", _attempts("os.readlink('@target@/link')", "os.readlink('/proc/@pid@/exe')"),
           control="always"),
    Attack("write to the working folder of the host", _attempts("open('@cwd@/@mark@', 'w')"), control="always"),
    Attack("write to a folder open to all", _attempts("open('@target@/@mark@', 'w').write('x')"), control="always"),
    Attack("write to the home folder", _attempts("open('@home@/@mark@', 'w').write('x')"), control="always"),
    Attack("write to /var/tmp and /dev/shm", _attempts("open('/var/tmp/@mark@', 'w')", "open('/dev/shm/@mark@', 'w')"),
           control="always"),
    Attack("write to /tmp of the host", "try:\n    open('/tmp/@mark@', 'w').write('x')\nexcept OSError:\n    pass",
           ends="done", control="always"),
    Attack("overwrite a file", _attempts("open('@secret@', 'w')", "open('@secret@', 'a').write('x')",
                                         "open('@secret@', 'r+').write('x')"), control="always"),
    Attack("truncate a file", _attempts("os.truncate('@secret@', 0)", "os.open('@secret@', os.O_RDONLY | os.O_TRUNC)"),
           control="always"),
    Attack("remove a file", _attempts("os.unlink('@secret@')", "os.rmdir('@target@/.ssh')"), control="always"),
    Attack("rename a file", _attempts("os.rename('@secret@', '@target@/@mark@')"), control="always"),
    Attack("change a file's mode", _attempts("os.chmod('@secret@', 0o777)", "os.chmod('@target@', 0o777)"), control="always"),
    Attack("change a file's owner", _attempts("os.chown('@secret@', os.getuid(), os.getgid())"), control="always"),
    Attack("change a file's times", _attempts("os.utime('@secret@', (1, 1))"), control="always"),
    Attack("give a file an attribute", _attempts("os.setxattr('@secret@', 'user.spear', b'x')"), control=""),
    Attack("make a fifo or a device", _attempts("os.mkfifo('@target@/@mark@')", "os.mknod('@target@/@mark@d', 0o020666, 259)"),
           control="root"),
    Attack("make a folder", _attempts("os.mkdir('@target@/@mark@')"), control="always"),
    Attack("lock a file for everyone", "import fcntl\n" + _attempts(
        "fcntl.flock(open(os.__file__), fcntl.LOCK_EX)", "fcntl.lockf(open(os.__file__), fcntl.LOCK_SH)"), control="always"),
    Attack("overwrite a library", "import json, sympy, numpy\n" + _attempts(
        "open(json.__file__, 'r+b')", "os.open(sympy.__file__, os.O_RDONLY | os.O_TRUNC)", "os.unlink(numpy.__file__)",
        "os.rename(json.__file__, json.__file__ + 'x')", "os.chmod(sympy.__file__, 0o777)")),
    Attack("poison a cache of a library", "import json\n" + _attempts(
        "open(os.path.join(os.path.dirname(json.__file__), '__pycache__', '@mark@'), 'w')",
        "open(os.path.join(os.path.dirname(json.__file__), '@mark@.py'), 'w')")),
    Attack("read another package's files", _attempts("open('@package@').read()", "os.listdir('@site@')"), control="always"),
    Attack("read devices", _attempts("open('/dev/mem', 'rb')", "open('/dev/kmsg')", "open('/dev/tty')", "open('/dev/vda', 'rb')",
                                     "os.listdir('/dev/disk')"), control=""),
    Attack("change the kernel's settings", _attempts("open('/proc/sys/kernel/core_pattern', 'w')", "os.listdir('/sys/kernel')",
                                                     "open('/proc/self/oom_score_adj', 'w')", "open('/proc/sysrq-trigger', 'w')")),
    Attack("go into control groups", _attempts("os.listdir('/sys/fs/cgroup')", "open('/proc/self/cgroup').read()"),
           control="always"),
    Attack("inherited descriptors", """
for number in range(3, 1024):
    try:
        if b"@token@" in os.pread(number, 100, 0):
            print("PWNED", number)
    except OSError:
        pass
open_ones = []
for number in range(0, 4096):
    try:
        os.fstat(number)
        open_ones.append(number)
    except OSError:
        pass
print("refused" if open_ones == [0, 1, 2, 3, 4] else f"PWNED {open_ones}")
"""),
]

OTHERS = [
    Attack("its own environment", """
found = [text for text in os.environ.values() if "@token@" in text]
print("PWNED" if found else "refused")
""" + _attempts("open('/proc/self/environ', 'rb').read()")),
    Attack("another process's environment", _attempts("open('/proc/@pid@/environ', 'rb').read()"), control="always"),
    Attack("the parents' environment", _attempts(
        "open(f'/proc/{os.getppid()}/environ', 'rb').read()", "open('/proc/@parent@/environ', 'rb').read()"), control="always"),
    Attack("environment by way of the C library", """
pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
number = 0
while pointer and pointer[number]:
    print("PWNED" if b"@token@" in pointer[number] else "refused", pointer[number])
    number += 1
print("refused")
"""),
    Attack("another process's memory", _attempts(
        "(lambda f: (f.seek(@address@), f.read(40)))(open('/proc/@pid@/mem', 'rb', 0))", "open('/proc/@pid@/maps').read()",
        "open('/proc/@parent@/mem', 'rb')", "open(f'/proc/{os.getppid()}/mem', 'rb')"), control="root"),
    Attack("another process's memory by system call", """
buffer = ctypes.create_string_buffer(40)
mine, theirs = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 40), (ctypes.c_void_p * 2)(@address@, 40)
attempt(lambda: (kernel(@process_vm_readv@, @pid@, mine, 1, theirs, 1, 0), buffer.raw))
attempt(lambda: kernel(@process_vm_writev@, @pid@, mine, 1, theirs, 1, 0))
""", control="root"),
    Attack("another process's files", _attempts("open('/proc/@pid@/fd/@fd@').read()", "os.listdir('/proc/@pid@/fd')",
                                                "open('/proc/@pid@/root@secret@').read()", "open('/proc/@pid@/cwd/x')"),
           control="root"),
    Attack("another process's descriptor", _attempts("kernel(@pidfd_getfd@, kernel(@pidfd_open@, @pid@, 0), @fd@, 0)"),
           control="root"),
    Attack("another process's command line", _attempts("open('/proc/@pid@/cmdline').read()", "open('/proc/1/cmdline').read()"),
           control="always"),
    Attack("attach as a debugger", _attempts("kernel(@ptrace@, 0x4206, @pid@, 0, 0)"), control="root"),
    Attack("attach to its parent as a debugger", _attempts("kernel(@ptrace@, 16, os.getppid(), 0, 0)",
                                                           "kernel(@ptrace@, 16, @parent@, 0, 0)", "kernel(@ptrace@, 0, 0, 0, 0)")),
    Attack("signal a process", _attempts("os.kill(@pid@, signal.SIGURG)", "os.kill(@parent@, 0)", "os.kill(os.getppid(), 0)",
                                         "os.kill(1, 0)"), control="always"),
    Attack("signal everyone", _attempts("os.kill(-1, signal.SIGURG)", "os.kill(0, signal.SIGURG)",
                                        "os.killpg(os.getpgrp(), signal.SIGURG)")),
    Attack("signal by other calls", """
attempt(lambda: kernel(@tkill@, @pid@, signal.SIGURG))
attempt(lambda: kernel(@tgkill@, @pid@, @pid@, signal.SIGURG))
attempt(lambda: kernel(@pidfd_send_signal@, kernel(@pidfd_open@, @pid@, 0), signal.SIGURG, 0, 0))
info = ctypes.create_string_buffer(struct.pack("iii", signal.SIGURG, 0, -1), 128)
attempt(lambda: kernel(@rt_sigqueueinfo@, @pid@, signal.SIGURG, info))
""", control="root"),
    Attack("have the kernel signal a process about a pipe", """
import fcntl
try:
    reader, writer = os.pipe()
except OSError:
    reader, writer = 3, 4  # those it was born with
attempt(fcntl.fcntl, reader, fcntl.F_SETOWN, @pid@)
attempt(fcntl.fcntl, reader, 10, signal.SIGURG)
try:
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(writer, b"x")
except OSError as error:
    print("refused", error)
time.sleep(0.1)
""", control="root"),
    Attack("another process's limits and priority", """
import resource
attempt(lambda: resource.prlimit(@pid@, resource.RLIMIT_NOFILE))
attempt(lambda: resource.prlimit(@pid@, resource.RLIMIT_CORE, (0, 0)))
attempt(lambda: os.setpriority(os.PRIO_PROCESS, @pid@, 15))
attempt(lambda: os.sched_setaffinity(@pid@, {0}))
""", control="always"),
    Attack("its own limits and priority", """
import resource
attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
attempt(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40)))
attempt(lambda: resource.prlimit(os.getpid(), resource.RLIMIT_NPROC, (100, 100)))
attempt(lambda: os.nice(-5))
attempt(lambda: os.sched_setaffinity(0, {0}))
attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt(lambda: kernel(@ioprio_set@, 1, 0, 1 << 13))
""", control="always"),
    Attack("become someone else", _attempts("os.setuid(0)", "os.setgid(0)", "os.setresuid(0, 0, 0)", "os.setgroups([0])",
                                            "kernel(@setfsuid@, 0)", "kernel(@capset@, 0, 0)")),
    Attack("shared memory and queues", """
attempt(lambda: kernel(@shmget@, 0x5EA4, 4096, 0o1666))
attempt(lambda: kernel(@semget@, 0x5EA4, 1, 0o1666))
attempt(lambda: kernel(@msgget@, 0x5EA4, 0o1666))
attempt(lambda: kernel(@mq_open@, b"@mark@", os.O_CREAT | os.O_RDWR, 0o666, 0))
from multiprocessing import shared_memory
attempt(lambda: shared_memory.SharedMemory("@mark@", create=True, size=4096))
""", control="always"),
]

# By which episodes could signal each other, watch processes of the host, or use up what the host's user has.
CHANNELS = [
    Attack("queue signals to itself", """
number = signal.SIGRTMIN + 3
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
for _ in range(2000):
    os.kill(os.getpid(), number)
count = 0
while signal.sigtimedwait([number], 0) is not None:
    count += 1
print("PWNED" if count > 1 else "refused", count)
""", control="always"),
    Attack("queue signals by other calls", """
info = ctypes.create_string_buffer(struct.pack("iii", signal.SIGRTMIN, 0, -1), 128)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
attempt(lambda: kernel(@rt_sigqueueinfo@, os.getpid(), signal.SIGRTMIN, info))
attempt(lambda: kernel(@rt_tgsigqueueinfo@, os.getpid(), os.getpid(), signal.SIGRTMIN, info))
event, timer = ctypes.create_string_buffer(struct.pack("Qii", 0, signal.SIGRTMIN, 0), 64), ctypes.c_int()
attempt(lambda: kernel(@timer_create@, 1, event, ctypes.byref(timer)))
attempt(lambda: kernel(@timerfd_create@, 1, 0))
""", control="always"),
    Attack("processor time of another process", """
span = ctypes.create_string_buffer(bytes(16), 16)
for pid in (@pid@, @parent@, os.getppid(), 1):
    for kind in range(8):  # profile, virtual and scheduled time, of a process and of a thread
        number = ctypes.c_int(~pid << 3 | kind).value
        attempt(time.clock_gettime, number)
        attempt(time.clock_getres, number)
        attempt(lambda: kernel(@clock_nanosleep@, number, 0, span, 0))
        attempt(lambda: kernel(@clock_gettime@, number & 0xFFFFFFFF, span))
""", control="always"),
    Attack("clocks of devices and unknown ones", """
span = ctypes.create_string_buffer(16)
for number in (*(ctypes.c_int(~fd << 3 | 3).value for fd in range(5)), *range(12, 80), 1 << 20, -1, -(1 << 31)):
    try:
        kernel(@clock_gettime@, number, span)
        print("PWNED", number)
    except OSError as error:
        print("refused" if error.errno == errno.EPERM else f"PWNED: the kernel looked at {number}: {error}")
"""),
    Attack("scheduling of another process", """
import resource
buffer = ctypes.create_string_buffer(128)
for pid in (@pid@, os.getppid()):
    attempt(os.sched_getaffinity, pid)
    attempt(lambda: kernel(@sched_getaffinity@, pid | 1 << 40, 128, buffer))
    attempt(os.sched_getscheduler, pid)
    attempt(os.sched_getparam, pid)
    attempt(os.sched_rr_get_interval, pid)
    attempt(lambda: kernel(@sched_getattr@, pid, buffer, 48, 0))
    attempt(os.getpriority, os.PRIO_PROCESS, pid)
    attempt(lambda: kernel(@ioprio_get@, 1, pid))
    attempt(resource.prlimit, pid, resource.RLIMIT_AS)
    attempt(os.getpgid, pid)
    attempt(os.getsid, pid)
    attempt(lambda: kernel(@get_robust_list@, pid, buffer, ctypes.addressof(buffer) + 8))
    attempt(lambda: kernel(@kcmp@, pid, pid, 0, 0, 0))
""", control="always"),
    Attack("a futex on a file that others read", """
import mmap
file = open(os.__file__, "rb")
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
own = ctypes.create_string_buffer(64)
late = ctypes.create_string_buffer(16)
for operation in range(16):
    for flags in (0, 256):
        for address in (page, ctypes.addressof(own)):
            try:
                kernel(@futex@, address, operation | flags, 1, late, ctypes.addressof(own) + 32, 0)
                print("PWNED", operation, flags)
            except OSError as error:
                print("refused" if error.errno == errno.EPERM else f"PWNED: {operation} reached the kernel: {error}")
""", control="always"),
    Attack("a futex that names its owner", """
late = ctypes.create_string_buffer(16)
for pid in (@pid@, os.getppid()):
    for operation in (6, 7, 8, 11, 12, 13):
        word = ctypes.create_string_buffer(struct.pack("I", pid), 64)
        try:
            kernel(@futex@, word, operation | 128, 1, late, ctypes.addressof(word) + 32, pid)
            print("PWNED", operation)
        except OSError as error:
            print("refused" if error.errno == errno.EPERM else f"PWNED: {operation} reached the kernel: {error}")
""", control="always"),
    Attack("waits on several futexes", _attempts("kernel(449, 0, 0, 0, 0, 0)", "kernel(454, 0, 0, 0, 0)", "kernel(455, 0, 0, 0, 0, 0, 0)")),
    Attack("locks and leases on files that others read", """
import fcntl
file = open(os.__file__, "rb")
whole = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
attempt(lambda: fcntl.fcntl(file, 37, whole))  # F_OFD_SETLK
attempt(lambda: fcntl.fcntl(file, 36, whole))  # F_OFD_GETLK
attempt(lambda: fcntl.fcntl(file, fcntl.F_GETLK, whole))
attempt(lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK))
attempt(lambda: fcntl.fcntl(file, fcntl.F_GETLEASE))
attempt(lambda: fcntl.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), fcntl.F_NOTIFY, 1))
attempt(lambda: fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid()))
attempt(lambda: fcntl.fcntl(file, 15, struct.pack("ii", 1, os.getpid())))  # F_SETOWN_EX
attempt(lambda: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB))
""", control="always"),
    Attack("watch files that others read", _attempts(
        "kernel(@inotify_init1@, 0)", "kernel(@fanotify_init@, 0, 0)", "kernel(@epoll_create1@, 0)", "kernel(@eventfd2@, 0, 0)",
        "kernel(@signalfd4@, -1, ctypes.create_string_buffer(8), 8, 0)"), control="always"),
    Attack("flags that act on the disk or on others", """
import fcntl
file = open(os.__file__, "rb")
attempt(os.open, os.__file__, os.O_RDONLY | os.O_DIRECT)
attempt(os.open, os.__file__, os.O_RDONLY | os.O_NOATIME)
attempt(lambda: fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT))
attempt(lambda: fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC))
attempt(lambda: fcntl.fcntl(0, 1031, 1 << 20))  # F_SETPIPE_SZ
attempt(lambda: fcntl.fcntl(1, 1033, 1))  # F_ADD_SEALS
"""),
    Attack("pages of the user's pipes", _attempts("os.pipe()", "os.pipe2(0)", "[os.pipe() for _ in range(25)]"), control="always"),
    Attack("pages shared with others", """
import mmap
buffer = mmap.mmap(-1, 1 << 16)
def advise(advice):
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return kernel(@madvise@, address, 1 << 16, advice)
for advice in (9, 12, 20, 21, 25, 100, 101):  # remove, mergeable, cold, pageout, collapse, hwpoison, soft_offline
    attempt(advise, advice)
for flags in (0x40000, 0x2000, 0x40000 | 21 << 26):  # huge pages of the host, locked pages
    attempt(lambda: kernel(@mmap@, 0, 1 << 21, 3, 0x22 | flags, -1, 0))
"""),
    Attack("what the page cache holds", """
import mmap
file = open(os.__file__, "rb")
page = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
attempt(lambda: kernel(@mincore@, 0x10000, 4096, ctypes.create_string_buffer(8)))
attempt(lambda: os.preadv(file.fileno(), [bytearray(64)], 0, 8))  # RWF_NOWAIT
attempt(lambda: kernel(451, file.fileno(), ctypes.create_string_buffer(16), ctypes.create_string_buffer(64), 0))  # cachestat
attempt(lambda: kernel(@readahead@, file.fileno(), 0, 4096))
attempt(lambda: kernel(@sync_file_range@, file.fileno(), 0, 4096, 0))
"""),
    Attack("how busy the host is", """
buffer = ctypes.create_string_buffer(512)
attempt(lambda: kernel(@sysinfo@, buffer))
attempt(os.getloadavg)
attempt(os.statvfs, "/")
attempt(os.fstatvfs, 1)
attempt(lambda: open("/proc/stat").read())
attempt(lambda: open("/proc/self/status").read())
attempt(lambda: open("/proc/meminfo").read())
attempt(lambda: open("/proc/pressure/cpu").read())
attempt(lambda: kernel(@membarrier@, 0, 0, 0))
attempt(lambda: kernel(@getrandom@, buffer, 8, 2))
""", control="always"),
]

NETWORK = [
    Attack("connect by TCP", _attempts("socket.create_connection(('127.0.0.1', @port@), 1)"), control="always"),
    Attack("connect by IPv6", _attempts("socket.create_connection(('::1', @port@), 1)", "socket.socket(socket.AF_INET6)")),
    Attack("send by UDP", _attempts("socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @udp@))"), control="always"),
    Attack("connect to a local socket", _attempts("socket.socket(socket.AF_UNIX).connect('@target@/socket')",
                                                  "socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')"), control="always"),
    Attack("connect to an abstract socket", _attempts("socket.socket(socket.AF_UNIX).connect('\\0@mark@')"), control="always"),
    Attack("look up a name", """
attempt(socket.getaddrinfo, "example.com", 80)
attempt(socket.gethostbyname, "localhost")
"""),
    Attack("raw, netlink, vsock and packet sockets", _attempts(
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(40, socket.SOCK_STREAM)", "socket.socket(17, socket.SOCK_RAW)"), control="root"),
    Attack("listen", _attempts("socket.create_server(('127.0.0.1', 0))", "socket.create_server(('', 0))"), control="always"),
    Attack("fetch a page", "import urllib.request\n" + _attempts("urllib.request.urlopen('http://127.0.0.1:@port@/', timeout=1)"),
           control=""),
    Attack("a pair of sockets", _attempts("socket.socketpair()"), control="always"),
    Attack("asyncio in a thread of its own", "import asyncio\n" + _attempts(
        "asyncio.run(asyncio.open_connection('127.0.0.1', @port@))")),
]

PROCESSES = [
    Attack("fork bomb", "for _ in range(200):\n    attempt(os.fork)"),
    Attack("fork a daemon", """
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.2)
            open("@target@/@mark@", "w")
            os._exit(0)
        os._exit(0)
attempt(daemon)
time.sleep(0.5)
""", control="always"),
    Attack("other ways to fork", _attempts("kernel(@clone@, 17, 0, 0, 0, 0)", "kernel(@clone@, 0x4111, 0, 0, 0, 0)",
                                           "kernel(@clone3@, 0, 0)", "os.forkpty()")),
    Attack("run a program", """
attempt(subprocess.run, ["touch", "@target@/@mark@"])
attempt(os.posix_spawn, "/bin/touch", ["touch", "@target@/@mark@"], {})
print("refused" if os.system("touch @target@/@mark@") else "PWNED")
time.sleep(0.1)
""", control="always"),
    Attack("become a program", _attempts("os.execv('/bin/touch', ['touch', '@target@/@mark@'])",
                                         "os.execv(sys.executable, [sys.executable, '-c', 'print(7)'])")),
    Attack("run a program from memory", """
def run():
    number = os.memfd_create("x")
    os.write(number, b"#!/bin/sh\\ntouch @target@/@mark@\\n")
    os.execve(number, ["x"], {})
attempt(run)
""", control=""),
    Attack("run a program by its descriptor", _attempts("kernel(@execveat@, -100, b'/bin/sh', 0, 0, 0)")),
    Attack("multiprocessing", "import multiprocessing\n" + _attempts(
        "multiprocessing.get_context('fork').Process(target=print).start()", "multiprocessing.Pool(2)"), control="always"),
    Attack("thread bomb", """
def start():
    threading.stack_size(32768)
    for number in range(5000):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return number
attempt(start)
"""),
    Attack("leave its session", _attempts("os.setsid()", "os.setpgid(0, 0)")),
    Attack("outlive its parents", _attempts("kernel(@prctl@, 1, 0, 0, 0, 0)", "kernel(@prctl@, 36, 1, 0, 0, 0)")),
    Attack("become readable to debuggers", _attempts("kernel(@prctl@, 4, 1, 0, 0, 0)", "kernel(@prctl@, 0x59616D61, -1, 0, 0, 0)")),
]

RESOURCES = [
    Attack("loop for ever", "while True:\n    pass", ends="lost"),
    Attack("loop for ever and ignore every signal", """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
""", ends="lost"),
    Attack("sleep for ever", "time.sleep(1e6)", ends="lost"),
    Attack("wait for itself", "lock = threading.Lock()\nlock.acquire()\nlock.acquire()", ends="lost"),
    Attack("a number that takes for ever", "9 ** 9 ** 9", ends="lost"),
    Attack("a pattern that takes for ever", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", ends="lost"),
    Attack("stop itself", "os.kill(os.getpid(), signal.SIGSTOP)", ends="lost"),
    Attack("a list without end", "x = []\nwhile True:\n    x.append(' ' * 1000000)", ends="memory"),
    Attack("many small things", "x = []\nwhile True:\n    x.append([len(x)])", ends="memory"),
    Attack("one large thing", "bytearray(10 ** 10)", ends="memory"),
    Attack("a large array", "import numpy\nnumpy.ones(10 ** 9)", ends="memory"),
    Attack("doubling text", "x = 'x'\nwhile True:\n    x += x", ends="memory"),
    Attack("anonymous mappings", """
import mmap
kept = []
def bomb():
    while len(kept) < 1000:
        kept.append(mmap.mmap(-1, 1 << 24))
        kept[-1].write(b"x" * (1 << 24))
    return len(kept)
attempt(bomb)
"""),
    Attack("memory behind the interpreter's back", """
libc.mmap.restype = ctypes.c_void_p
count = 0
while libc.mmap(None, ctypes.c_size_t(1 << 24), 3, 0x22, -1, ctypes.c_long(0)) not in (None, 2 ** 64 - 1) and count < 1000:
    count += 1
print("refused" if count < 100 else f"PWNED {count}")
"""),
    Attack("unpack a bomb", """
import zlib
packer = zlib.compressobj(1)
small = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
zlib.decompress(small)
""", ends="memory"),
    Attack("recursion without end", "def f():\n    return f()\nf()", ends="failed"),
    Attack("recursion beyond the stack", """
sys.setrecursionlimit(10 ** 9)
class A:
    def __repr__(self):
        return repr(self)
repr(A())
""", ends="lost"),
    Attack("deeply nested code", "eval('(' * 100000 + ')' * 100000)", ends="failed"),
    Attack("deeply nested lists", "import ast\nast.literal_eval('[' * 5000 + ']' * 5000)", ends="failed"),
    Attack("print a gigabyte at once", "print('x' * 10 ** 9)", ends="memory"),
    Attack("print a gigabyte in pieces", "for _ in range(1000):\n    sys.stdout.write('x' * 1000000)", ends="failed"),
    Attack("print without end", "while True:\n    print('y')", ends="failed"),
    Attack("write to the descriptor without end", """
block = b"z" * 100000
while True:
    os.write(1, block)
""", ends="failed"),
    Attack("errors without end", "while True:\n    sys.stderr.write('e' * 10000)", ends="failed"),
    Attack("an error of a gigabyte", "raise ValueError('x' * 30000000)", ends="failed"),
    Attack("make the output enormous without writing", _attempts(
        "os.ftruncate(1, 1 << 40)", "os.posix_fallocate(1, 0, 1 << 40)")),
    Attack("fill the disk", """
written = 0
try:
    for number in range(1000):
        with open(f"@mark@{number}", "wb") as file:
            for _ in range(8):
                written += file.write(bytes(1 << 20))
except OSError as error:
    print("refused", error)
print("PWNED" if written > 5 << 20 else "refused")
"""),
    Attack("one enormous file", """
def enormous():
    with open("@mark@", "wb") as file:
        file.truncate(1 << 40)
attempt(enormous)
"""),
    Attack("files without end", """
count = 0
try:
    while count < 100000:
        open(f"@mark@{count}", "w").close()
        count += 1
except OSError as error:
    print("refused", error)
print("PWNED" if count > 40 else "refused", count)
"""),
    Attack("folders without end", """
count = 0
try:
    while count < 100000:
        os.mkdir("d")
        os.chdir("d")
        count += 1
except OSError as error:
    print("refused", error)
print("PWNED" if count > 40 else "refused", count)
"""),
    Attack("descriptors without end", """
def bomb():
    kept = []
    while len(kept) < 5000:
        kept.append(os.pipe())
    return len(kept)
attempt(bomb)
"""),
]

CRASHES = [
    Attack("leave without a word", "os._exit(0)", ends="lost"),
    Attack("leave with a code", "os._exit(3)", ends="lost"),
    Attack("abort", "os.abort()", ends="lost"),
    Attack("segmentation fault", "ctypes.string_at(1)", ends="lost"),
    Attack("illegal code", """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\x0f\\x0b" if "@machine@" == "x86_64" else bytes(4))
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""", ends="lost"),
    Attack("kill itself", "os.kill(os.getpid(), signal.SIGKILL)", ends="lost"),
    Attack("close everything", "os.closerange(0, 4096)", ends="lost"),
    Attack("close its output", "os.close(1)\nos.close(2)\nprint('gone')", ends="any"),
    Attack("turn its output elsewhere", "os.dup2(0, 1)\nos.dup2(0, 2)", ends="any"),
    Attack("write nonsense as its reply", "os.write(4, bytes(range(256)) * 100)", ends="lost"),
    Attack("announce an enormous reply", "os.write(4, b'd' + b'\\xff\\xff\\xff\\xff')\nwhile True:\n    pass", ends="lost"),
    Attack("announce a reply and say nothing", "os.write(4, b'd' + bytes([0, 0, 1, 0]))\nwhile True:\n    pass", ends="lost"),
    Attack("flood the reply", "while True:\n    os.write(4, b'x' * 65536)", ends="lost"),
    Attack("forge a reply and go on", "os.write(4, b'd' + bytes(4))\nwhile True:\n    pass", ends="done"),
    Attack("steal requests", "os.set_blocking(3, False)\nattempt(os.read, 3, 1 << 20)"),
    Attack("an exception that lies", """
class Liar(Exception):
    def __str__(self):
        os._exit(7)
    __repr__ = __str__
raise Liar()
""", ends="any"),
    Attack("an exception that never ends", """
class Endless(BaseException):
    def __str__(self):
        while True:
            pass
raise Endless()
""", ends="lost"),
    Attack("an output that never ends", """
class Endless:
    def write(self, text):
        return len(text)
    def flush(self):
        while True:
            pass
sys.stdout = Endless()
""", ends="lost"),
    Attack("reach into the runner", """
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    for name, value in list(frame.f_globals.items()):
        if callable(value) and getattr(value, "__module__", "").startswith("spear_rl"):
            frame.f_globals[name] = lambda *a, **k: os.write(4, b"\\xff" * 9)
""", ends="lost"),
    Attack("break the builtins", """
import builtins
for name in dir(builtins):
    if name[0] != "_":
        try:
            setattr(builtins, name, None)
        except Exception:
            pass
""", ends="any"),
    Attack("trace everything", """
def tracer(frame, event, argument):
    os.write(4, b"?")
    return tracer
sys.settrace(tracer)
sys.setprofile(tracer)
""", ends="lost"),
    Attack("an import hook", """
class Hook:
    def find_spec(self, name, path=None, target=None):
        open("@target@/@mark@", "w")
sys.meta_path.insert(0, Hook())
attempt(__import__, "tabnanny")
""", control="always"),
    Attack("unpickle a command", """
import pickle
class Bad:
    def __reduce__(self):
        return os.open, ("@target@/@mark@", os.O_CREAT | os.O_WRONLY)
attempt(pickle.loads, pickle.dumps(Bad()))
""", control="always"),
    Attack("something to do at the end", """
import atexit, gc, weakref
def late(*_):
    try:
        open("@target@/@mark@", "w")
    except OSError:
        pass
atexit.register(late)
gc.callbacks.append(late)
class Last:
    __del__ = late
sys.last = Last()
weakref.finalize(sys.last, late)
""", ends="done"),
    Attack("output that is no text", "os.write(1, bytes(range(256)) + b'\\xed\\xa0\\x80\\0')\nprint('\\ud800')", ends="done"),
    Attack("code that is no text", "x = '\ud800'\nprint(x)", ends="any"),
    Attack("code with a zero byte", "x = 1\0", ends="any"),
]

MACHINE = [
    Attack("system calls of another interface (x32)", "kernel(0x40000000 | 39)", ends="lost"),
    Attack("system calls of 32 bits", """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")
print("PWNED", ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
""", ends="lost"),
] if platform.machine() == "x86_64" else []
# fmt: on

# fmt: off
FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "sendto": (44, 206), "sendmsg": (46, 211),
    "socketpair": (53, 199), "accept4": (288, 242), "setsockopt": (54, 208), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "setrlimit": (160, 164), "prctl": (157, 167), "arch_prctl": (158, None),
    "personality": (135, 92), "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157), "setpgid": (109, 154), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "swapon": (167, 224),
    "swapoff": (168, 225), "quotactl": (179, 60), "acct": (163, 89), "sync": (162, 81), "syncfs": (306, 267),
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "iopl": (172, None), "ioperm": (173, None),
    "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "epoll_create1": (291, 20), "signalfd4": (289, 74),
    "eventfd2": (290, 19), "timerfd_create": (283, 85), "timer_create": (222, 107), "io_setup": (206, 0),
    "seccomp": (317, 277), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "setuid": (105, 146), "setgid": (106, 144),
    "setreuid": (113, 145), "setresuid": (117, 147), "setresgid": (119, 149), "setgroups": (116, 159),
    "setfsuid": (122, 151), "capset": (126, 91), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "getxattr": (191, 8), "listxattr": (194, 11), "truncate": (76, 45), "creat": (85, None),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None),
    "mknodat": (259, 33), "readlink": (89, None), "readlinkat": (267, 78), "statfs": (137, 43), "openat2": (437, 437),
    "name_to_handle_at": (303, None), "open_by_handle_at": (304, None), "flock": (73, 32), "fallocate": (285, 47),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75),
    "mlock": (149, 228), "mlock2": (325, 284), "mlockall": (151, 230), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "remap_file_pages": (216, 234), "pkey_alloc": (330, 289), "lookup_dcookie": (212, 18), "vhangup": (153, 58),
    "modify_ldt": (154, None), "membarrier": (324, 283), "mincore": (27, 232), "sysinfo": (99, 179),
    "getpriority": (140, 141), "ioprio_get": (252, 31), "sched_getscheduler": (145, 120), "sched_getparam": (143, 121),
    "sched_setparam": (142, 118), "sched_getattr": (315, 275), "sched_rr_get_interval": (148, 127),
    "get_robust_list": (274, 100), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "getpgid": (121, 155),
    "getsid": (124, 156), "fstatfs": (138, 44), "preadv2": (327, 286), "pwritev2": (328, 287), "readahead": (187, 213),
    "pipe": (22, None), "pipe2": (293, 59), "sync_file_range": (277, 84), "timer_settime": (223, 110), "wait4": (61, 260),
    "waitid": (247, 95), "epoll_create": (213, None), "eventfd": (284, None), "inotify_init": (253, None),
    "signalfd": (282, None), "pkey_mprotect": (329, 288), "rseq": (334, 293), "futex_waitv": (449, 449),
    "process_mrelease": (448, 448), "get_mempolicy": (239, 236), "landlock_create_ruleset": (444, 444),
}
"""System calls by number on x86_64 and aarch64; the filter must not let one of them reach the kernel."""
# fmt: on

GROUPS = {
    "files": FILES, "others": OTHERS, "channels": CHANNELS, "network": NETWORK, "processes": PROCESSES, "resources": RESOURCES,
    "crashes": CRASHES, "machine": MACHINE,
}  # fmt: skip
ATTACKS = [(f"{group}: {attack.name}", attack) for group, attacks in GROUPS.items() for attack in attacks]

HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}


def header_numbers(machine: str) -> dict[str, int]:
    """name -> number of every system call, from the C headers where they are installed."""
    path = Path(HEADERS.get(machine, ""))
    if not path.is_file():
        return {}
    found = re.findall(r"^#define __NR(?:3264)?_(\w+) (\d+)", path.read_text(), re.MULTILINE)
    numbers = {name: int(number) for name, number in reversed(found)}
    if "fstatat" in numbers:
        numbers.setdefault("newfstatat", numbers["fstatat"])
    return numbers


def numbers_here() -> dict[str, int]:
    """name -> number on this processor of what FORBIDDEN and the sandbox's own table of checked calls name."""
    column = ["x86_64", "aarch64"].index(platform.machine())
    return {name: number for name, both in (CHECKED | FORBIDDEN).items() if (number := both[column]) is not None}
