"""Linux system calls that the standard library lacks, through ctypes."""

import ctypes
import mmap
import os
from contextlib import suppress
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 28, 38
SECBIT_NO_SETUID_FIXUP = 1 << 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH, MAP_FIXED, CAPABILITIES_V3 = 2, 0x10, 0x20080522


def checked(what: str, returned: int) -> int:
    """The return value of a C function, or its errno as an OSError."""
    if returned == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


def syscall(what: str, number: int, *arguments: Any) -> int:
    """A raw system call. Integers are passed as long; ctypes would cut them to 32 bits."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(what, libc.syscall(ctypes.c_long(number), *wide))


def prctl(option: int, value: int, pointer: Any = 0) -> None:
    last = ctypes.c_ulong(pointer) if isinstance(pointer, int) else pointer
    zero = ctypes.c_ulong(0)
    checked(f"prctl {option}", libc.prctl(option, ctypes.c_ulong(value), last, zero, zero))


def unshare(flags: int) -> None:
    checked("unshare", libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    checked(f"mount {target}", libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def privatise_shared_memory() -> None:
    """Replace every shared mapping by a private copy, so that forks of this process share no writable memory."""
    libc.mmap.restype = ctypes.c_void_p
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.read().splitlines():
            span, rights = line.split()[:2]
            if rights[3] != "s":
                continue
            start, end = (int(edge, 16) for edge in span.split("-"))
            content, size = b"", ctypes.c_size_t(end - start)
            with suppress(OSError):  # beyond the end of the mapped file
                content = os.pread(memory.fileno(), end - start, start)
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            flags = MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            if libc.mmap(ctypes.c_void_p(start), size, writable, flags, -1, ctypes.c_long(0)) != start:
                raise OSError(ctypes.get_errno(), "shared memory cannot be made private")
            ctypes.memmove(start, content, len(content))
            kept = sum(1 << bit for bit, letter in enumerate("rwx") if letter in rights)
            checked("mprotect", libc.mprotect(ctypes.c_void_p(start), size, kept))


def drop_capabilities() -> None:
    """Give up every capability for good: without exec none can be regained."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    checked("capset", libc.capset(header, (ctypes.c_uint32 * 6)()))
