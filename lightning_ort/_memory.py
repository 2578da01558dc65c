"""How much memory this process uses, and how much is free: of the machine, of a container, of a GPU."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_SHARED_POOL = (0, 0)  # torch's id of the pool that all use who have none of their own


def free_bytes(device: "torch.device | None" = None) -> int | None:
    """Return the bytes that are free; ``None`` if that is not known.

    Args:
        device: Of a GPU's memory, if it is one, with what torch's allocator keeps there for the next tensors, but not
            with what recorded graphs keep for themselves.

    """
    if device is not None and device.type == "cuda":
        import torch

        index = torch.cuda.current_device() if device.index is None else device.index
        own = [one for one in torch.cuda.memory_snapshot() if one["device"] == index]
        shared = [one for one in own if tuple(one.get("segment_pool_id", _SHARED_POOL)) == _SHARED_POOL]
        cached = sum(one["total_size"] - one["active_size"] for one in shared)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return None
    if (limit := _cgroup_bytes("memory.max")) is not None and (used := _cgroup_bytes("memory.current")) is not None:
        free = min(free, limit - used)
    return free


def resident_bytes(device: "torch.device | None" = None) -> int | None:
    """Return the bytes that this process uses; ``None`` if that is not known.

    Args:
        device: Of a GPU's memory, if it is one.

    """
    if device is not None and device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def peak_bytes(device: "torch.device | None" = None) -> int | None:
    """Return the most bytes that this process has used so far; ``None`` if that is not known.

    Args:
        device: Of a GPU's memory, as torch's allocator reserved them, if it is one: what recorded graphs keep counts.

    """
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cgroup_bytes(name: str) -> int | None:
    """Return a figure of the container that the process runs in, if that has one."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # none, or "max"
        return None
