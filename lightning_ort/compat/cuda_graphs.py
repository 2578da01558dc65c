"""What of CUDA graphs is not public."""

from contextlib import suppress
from typing import Any

import torch


def end_failed_capture(device: int, pool: Any) -> None:
    """Let a GPU's generator and allocator go on after a capture that could not be ended.

    Both would wait for its end: the one refuses to draw, the other to begin another capture (torch 2.11 and 2.13).
    """
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # it was ended
        torch._C._cuda_endAllocateToPool(device, pool)


def free_workspaces() -> None:
    """Free the memory that cuBLAS keeps for itself: one that runs on takes new memory (torch 2.11 and 2.13).

    A recording that has used what was there before would go on using it when somebody else frees it, as torch does
    before it records graphs of its own. What is taken while one is recorded is a part of its memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
