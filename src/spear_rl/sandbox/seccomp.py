"""The filter the kernel runs before every system call of the untrusted code: what is not named is refused.

Knows system calls, not paths: which files may be read is Landlock's and the mount namespace's part.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import termios
from collections.abc import Iterable

from spear_rl.sandbox.kernel import PR_SET_SECCOMP, prctl
from spear_rl.sandbox.syscalls import ARCHITECTURES, CHECKED, COMPUTING, HIGHEST_KNOWN, RETIRED, SCRATCH, numbers

FILTER_MODE = 2
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
X32 = 0x40000000

# No F_SETOWN or F_SETSIG, which make the kernel send a signal to another process; no locks; no larger pipes.
FCNTL = [getattr(fcntl, name) for name in ("F_DUPFD", "F_GETFD", "F_SETFD", "F_GETFL", "F_SETFL")]
DUPFD_CLOEXEC, GETPIPE_SZ = 1030, 1032
IOCTL = [termios.TCGETS, termios.FIONREAD, termios.FIOCLEX, termios.FIONCLEX, termios.FIONBIO]

STEP, OPERAND = struct.Struct("=HBBI"), struct.Struct("=I")
SOMEONE = 0x5EA40F0D
"""No process has this number, and no other operand is like it."""

Program = list[tuple[int, int, int, int]]


def program(pid: int, *, has_scratch: bool, truncates: bool, machine: str | None = None) -> Program:
    """(operation, jump if true, jump if false, operand) of the filter for one process.

    `truncates`: whether something else keeps O_TRUNC away from read-only files (old versions of Landlock do not).
    """
    machine = machine or platform.machine()
    plain = numbers(COMPUTING | SCRATCH if has_scratch else COMPUTING, machine)
    checked = numbers(CHECKED, machine)
    conditions: dict[str, Program] = {
        "fcntl": _low_is_one_of(1, [*FCNTL, DUPFD_CLOEXEC, GETPIPE_SZ]),
        "ioctl": _low_is_one_of(1, IOCTL),
        "kill": _low_is_one_of(0, [pid]),
        "tgkill": _low_is_one_of(0, [pid]),
        "prlimit64": _low_is_one_of(0, [0, pid], then=_is_null(2)),
        "open": _has_none_of(1, 0 if truncates else os.O_TRUNC),
        "openat": _has_none_of(2, 0 if truncates else os.O_TRUNC),
    }
    out: Program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
        (AT_LEAST, 0, 1, HIGHEST_KNOWN + 1),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
    ]
    for number in plain.values():
        out += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name, number in checked.items():
        block = [*conditions[name], (RETURN, 0, 0, REFUSE | errno.EPERM)]
        out += [(EQUAL, 0, len(block), number), *block]
    for number in numbers(RETIRED, machine).values():
        out += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    return [*out, (RETURN, 0, 0, REFUSE | errno.EPERM)]


def assembled(steps: Program) -> bytes:
    return b"".join(STEP.pack(*step) for step in steps)


def for_process(code: bytes, pid: int) -> bytes:
    """A filter assembled for the process SOMEONE, made out to another: cheaper than to assemble it again."""
    return code.replace(OPERAND.pack(SOMEONE), OPERAND.pack(pid))


def restrict_self(code: bytes) -> None:
    """Put this process under an assembled filter for good. PR_SET_NO_NEW_PRIVS must be set."""
    memory = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("@HP", len(code) // STEP.size, ctypes.addressof(memory))
    prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.create_string_buffer(described, len(described)))


def is_supported() -> bool:
    return platform.system() == "Linux" and platform.machine() in ARCHITECTURES and ctypes.sizeof(ctypes.c_void_p) == 8


def _low(argument: int) -> int:
    """Where the half of an argument lies that the kernel reads as an int (both processors are little-endian)."""
    return ARGUMENTS + 8 * argument


def _low_is_one_of(argument: int, values: Iterable[int], then: Program | None = None) -> Program:
    """Allow (or go on with `then`, if given) when an argument has one of these values; otherwise fall through."""
    then = then or [(RETURN, 0, 0, ALLOW)]
    out: Program = [(LOAD, 0, 0, _low(argument))]
    for value in values:
        out += [(EQUAL, 0, len(then), value & 0xFFFFFFFF), *then]
        if then[0][0] == LOAD:  # `then` replaced what is compared
            out.append((LOAD, 0, 0, _low(argument)))
    return out


def _is_null(argument: int) -> Program:
    return [
        (LOAD, 0, 0, _low(argument)),
        (EQUAL, 0, 3, 0),
        (LOAD, 0, 0, _low(argument) + 4),
        (EQUAL, 0, 1, 0),
        (RETURN, 0, 0, ALLOW),
    ]


def _has_none_of(argument: int, flags: int) -> Program:
    return [(LOAD, 0, 0, _low(argument)), (AND, 0, 0, flags), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW)]
