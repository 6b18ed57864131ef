"""Runs Python on a lesser machine than this one: as an ordinary user, or with system calls that the kernel lacks.

python sandbox_elsewhere.py [--user] [--without 444,445] -c CODE | -m MODULE ARGUMENTS...
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

from spear_rl.sandbox.isolation import kernel, seccomp

UID = 54321


def show_to_all(folder: Path) -> None:
    """In a mount namespace of our own, make a folder reachable that lies in somebody's private home."""
    closed = [up for up in folder.parents if not up.stat().st_mode & 0o001]
    if not closed:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    handle = os.open(folder, os.O_PATH)
    kernel.mount("open", str(closed[-1]), "tmpfs", 0, "mode=755")
    folder.mkdir(parents=True)
    kernel.mount(f"/proc/self/fd/{handle}", str(folder), None, kernel.MS_BIND)
    os.close(handle)


def become_ordinary() -> None:
    if os.getuid() == 0:
        show_to_all(Path(sys.base_prefix))
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    os.environ["HOME"] = "/nowhere"


def lose_calls(numbers: list[int]) -> None:
    """Let the kernel say that it does not know these."""
    steps = [(seccomp.LOAD, 0, 0, seccomp.NUMBER)]
    for number in numbers:
        steps += [(seccomp.EQUAL, 0, 1, number), (seccomp.RETURN, 0, 0, seccomp.REFUSE | errno.ENOSYS)]
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.restrict_self(seccomp.assembled([*steps, (seccomp.RETURN, 0, 0, seccomp.ALLOW)]))


def main() -> None:
    arguments = sys.argv[1:]
    assert ctypes.sizeof(ctypes.c_long) == 8
    if arguments[0] == "--user":
        become_ordinary()
        arguments.pop(0)
    if arguments[0] == "--without":
        lose_calls([int(number) for number in arguments[1].split(",")])
        del arguments[:2]
    os.execv(sys.executable, [sys.executable, *arguments])


main()
