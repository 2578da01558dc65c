"""Torch's CUDA streams and devices, as onnxruntime has to take them.

A session launches its kernels on the one stream that it was built for, so that they follow torch's own kernels there.
In another stream (``with torch.cuda.stream(s)``) each side has to wait for the other. Only the CUDA provider is given
torch's stream.

Each run ends with a wait for the stream. Without it (``disable_synchronize_execution_providers``) onnxruntime keeps
what kernels such as Concat's have copied to the GPU in host memory until the session is destroyed, and then frees it in
a callback on the stream that may destroy the session's allocator too, which a callback must not: the process is aborted
(1.31, on an H200).
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# `cudaStreamLegacy` in CUDA's driver_types.h: the default stream by name. Its other name, 0, is "none" to onnxruntime
# (1.19 to 1.31), which then makes a stream of its own, for which torch's does not wait
LEGACY_STREAM = 1


def handle_of(stream: torch.cuda.Stream) -> int:
    """Return the number by which onnxruntime takes a stream of torch."""
    return stream.cuda_stream or LEGACY_STREAM


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current one, which onnxruntime's CUDA provider would leave so."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class OrderedRun:
    """Runs a session so that torch's earlier kernels are done when it reads, and it is when later ones read."""

    def __init__(self, run: Callable[..., None], device: torch.device, stream: torch.cuda.Stream) -> None:
        self._run = run
        self._device = device
        self._stream = stream

    def __call__(self, *args: Any) -> None:
        """Run the session."""
        with on_device(self._device):
            current = torch.cuda.current_stream(self._device)
            if current == self._stream:
                self._try(*args)
                return
            self._stream.wait_stream(current)
            try:
                self._try(*args)
            finally:
                # torch's allocator may give the tensors' memory to others on this stream from here on, and no earlier
                current.wait_stream(self._stream)

    def _try(self, *args: Any) -> None:
        try:
            self._run(*args)
        except Exception:
            # it has not waited, so the session must never be destroyed, nor at the end of the interpreter
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._run))
            raise


class WaitingRun:
    """Runs a session whose kernels are on streams of its own, as those of other providers than CUDA's are.

    It waits for torch's stream before; at the end of a run onnxruntime waits for its own.
    """

    def __init__(self, run: Callable[..., None], device: torch.device) -> None:
        self._run = run
        self._device = device

    def __call__(self, *args: Any) -> None:
        """Run the session."""
        with on_device(self._device):
            torch.cuda.current_stream(self._device).synchronize()
            self._run(*args)
