"""One process per run folder: a lock that the kernel releases when its holder dies."""

import contextlib
import errno
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from spear_rl.errors import ConfigError
from spear_rl.io.files import writing

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_MAX_ATTEMPTS = 100
_held: dict[str, int] = {}
"""Folder -> the thread of this process that holds it, as the kernel's locks are per process."""


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock a run folder; created if it is missing, and removed again if nothing was written to it.

    Reentrant within a thread. Best effort on network file systems.
    """
    if "\0" in str(run_dir) or (os.path.lexists(run_dir) and not os.path.isdir(run_dir)):
        raise ConfigError(f"run.dir: {str(run_dir)!r} is not a folder; choose another")
    key = os.path.realpath(run_dir)
    if _held.get(key) == threading.get_ident():
        yield
        return
    if key in _held:
        raise _in_use(run_dir, os.getpid(), socket.gethostname())
    _held[key] = threading.get_ident()
    made: list[Path] = []
    try:
        with writing(f"run.dir: {run_dir}"):
            made = _made(run_dir)
            handle = _locked(run_dir)
        try:
            yield
        finally:
            try:
                with contextlib.suppress(OSError):
                    if made and os.listdir(run_dir) == [LOCK]:
                        os.unlink(run_dir / LOCK)
            finally:
                os.close(handle)
    finally:
        del _held[key]
        with contextlib.suppress(OSError):  # those that hold something stay
            for folder in made:
                folder.rmdir()


def _made(folder: Path) -> list[Path]:
    """Create a folder and its missing parents; returns those that were missing, innermost first.

    At any moment another process may make one of them, or remove one that is empty.
    """
    line = [folder, *folder.parents]
    missing = [path for path in line if not path.is_dir()]
    attempts = 0
    while absent := [path for path in line if not path.is_dir()]:
        attempts += 1
        try:
            absent[-1].mkdir()
        except FileNotFoundError:
            if attempts > _MAX_ATTEMPTS:  # not removed by another: the file system makes no folders there
                raise
        except FileExistsError:
            if _is_no_folder(absent[-1]):
                raise NotADirectoryError(errno.ENOTDIR, f"{absent[-1]} is not a folder") from None
    return missing


def _is_no_folder(path: Path) -> bool:
    """Whether something else has this name, a link that leads nowhere included."""
    try:
        return not stat.S_ISDIR(path.lstat().st_mode) and not path.is_dir()
    except FileNotFoundError:
        return False


def _locked(run_dir: Path) -> int:
    path = run_dir / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process that made the folder removed it
            _made(run_dir)
            continue
        try:
            if not _taken(handle):
                holder: dict[str, object] = {}
                with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                    holder = dict(json.loads(os.pread(handle, 4096, 0)))
                raise _in_use(run_dir, holder.get("pid", "unknown"), holder.get("host", "unknown host"))
            if os.path.lexists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed it meanwhile
        _made(run_dir)


def _taken(handle: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):  # a file system without locks
            raise
    return True


def _in_use(run_dir: Path, pid: object, host: object) -> ConfigError:
    return ConfigError(
        f"run.dir: {run_dir} is in use by process {pid} on {host}; wait for it to end, or choose another folder"
    )
