"""What a process does to itself before it runs untrusted code, and the choice of how on this machine.

Knows no code to run. Every step that fails is an exception: the caller must not go on.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spear_rl.sandbox.isolation import kernel, landlock, namespaces, seccomp
from spear_rl.sandbox.isolation.readable import DEVICES, standard_rules
from spear_rl.sandbox.limits import MIB, Limits

ISOLATING = ("namespaces", "landlock")
"""Strongest first."""
UNSAFE = "unsafe-subprocess"
MAX_OPEN_FILES = 64
NOBODY = 65534
OOM_SCORE = 1000
"""The highest. To raise one's own needs no privilege."""


@dataclass(frozen=True)
class Isolation:
    """How the children of a fork-server are held, decided once before the first of them."""

    backend: str
    limits: Limits
    shown: tuple[tuple[str, int], ...]
    """(path, rights) of what a child in the jail may read, where there is Landlock to say so."""
    ruleset: int | None
    """A Landlock ruleset that all children share, where they have no jail."""
    uid: int | None
    """Whom a child of root becomes."""
    reads_as_root: bool
    """The libraries lie in a private home of root: such a child opens files as root would, where Landlock lets it."""
    base_bytes: int
    """Address space of the server, which a child starts with."""
    filter: bytes
    """Of system calls, to be made out to each child."""

    def confine(self, server: int) -> None:
        """Shut this process in. `server` is the parent it must not outlive."""
        if self.backend == "landlock" and self.uid is not None:
            # Without this, giving up user 0 would also give up the right to keep its file access.
            kernel.prctl(kernel.PR_SET_SECUREBITS, kernel.SECBIT_NO_SETUID_FIXUP)
            namespaces.become(self.uid)
        if self.reads_as_root:
            kernel.libc.setfsuid(0)
        if self.backend == "namespaces":
            namespaces.mount_scratch(num_bytes=self.limits.disk_mb * MIB, max_files=self.limits.max_files)
        if sys.platform == "linux":
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no core file, whatever the host does with those
        if os.getppid() != server:
            raise OSError("the server has ended")
        self._bound()
        if self.backend == UNSAFE:
            return
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.ruleset is not None:
            landlock.restrict_self(self.ruleset)
            os.close(self.ruleset)
        elif self.shown:
            # Its scratch is a file system that only this process has, so no ruleset can be shared.
            own = landlock.ruleset([*self.shown, (namespaces.SCRATCH, landlock.CHANGE)])
            landlock.restrict_self(own)
            os.close(own)
        seccomp.restrict_self(seccomp.for_process(self.filter, os.getpid()))

    def _bound(self) -> None:
        limits = self.limits
        most = {
            resource.RLIMIT_AS: self.base_bytes + limits.memory_mb * MIB,
            resource.RLIMIT_FSIZE: limits.file_bytes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        }
        if self.backend != UNSAFE:
            # What counts against the user, who may be the host's: processes, locked memory, queues, queued signals.
            counted = ("NPROC", "MEMLOCK", "MSGQUEUE", "SIGPENDING")
            most |= {getattr(resource, f"RLIMIT_{name}"): 0 for name in counted}
        for which, value in most.items():
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))


def shown_rules(standard: Sequence[str], packages: Sequence[str], *, in_jail: bool) -> tuple[tuple[str, int], ...]:
    """(path, rights): libraries and harmless devices. In a jail other packages are covered; else they are left out."""
    if in_jail:
        rules = [(path, landlock.READ) for path in standard if os.path.exists(path)]
    else:
        rules = [(path, landlock.READ_DIR if listed else landlock.READ) for path, listed in standard_rules(standard)]
    rules += [(path, landlock.READ) for path in packages]
    for path, is_writable in DEVICES.items():
        if os.path.exists(path):
            rules.append((path, landlock.READ_FILE | (landlock.WRITE_FILE | landlock.TRUNCATE if is_writable else 0)))
    return tuple(rules)


def filter_for(backend: str) -> bytes:
    """The system-call filter of a backend's children."""
    has_jail = backend == "namespaces"
    truncates = has_jail or landlock.version() >= 3  # before, Landlock lets O_TRUNC empty what may only be read
    return seccomp.assembled(seccomp.program(seccomp.SOMEONE, has_scratch=has_jail, truncates=truncates))


def prefer_for_oom_kill() -> str:
    """Have the kernel, when it is out of memory, end this process and its children before others; the score."""
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(OOM_SCORE))
        return score.read_text().strip()
    except OSError as error:
        return f"unchanged ({error.strerror})"


def spare_uid() -> int | None:
    """A user that nobody is, for root to become; None for who is not root or cannot change.

    Root without the right to change stays user 0, with no capability and behind Landlock like any other user.
    """
    if os.getuid() != 0:
        return None

    def trial(uid: int) -> None:
        kernel.prctl(kernel.PR_SET_SECUREBITS, kernel.SECBIT_NO_SETUID_FIXUP)
        namespaces.become(uid)

    candidates = (random.SystemRandom().randrange(1_900_000_000, 2_100_000_000), NOBODY)
    return next((uid for uid in candidates if fails(partial(trial, uid)) is None), None)


def needs_root_to_read(paths: Sequence[str], uid: int | None) -> bool:
    """Whether these paths lie in a private home of root, closed to this user (or to the present one)."""

    def trial() -> None:
        if uid is not None:
            namespaces.become(uid)
        kernel.drop_capabilities()
        for path in paths:
            os.close(os.open(path, os.O_RDONLY))

    return fails(trial) is not None


def unusable(backend: str, uid: int | None) -> str | None:
    """Why this machine cannot run a backend, tried out in a process of its own; None where it can."""
    if not seccomp.is_supported():
        return "no system-call filter for this system and processor"
    why = fails(_filtered)
    if why is None and backend == "landlock":
        return None if landlock.version() else "the kernel has no Landlock (Linux 5.13 or later with lsm=landlock)"
    if why is None:
        why = fails(lambda: _in_jail(uid))
    return why


def fails(trial: Callable[[], object]) -> str | None:
    """Do something in a child process: None if it went well, else why not."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        message = b""
        try:
            trial()
        except BaseException as error:  # whatever it is, it must not escape into a second copy of this program
            message = (f"{error}" or type(error).__name__).encode()
        finally:
            os.write(writer, b"=" + message[:1000])
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return None if answer == b"=" else answer[1:].decode(errors="replace") or "it died while trying"


def _filtered() -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.restrict_self(filter_for("namespaces"))


def _in_jail(uid: int | None) -> None:
    namespaces.enter([], [], uid=uid)
    namespaces.mount_scratch(num_bytes=MIB, max_files=4)
