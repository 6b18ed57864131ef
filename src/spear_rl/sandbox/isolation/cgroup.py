"""A control group (cgroup v2) around a fork-server and its children: one bound on the memory, the processes and the
share of the processor of all of them together.

Used where the hierarchy lets this process make a group; elsewhere the reason is reported. Changes nothing but a
directory of its own.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "spear-sandbox-"
CPU_WEIGHT = 100
"""All episodes together weigh as much as one ordinary group."""
REMOVE_SECONDS = 2.0


@dataclass(frozen=True)
class Group:
    """A group with a fork-server in it, or the reason why there is none."""

    path: Path | None
    about: str

    def remove(self) -> None:
        """End whatever is left inside and remove the directory."""
        if self.path is None:
            return
        deadline = time.monotonic() + REMOVE_SECONDS
        while self.path.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # Linux 5.14
                (self.path / "cgroup.kill").write_text("1")
            with suppress(OSError):  # busy until the last process is gone
                self.path.rmdir()
                return
            time.sleep(0.01)


def limits_for(*, memory_bytes: int, max_processes: int) -> dict[str, dict[str, int]]:
    """controller -> its files and their values. The trainer keeps at least half of the machine's memory."""
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return {
        "memory": {"memory.max": min(memory_bytes, half), "memory.swap.max": 0},
        "pids": {"pids.max": max_processes},
        "cpu": {"cpu.weight": CPU_WEIGHT},
    }


def group_of(pid: int, limits: Mapping[str, Mapping[str, int]], *, root: Path = Path("/")) -> Group:
    """Put a process into a new group with these limits, as far as the controllers are there."""
    why = "no cgroup v2 hierarchy shows the group of this process"
    try:
        for parent in _parents(root):
            enabled = (parent / "cgroup.subtree_control").read_text().split()
            files = {name: value for kind in enabled for name, value in limits.get(kind, {}).items()}
            if limits and not files:
                why = f"{parent} has none of the controllers {', '.join(limits)} enabled for its children"
                continue
            _sweep(parent, root)
            made = Group(parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}", _told(files))
            try:
                _fill(made, files, pid)
            except OSError as error:
                made.remove()
                why = f"{parent}: {error.strerror or error}"
                continue
            return made
    except OSError as error:
        why = error.strerror or str(error)
    return Group(None, f"none ({why})")


def _parents(root: Path) -> Iterator[Path]:
    """Where a group can be made: this process's own, and the one above, whose children may have controllers while a
    group with processes in it cannot enable any."""
    own = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), "..")
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, filesystem = line.partition(" - ")
        if filesystem.startswith("cgroup2 "):
            shown, point = fields.split()[3:5]
            if ".." not in own and os.path.commonpath([own, shown]) == shown:
                top = root / point.lstrip("/")
                inner = Path(os.path.relpath(own, shown))
                yield top / inner
                if inner != Path():
                    yield (top / inner).parent
            return


def _fill(made: Group, files: Mapping[str, int], pid: int) -> None:
    assert made.path is not None
    made.path.mkdir()
    for name, value in files.items():
        if name != "memory.swap.max" or (made.path / name).exists():  # a kernel without swap accounting lacks it
            (made.path / name).write_text(str(value))
    (made.path / "cgroup.procs").write_text(str(pid))


def _sweep(parent: Path, root: Path) -> None:
    """Remove the empty groups of trainers that were killed. One in use is busy and stays."""
    for left in parent.glob(f"{PREFIX}*"):
        owner = left.name.removeprefix(PREFIX).partition("-")[0]
        if not (root / "proc" / owner).exists():
            with suppress(OSError):
                left.rmdir()


def _told(files: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in files.items())


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
