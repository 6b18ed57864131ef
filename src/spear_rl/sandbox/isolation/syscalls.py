"""The system calls that Python, numpy and sympy need: name -> number on x86_64 and aarch64.

All others are refused. Adding one weakens the sandbox: first write the attack that it might allow.
"""

from collections.abc import Mapping

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_... of each processor."""

HIGHEST_KNOWN = 450
"""Later calls are newer than this table: they get ENOSYS, so that the C library falls back to an older one."""

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
O_DIRECT = {"x86_64": 0o40000, "aarch64": 0o200000}

# fmt: off
COMPUTING = {
    # descriptors already open
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "ftruncate": (77, 46), "fstat": (5, 80),
    # finding modules
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "umask": (95, 166),
    # its own memory
    "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "brk": (12, 214),
    # its own signals, time and sleep
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "restart_syscall": (219, 128),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "sched_yield": (24, 124), "getcpu": (309, 168),
    # who it is
    "uname": (63, 160), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getrlimit": (97, 163),
    "exit": (60, 93), "exit_group": (231, 94),
}

SCRATCH = {
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
}
"""Only where the code has a writable file system of its own."""

CHECKED = {
    "open": (2, None), "openat": (257, 56), "fcntl": (72, 25), "ioctl": (16, 29), "kill": (62, 129),
    "tgkill": (234, 131), "prlimit64": (302, 261), "sched_getaffinity": (204, 123), "futex": (202, 98),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "getrandom": (318, 278),
    "mmap": (9, 222), "madvise": (28, 233),
}
"""Allowed with certain arguments only."""

PRETENDED = {"fsync": (74, 82), "fdatasync": (75, 83), "msync": (26, 227), "fadvise64": (221, 223)}
"""Return success and do nothing. An episode's files are in memory and need none of these; on a library's file they
would flush the host's disk or evict pages that other episodes can time."""

RETIRED = {"clone3": (435, 435), "openat2": (437, 437)}
"""Get ENOSYS: a filter cannot read their arguments, and there is an older call to fall back to."""
# fmt: on


def numbers(table: Mapping[str, tuple[int | None, int | None]], machine: str) -> dict[str, int]:
    """name -> number on this processor, without the calls that it lacks."""
    column = list(ARCHITECTURES).index(machine)
    return {name: number for name, both in table.items() if (number := both[column]) is not None}
