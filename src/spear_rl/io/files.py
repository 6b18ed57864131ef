"""Files that survive a kill, a power cut and a full disk: written atomically."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from spear_rl.errors import DiskError, UserError

_PART = ".part"


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Turn a failure to write a file or folder into one sentence that names it as `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = disk_reason(error)
        if reason is None:
            raise
        raise DiskError(f"{what} cannot be written: {reason}") from error


def disk_reason(error: BaseException | None) -> str | None:
    """The operating system's message, if an exception or one of its causes is about a file; else None.

    safetensors, tokenizers and torch write in native code and raise exceptions of their own.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        text = str(error)
        if found := re.search(r"\(os error (\d+)\)", text):
            return os.strerror(int(found[1]))
        if "PytorchStreamWriter" in text or "PyTorchStreamWriter" in text:
            return f"{os.strerror(errno.EIO)} (is the disk full?)"
        error = error.__cause__ or error.__context__
    return None


def loading_reason(error: BaseException) -> str:
    """What a loader says is wrong with a file, on one line; torch's advice to run the file's code is left out."""
    first, _, rest = (str(error).strip() or type(error).__name__).partition("\n")
    if "weights_only" in first:
        return "its weights in torch's format hold more than tensors and are not read"
    second = rest.strip().partition("\n")[0]
    return f"{first} {second}" if first.endswith(":") and second else first


def unreadable_file(folder: Path) -> str:
    """The first file of a model's folder that cannot be read, with the reason, which loaders often say of no file."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            if path.is_fifo():
                return f"{path.name} is a pipe, not a file: remove it"
            if is_pointer(path):
                return f"{path.name} is a pointer of git-lfs, not the file itself: run git lfs pull"
            if path.suffix == ".safetensors":
                from safetensors import safe_open

                safe_open(path, "numpy")
            elif path.name == "tokenizer.json":
                from tokenizers import Tokenizer

                Tokenizer.from_file(str(path))
            elif path.suffix == ".json":
                content = json.loads(path.read_text("utf-8"))
                if path.name.endswith(".index.json"):
                    set(content["metadata"]), set(content["weight_map"].values())
        except Exception as error:  # readers raise many types
            return f"{path.name} cannot be read ({loading_reason(error)}): download or save it again"
    return ""


def is_pointer(path: Path) -> bool:
    """Whether git-lfs left the name of a file's content in its place, as without `git lfs pull`."""
    start = b"version https://git-lfs"
    if not path.is_file():  # a pipe would be waited for
        return False
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(start)) == start
    return False


def flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one move: readers see the old content or the new one, whenever the writer dies."""
    part = path.with_name(f".{path.name}{_PART}")
    with writing(path):
        try:
            with part.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            flush(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def is_leftover(name: str) -> bool:
    """Whether a name is one that `write_whole` gives to an unfinished file."""
    return name.startswith(".") and name.endswith(_PART)


def move_aside(path: Path) -> Path:
    """Rename something that is in the way and must not be deleted."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.kept-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def remove_folder(path: Path) -> None:
    """Delete a folder so that a kill in the middle leaves nothing under its name."""
    gone = path.with_name(f".old_{path.name}")
    if gone.exists():
        shutil.rmtree(gone)
    os.rename(path, gone)
    shutil.rmtree(gone)


@contextlib.contextmanager
def same_folder() -> Iterator[None]:
    """Restore the working directory afterwards: a user's code may change it, and our paths may be relative."""
    folder = ""
    with contextlib.suppress(OSError):
        folder = os.getcwd()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if folder and os.getcwd() != folder:
                os.chdir(folder)


def check_writable(path: Path, what: str) -> None:
    """Fail before the work if a file cannot be written; leaves nothing behind but the file's folder."""
    with writing(f"{what}: {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()


def is_plain_file(path: Path) -> bool:
    """Whether it is a file: no link, which may lead anywhere, and no pipe or device, which may never end."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False
