"""Keep freed host memory in the process for the next step: :class:`RetainedMemory`.

On a CPU torch takes the memory of activations from malloc. glibc maps large blocks when they are requested and unmaps
them when they are freed, so that each training step touches all its pages for the first time, with a page fault each.
``mallopt(3)`` can tell it to keep them (no mapped blocks, no trimming); then there are none from the second step on.
"""

import os
import threading
from typing import Any, Literal, get_args

import torch

from lightning_ort.compiler import malloc

HostMemory = Literal["retain", "default"]

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_RETAIN = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 64 << 20}
# glibc adapts its thresholds until one of them is set: these are the highest values that it adapts them to
_DEFAULT = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 64 << 20, _M_TOP_PAD: 128 << 10, _M_MMAP_THRESHOLD: 32 << 20}
_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")

_users = 0  # runs in this process that want memory to be retained
_lock = threading.Lock()  # they may be in several threads


class RetainedMemory:
    """Keeps freed memory in the process while a run on the CPU lasts; with ``"default"`` malloc does as it likes."""

    def __init__(self, choice: HostMemory) -> None:
        if choice not in get_args(HostMemory):
            raise ValueError(f"host_memory={choice!r}: choose 'retain' or 'default'.")
        self.choice = choice
        self.is_retained = False

    def setup(self, device: torch.device) -> str:
        """Retain memory if that is chosen and possible, and return what the report says about it."""
        if self.choice == "default" or device.type != "cpu":
            return "default"
        if (reason := unsupported_reason()) is not None:
            return f"default: {reason}"
        if not self.is_retained:
            self.is_retained = True
            retain()
        return "retained"

    def teardown(self) -> None:
        """Undo :meth:`setup`; a second call does nothing."""
        if self.is_retained:
            self.is_retained = False
            release()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "is_retained": False}  # a copy has requested nothing yet


def unsupported_reason() -> str | None:
    """Return why malloc cannot, or should not, be told to keep memory; ``None`` if it can."""
    if malloc.glibc() is None:
        return "the malloc in use is not glibc's"
    chosen = [name for name in _VARIABLES if name in os.environ]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        chosen.append("GLIBC_TUNABLES")
    return f"malloc is configured by {', '.join(chosen)}" if chosen else None


def retain() -> None:
    """Keep freed memory in the process until :func:`release` has been called as often as this."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _set(_RETAIN)


def release() -> None:
    """Undo one :func:`retain`; the last call returns the memory to the system."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _set(_DEFAULT)
            malloc.trim()


def _set(options: dict[int, int]) -> None:
    library = malloc.glibc()
    assert library is not None
    for option, value in options.items():
        library.mallopt(option, value)
