"""How a process isolates itself before it runs untrusted code, and which backend works on this machine.

A step that fails raises: the caller must not go on.
"""

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
from spear_rl.sandbox.types import MIB, Limits

ISOLATING = ("namespaces", "landlock")
"""Strongest first."""
UNSAFE = "unsafe-subprocess"
MAX_OPEN_FILES = 64
NOBODY = 65534
OOM_SCORE = 1000
"""The highest; raising one's own score needs no privilege."""


@dataclass(frozen=True)
class Isolation:
    """How the children of a fork server are isolated; fixed before the first of them."""

    backend: str
    limits: Limits
    jail_rules: tuple[tuple[str, int], ...]
    """Landlock rules (path, rights) on top of the jail; empty without Landlock."""
    ruleset: int | None
    """The Landlock ruleset of the backend landlock, shared by all children."""
    uid: int | None
    """The user that a child of root becomes."""
    reads_as_root: bool
    """The libraries are in root's private home: a child opens files as root, where Landlock lets it."""
    base_bytes: int
    """Address space of the server, with which a child starts."""
    filter: bytes
    """The seccomp filter, assembled for `seccomp.PLACEHOLDER_PID`."""

    def confine(self, server: int) -> None:
        """Isolate this process. `server` is the parent that it must not outlive."""
        if self.backend == "landlock" and self.uid is not None:
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
        self._set_resource_limits()
        if self.backend == UNSAFE:
            return
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.ruleset is not None:
            landlock.restrict_self(self.ruleset)
            os.close(self.ruleset)
        elif self.jail_rules:
            # The scratch file system is this process's alone, so the ruleset cannot be shared.
            own = landlock.ruleset([*self.jail_rules, (namespaces.SCRATCH, landlock.CHANGE)])
            landlock.restrict_self(own)
            os.close(own)
        seccomp.restrict_self(seccomp.for_process(self.filter, os.getpid()))

    def _set_resource_limits(self) -> None:
        limits = {
            resource.RLIMIT_AS: self.base_bytes + self.limits.memory_mb * MIB,
            resource.RLIMIT_FSIZE: self.limits.file_bytes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        }
        if self.backend != UNSAFE:  # quotas per user, who may be the host's
            counted = ("NPROC", "MEMLOCK", "MSGQUEUE", "SIGPENDING")
            limits |= {getattr(resource, f"RLIMIT_{name}"): 0 for name in counted}
        for which, value in limits.items():
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))


def landlock_rules(standard: Sequence[str], packages: Sequence[str], *, in_jail: bool) -> tuple[tuple[str, int], ...]:
    """(path, rights) of libraries and harmless devices. A jail hides other packages; elsewhere they get no rule."""
    rules: list[tuple[str, int]] = []
    for path in filter(os.path.exists, standard):
        if in_jail or not os.path.isdir(path):
            rules.append((path, landlock.READ))
        else:
            inside = [entry.path for entry in os.scandir(path) if entry.name not in namespaces.OTHERS_PACKAGES]
            rules += [(path, landlock.READ_DIR), *((each, landlock.READ) for each in filter(os.path.exists, inside))]
    rules += [(path, landlock.READ) for path in packages]
    for path, is_writable in namespaces.DEVICES.items():
        if os.path.exists(path):
            rules.append((path, landlock.READ_FILE | (landlock.WRITE_FILE | landlock.TRUNCATE if is_writable else 0)))
    return tuple(rules)


def filter_for(backend: str) -> bytes:
    """The assembled seccomp filter of a backend."""
    has_jail = backend == "namespaces"
    truncates = has_jail or landlock.version() >= 3  # before, Landlock lets O_TRUNC empty read-only files
    return seccomp.assembled(seccomp.program(seccomp.PLACEHOLDER_PID, has_scratch=has_jail, truncates=truncates))


def prefer_for_oom_kill() -> str:
    """Make the OOM killer choose this process and its children first; the score."""
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(OOM_SCORE))
        return score.read_text().strip()
    except OSError as error:
        return f"unchanged ({error.strerror})"


def unused_uid() -> int | None:
    """An unused uid for root to drop privileges to; None for other users and where root may not change its user.

    Such a root stays user 0, without capabilities and restricted by Landlock like any other user.
    """
    if os.getuid() != 0:
        return None
    candidates = (random.SystemRandom().randrange(1_900_000_000, 2_100_000_000), NOBODY)
    return next((uid for uid in candidates if failure(partial(namespaces.become, uid)) is None), None)


def needs_root_to_read(paths: Sequence[str], uid: int | None) -> bool:
    """Whether this user (None: the present one), without capabilities, cannot open these paths."""

    def try_reading() -> None:
        if uid is not None:
            namespaces.become(uid)
        kernel.drop_capabilities()
        for path in paths:
            os.close(os.open(path, os.O_RDONLY))

    return failure(try_reading) is not None


def why_unusable(backend: str, uid: int | None) -> str | None:
    """Why a backend does not work on this machine, tried in a process of its own; None if it does."""
    if not seccomp.is_supported():
        return "no system-call filter for this system and processor"

    def try_filter() -> None:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.restrict_self(filter_for("namespaces"))

    def try_jail() -> None:
        namespaces.enter([], [], uid=uid)
        namespaces.mount_scratch(num_bytes=MIB, max_files=4)

    if why := failure(try_filter):
        return why
    if backend == "landlock":
        return None if landlock.version() else "the kernel has no Landlock (Linux 5.13 or later with lsm=landlock)"
    return failure(try_jail)


def failure(trial: Callable[[], object]) -> str | None:
    """Run a function in a child process: None if it returns, else why not."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        message = b""
        try:
            trial()
        except BaseException as error:  # nothing may escape into a second copy of this program
            message = (f"{error}" or type(error).__name__).encode()
        finally:
            os.write(writer, b"=" + message[:1000])
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return None if answer == b"=" else answer[1:].decode(errors="replace") or "it died while trying"
