"""What sessions hold of a GPU's memory, beside PyTorch's allocator; each has an arena of its own."""

import torch

from lightning_ort._memory import resident_bytes

_before: dict[int, int] = {}  # bytes in use when the first session of a GPU was built, without those of torch


def note_first_session(device: torch.device) -> None:
    """Note what is in use now, before a session is built."""
    if device.type == "cuda" and torch.cuda.is_initialized() and (index := device.index or 0) not in _before:
        _before[index] = _without_torch(index)


def describe(device: torch.device) -> str:
    """Return what has come on top since then; empty where no session was built."""
    if device.type != "cuda" or (before := _before.get(device.index or 0)) is None:
        return ""
    megabytes = max(0, _without_torch(device.index or 0) - before) >> 20
    return f"{megabytes} MB of GPU {device.index or 0}, beside PyTorch's, if no other program uses it"


def _without_torch(index: int) -> int:
    return (resident_bytes(torch.device("cuda", index)) or 0) - torch.cuda.memory_reserved(index)
