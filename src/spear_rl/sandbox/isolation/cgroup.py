"""A control group (cgroup v2) around a fork server and its children: limits on their memory, processes and CPU share.

Used where this process may create a group; elsewhere the reason is reported.
"""

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
    """A group that holds a fork server, or the reason why there is none."""

    path: Path | None
    about: str

    def remove(self) -> None:
        """Kill what is left inside and remove the directory."""
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
    """Move a process into a new group with these limits, as far as the controllers are enabled."""
    why = "no cgroup v2 hierarchy shows the group of this process"
    try:
        for parent in _parents(root):
            enabled = (parent / "cgroup.subtree_control").read_text().split()
            files = {name: value for kind in enabled for name, value in limits.get(kind, {}).items()}
            if limits and not files:
                why = f"{parent} has none of the controllers {', '.join(limits)} enabled for its children"
                continue
            _remove_stale(parent, root)
            path = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            group = Group(path, ", ".join(f"{name}={value}" for name, value in files.items()))
            try:
                path.mkdir()
                for name, value in files.items():
                    if name != "memory.swap.max" or (path / name).exists():  # missing without swap accounting
                        (path / name).write_text(str(value))
                (path / "cgroup.procs").write_text(str(pid))
                return group
            except OSError as error:
                group.remove()
                why = f"{parent}: {error.strerror or error}"
    except OSError as error:
        why = error.strerror or str(error)
    return Group(None, f"none ({why})")


def _parents(root: Path) -> Iterator[Path]:
    """This process's own group, and the one above it: a group with processes cannot enable controllers."""
    groups = (root / "proc/self/cgroup").read_text().splitlines()
    own = next((line[3:] for line in groups if line.startswith("0::")), "..")
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        fields, _, filesystem = line.partition(" - ")
        if filesystem.startswith("cgroup2 "):
            mounted, point = fields.split()[3:5]
            if ".." not in own and os.path.commonpath([own, mounted]) == mounted:
                path = root / point.lstrip("/") / os.path.relpath(own, mounted)
                yield path
                if own != mounted:
                    yield path.parent
            return


def _remove_stale(parent: Path, root: Path) -> None:
    """Remove the empty groups of trainers that were killed. A group in use is busy and stays."""
    for stale in parent.glob(f"{PREFIX}*"):
        owner = stale.name.removeprefix(PREFIX).partition("-")[0]
        if not (root / "proc" / owner).exists():
            with suppress(OSError):
                stale.rmdir()
