"""How much memory this process uses, and how much is free: of the machine, of a container, of a GPU."""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_SHARED_POOL = (0, 0)  # torch's id of the pool that all use who have none of their own


def free_bytes(device: "torch.device | None" = None) -> int | None:
    """Return the bytes that are free, of a GPU's memory if ``device`` is one; ``None`` if that is not known.

    There, what torch's allocator keeps for the next tensors counts, but not what recorded graphs keep for themselves.
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
    return int(min([free, *map(_free_in, _control_groups())]))


def resident_bytes(device: "torch.device | None" = None) -> int | None:
    """Return the bytes that this process uses, on a GPU if ``device`` is one; ``None`` if that is not known."""
    if device is not None and device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def peak_bytes(device: "torch.device | None" = None) -> int | None:
    """Return the most bytes that this process, or torch on a GPU, has used so far; ``None`` if that is not known."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _control_groups() -> list[Path]:
    """Return the folders of the control groups that limit this process's memory: its own, and those around it."""
    found = []
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for _, _, _, root, folder, *rest in mounts:
                kind, _, options = rest[rest.index("-") + 1 :]
                v1 = kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(",")
                if v1 or (kind == "cgroup2" and not controllers):
                    # a container may see its own group as the root of what is mounted
                    inside = os.path.relpath(path, root) if os.path.commonpath([path, root]) == root else "."
                    own = Path(folder, inside)
                    found += [own, *(one for one in own.parents if one.is_relative_to(folder))]
    except (OSError, ValueError):
        pass
    return found


def _free_in(group: Path) -> float:
    """Return the bytes that a control group leaves, of either version; without a limit it is infinite."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = (int(Path(group, name).read_text(encoding="ascii")) for name in (limit, used))
            figures = dict(line.split() for line in Path(group, "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):  # not this version, or "max"
            continue
        return most - now + int(figures.get(cache, 0))  # files that are kept as long as there is room
    return math.inf
