"""The jail: Linux namespaces with no network, no other processes, and a read-only root of the interpreter's libraries.

Needs no root where the kernel allows unprivileged user namespaces.
"""

import os
import platform
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from spear_rl.sandbox.isolation import kernel
from spear_rl.sandbox.isolation.syscalls import PIVOT_ROOT

ROOT = "/tmp"
"""Where the new root is built, inside the jail's own mount namespace: nothing is created in the host's /tmp."""
SCRATCH = "/scratch"
"""Inside the jail: every episode mounts its own small file system here. /tmp is a link to it."""
OTHERS_PACKAGES = ("site-packages", "dist-packages")
DEVICES = {"/dev/null": True, "/dev/zero": False, "/dev/urandom": False}
"""path -> whether it is writable. Not /dev/random: before Linux 5.6 any process can drain its pool."""
HOST_NAME = b"sandbox"
INSIDE_ID = 1000
KEPT_FLAGS = {os.ST_NOEXEC: kernel.MS_NOEXEC, os.ST_NODEV: kernel.MS_NODEV, os.ST_NOSUID: kernel.MS_NOSUID}
KEPT_FLAGS |= {os.ST_NOATIME: 1 << 10, os.ST_NODIRATIME: 1 << 11, os.ST_RELATIME: 1 << 21}
WATCH_SECONDS = 0.5
NEW = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET
NEW |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID


def enter(standard: Sequence[str], packages: Iterable[str], *, uid: int | None) -> None:
    """Enter a jail with these paths and continue as its first process; the caller's process stays outside to watch.

    `uid` is the user that root becomes. When the watcher or the first process ends, the kernel ends all inside.
    """
    parent = os.getppid()
    if uid is None:
        outside = os.getuid(), os.getgid()
        kernel.unshare(NEW)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{INSIDE_ID} {outside[0]} 1")
        Path("/proc/self/gid_map").write_text(f"{INSIDE_ID} {outside[1]} 1")
    else:
        os.setgroups([])
        with _mapped_from_outside(f"0 0 1\n{INSIDE_ID} {uid} 1\n"):
            kernel.unshare(NEW)
    kernel.checked("sethostname", kernel.libc.sethostname(HOST_NAME, len(HOST_NAME)))
    # Opened before the new root hides anything, and still as root: the interpreter may be in root's private home.
    sources = {path: os.open(path, os.O_PATH) for path in [*standard, *packages, *DEVICES] if os.path.exists(path)}
    _build(standard, sources)
    for descriptor in sources.values():
        os.close(descriptor)
    if uid is not None:
        become(INSIDE_ID)
    pid = os.fork()
    if pid:
        _watch(pid, parent)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def become(uid: int) -> None:
    """Change from root to another user. Capabilities stay: to mount in the jail, or to set the user for file access."""
    kernel.prctl(kernel.PR_SET_SECUREBITS, kernel.SECBIT_NO_SETUID_FIXUP)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


@contextmanager
def _mapped_from_outside(users: str) -> Iterator[None]:
    """Map the users of the namespace created in the block, by a child of this process that stays outside."""
    reader, writer = os.pipe()
    pid, helper = os.getpid(), os.fork()
    if helper == 0:
        status = 1
        with suppress(BaseException):
            os.close(writer)
            if os.read(reader, 1):
                for kind in ("uid_map", "gid_map"):
                    Path(f"/proc/{pid}/{kind}").write_text(users)
                status = 0
        os._exit(status)
    os.close(reader)
    try:
        yield
        os.write(writer, b"!")
    finally:
        os.close(writer)
        status = os.waitpid(helper, 0)[1]
    if status:
        raise OSError("the users of a user namespace cannot be mapped")


def mount_scratch(*, num_bytes: int, max_files: int) -> None:
    """Mount a scratch directory that only this process sees and that ends with it."""
    kernel.unshare(kernel.CLONE_NEWNS)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    # The root directory of a file system counts as a file.
    kernel.mount("scratch", SCRATCH, "tmpfs", flags, f"size={num_bytes},nr_inodes={max_files + 1},mode=700")
    os.chdir(SCRATCH)


def _build(standard: Sequence[str], sources: dict[str, int]) -> None:
    """Build a root of the given paths alone and leave the host's."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("jail", ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=10k,mode=755")
    covers = []
    for path, source in sources.items():
        target = ROOT + path
        _bind_read_only(source, target, is_device=path in DEVICES)
        if path in standard:
            for name in OTHERS_PACKAGES:
                if os.path.isdir(cover := f"{target}/{name}"):
                    kernel.mount("cover", cover, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
                    covers.append(cover)
    os.mkdir(ROOT + SCRATCH)
    with suppress(FileExistsError):  # the interpreter may be installed beneath /tmp
        os.symlink(SCRATCH, ROOT + "/tmp")
    for folder in [*covers, ROOT]:
        kernel.mount("none", folder, None, kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    os.chdir(ROOT)
    kernel.syscall("pivot_root", PIVOT_ROOT[platform.machine()], b".", b".")
    kernel.checked("umount", kernel.libc.umount2(b".", kernel.MNT_DETACH))
    os.chdir("/")


def _bind_read_only(source: int, target: str, *, is_device: bool) -> None:
    """Mount the file or directory of a descriptor read-only."""
    origin = f"/proc/self/fd/{source}"
    if os.path.isdir(origin):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    kernel.mount(origin, target, None, kernel.MS_BIND)
    has = os.statvfs(target).f_flag
    # A user namespace may add restrictions to a mount but not lift any: repeat those it has.
    kept = sum(flag for theirs, flag in KEPT_FLAGS.items() if has & theirs)
    added = kernel.MS_NOSUID if is_device else kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", target, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kept | added)


def _watch(pid: int, parent: int) -> NoReturn:
    """Wait outside the process namespace until its first process or our own parent is gone."""
    for descriptor in range(3, 256):
        with suppress(OSError):
            os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if os.getppid() != parent:
            os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], WATCH_SECONDS)
    os._exit(0)
