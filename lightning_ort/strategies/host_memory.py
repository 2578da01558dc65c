"""Keep freed host memory in the process for the next step: :class:`RetainedMemory`.

On a CPU torch takes the memory of activations from malloc. glibc maps large blocks when they are requested and unmaps
them when they are freed, so that each training step touches all its pages for the first time, with a page fault each.
It can be told to keep them; then there are none from the second step on.
"""

import os
from typing import Literal, get_args

import torch

from lightning_ort._arguments import check_choice
from lightning_ort.compiler.machine import malloc

HostMemory = Literal["retain", "default"]

_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


class RetainedMemory:
    """Keeps freed memory in the process while a run on the CPU lasts; with ``"default"`` malloc does as it likes."""

    def __init__(self, choice: HostMemory) -> None:
        check_choice("host_memory", choice, get_args(HostMemory))
        self.choice = choice

    def setup(self, device: torch.device) -> str:
        """Retain memory if that is chosen and possible, and return what the report says about it."""
        if self.choice == "default" or device.type != "cpu":
            return "default"
        if (reason := unsupported_reason()) is not None:
            return f"default: {reason}"
        malloc.retained.begin(self)
        return "retained"

    def teardown(self) -> None:
        """Undo :meth:`setup`; a second call does nothing."""
        malloc.retained.end(self)


def unsupported_reason() -> str | None:
    """Return why malloc cannot, or should not, be told to keep memory; ``None`` if it can."""
    if malloc.glibc() is None:
        return "the malloc in use is not glibc's"
    chosen = [name for name in _VARIABLES if name in os.environ]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        chosen.append("GLIBC_TUNABLES")
    return f"malloc is configured by {', '.join(chosen)}" if chosen else None
