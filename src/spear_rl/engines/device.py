"""Device, precision and free memory: what "auto" means on this machine, or why a setting cannot be met."""

import os
from pathlib import Path

import torch

from spear_rl.errors import UserError


def chosen_device(name: str) -> torch.device:
    """auto takes a GPU if there is one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "was built without CUDA" if torch.version.cuda is None else f"was built for CUDA {torch.version.cuda}"
        raise UserError(
            f"engine.device={name}: torch {torch.__version__} sees no GPU here (it {build}); "
            "set engine.device=cpu, or see what the machine has with `spear doctor`"
        )
    return torch.device("cuda", torch.cuda.current_device())


def chosen_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto is bfloat16 on GPUs that have it, else float32."""
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "bfloat16" and device.type == "cuda" and not has_bfloat16:
        raise UserError(
            f"engine.dtype=bfloat16: {torch.cuda.get_device_name(device)} has no bfloat16; set engine.dtype=float32"
        )
    if name == "auto":
        return torch.bfloat16 if has_bfloat16 else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still allocate there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [f for f in (_meminfo_available(), _cgroup_available()) if f is not None]
    return min(free, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _cgroup_available() -> int | None:
    """What a container's limit leaves; the page cache is reclaimable."""
    try:
        most, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        return int(most) - int(used) + int(cached[cached.index("inactive_file") + 1])
    except (OSError, ValueError):
        return None
