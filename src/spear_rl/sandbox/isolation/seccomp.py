"""The seccomp filter: an allow-list of system calls and of their arguments, as a BPF program.

A filter cannot read paths: Landlock and the mount namespace restrict files.
"""

import ctypes
import errno
import fcntl
import os
import platform
import struct
import termios
from collections.abc import Iterable

from spear_rl.sandbox.isolation import syscalls
from spear_rl.sandbox.isolation.kernel import PR_SET_SECCOMP, prctl
from spear_rl.sandbox.isolation.syscalls import ARCHITECTURES, numbers

FILTER_MODE = 2
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE = 0, 4
LOW = [16, 24, 32, 40, 48, 56]
"""Offset of each argument's low half, which the kernel reads as an int (both processors are little-endian)."""
X32 = 0x40000000

# No F_SETOWN or F_SETSIG, which make the kernel send a signal to another process; no locks, leases or pipe sizes.
DUPFD_CLOEXEC = 1030
FCNTL = [fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, DUPFD_CLOEXEC]
O_ASYNC, O_NOATIME = 0o20000, 0o1000000
IOCTL = [termios.TCGETS, termios.FIONREAD, termios.FIOCLEX, termios.FIONCLEX, termios.FIONBIO]

# WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET on memory of this process alone. A shared futex
# lies on any file that two episodes can read; a priority-inheriting one names its owner by process number.
PRIVATE, REALTIME = 128, 256
FUTEX = [operation | PRIVATE for operation in (0, 1, 3, 4, 5, 9, 10, 0 | REALTIME, 9 | REALTIME)]
NUM_CLOCKS = 12
"""Clock ids 0 to 11 are the system's and the caller's; higher and negative ones name another process or a device."""
MAP_LOCKED, MAP_HUGETLB = 0x2000, 0x40000
MADVISE = [0, 1, 2, 3, 4, 8, 14, 15, 16, 17, 22, 23]
"""Advice about the caller's own pages; without merging equal pages of several processes and evicting shared ones."""
GRND_RANDOM = 2

STEP, OPERAND = struct.Struct("=HBBI"), struct.Struct("=I")
PLACEHOLDER_PID = 0x5EA40F0D
"""Above the highest process number, and equal to no other operand."""

Program = list[tuple[int, int, int, int]]


def program(pid: int, *, has_scratch: bool, truncates: bool, machine: str | None = None) -> Program:
    """The filter for one process: a list of (operation, jump if true, jump if false, operand).

    `truncates`: allow O_TRUNC; only where something else keeps read-only files from being truncated.
    """
    machine = machine or platform.machine()
    plain = numbers(syscalls.COMPUTING | (syscalls.SCRATCH if has_scratch else {}), machine)
    # Flags that act on the host's disk or on another process.
    refused_flags = O_ASYNC | O_NOATIME | syscalls.O_DIRECT[machine]
    open_flags = refused_flags | (0 if truncates else os.O_TRUNC)
    conditions: dict[str, Program] = {
        "fcntl": _low_is_one_of(1, FCNTL) + _low_is_one_of(1, [fcntl.F_SETFL], then=_has_none_of(2, refused_flags)),
        "ioctl": _low_is_one_of(1, IOCTL),
        "kill": _low_is_one_of(0, [pid]),
        "tgkill": _low_is_one_of(0, [pid]),
        "prlimit64": _low_is_one_of(0, [0, pid], then=_is_null(2)),
        "open": _has_none_of(1, open_flags),
        "openat": _has_none_of(2, open_flags),
        "sched_getaffinity": _low_is_one_of(0, [0, pid]),
        "futex": _low_is_one_of(1, FUTEX),
        "clock_gettime": _low_is_below(0, NUM_CLOCKS),
        "clock_getres": _low_is_below(0, NUM_CLOCKS),
        "clock_nanosleep": _low_is_below(0, NUM_CLOCKS),
        "getrandom": _has_none_of(2, GRND_RANDOM),
        "mmap": _has_none_of(3, MAP_LOCKED | MAP_HUGETLB),
        "madvise": _low_is_one_of(2, MADVISE),
    }
    out: Program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
        (AT_LEAST, 0, 1, syscalls.HIGHEST_KNOWN + 1),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
    ]
    for number in plain.values():
        out += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name, number in numbers(syscalls.CHECKED, machine).items():
        block = [*conditions[name], (RETURN, 0, 0, REFUSE | errno.EPERM)]
        out += [(EQUAL, 0, len(block), number), *block]
    for table, answer in ((syscalls.PRETENDED, 0), (syscalls.RETIRED, errno.ENOSYS)):
        for number in numbers(table, machine).values():
            out += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | answer)]
    return [*out, (RETURN, 0, 0, REFUSE | errno.EPERM)]


def assembled(steps: Program) -> bytes:
    return b"".join(STEP.pack(*step) for step in steps)


def for_process(code: bytes, pid: int) -> bytes:
    """The filter assembled for PLACEHOLDER_PID, with another pid: cheaper than assembling it again."""
    return code.replace(OPERAND.pack(PLACEHOLDER_PID), OPERAND.pack(pid))


def restrict_self(code: bytes) -> None:
    """Apply an assembled filter to this process for good. Requires PR_SET_NO_NEW_PRIVS."""
    memory = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(code) // STEP.size, ctypes.addressof(memory))
    prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.create_string_buffer(described, len(described)))


def is_supported() -> bool:
    return platform.system() == "Linux" and platform.machine() in ARCHITECTURES and ctypes.sizeof(ctypes.c_void_p) == 8


def _low_is_one_of(argument: int, values: Iterable[int], then: Program | None = None) -> Program:
    """Allow (or continue with `then`) if an argument has one of these values; otherwise fall through."""
    then = then or [(RETURN, 0, 0, ALLOW)]
    out: Program = [(LOAD, 0, 0, LOW[argument])]
    for value in values:
        out += [(EQUAL, 0, len(then), value & 0xFFFFFFFF), *then]
        if then[0][0] == LOAD:  # `then` overwrote the loaded argument
            out.append((LOAD, 0, 0, LOW[argument]))
    return out


def _is_null(argument: int) -> Program:
    low_is_zero = [(LOAD, 0, 0, LOW[argument]), (EQUAL, 0, 3, 0)]
    return [*low_is_zero, (LOAD, 0, 0, LOW[argument] + 4), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW)]


def _low_is_below(argument: int, bound: int) -> Program:
    """Compared unsigned: a negative number is above every bound."""
    return [(LOAD, 0, 0, LOW[argument]), (AT_LEAST, 1, 0, bound), (RETURN, 0, 0, ALLOW)]


def _has_none_of(argument: int, flags: int) -> Program:
    return [(LOAD, 0, 0, LOW[argument]), (AND, 0, 0, flags), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW)]
