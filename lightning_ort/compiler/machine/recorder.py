"""Records what a function launches on a GPU, to launch it again at once: :class:`Recorder`."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_ort.compat.cuda_graphs import end_failed_capture


class Recorder:
    """Makes recordings, which are CUDA graphs, on a stream of its own.

    All share one pool of memory: no two run at a time, and what one leaves there is used before the next one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.failed = False  # to record; then the others draw no numbers of torch's generator any more

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @functools.cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def rehearse(self, run: Callable[[], None]) -> None:
        """Run a function where it will be recorded: what is made once, such as handles, must not be in a recording."""
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            run()
        now.wait_stream(self._stream)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what launches all that a function launches, which computes nothing now.

        Torch's generator takes part: each replay draws what the function would. What it allocates belongs to the
        recording. Whatever it raises, or cannot be recorded, is raised.
        """
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # other threads, as those that pin memory, may go on
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            torch.cuda.set_stream(now)
            end_failed_capture(now.device_index, self._pool)
            self.failed = True
            raise
        return graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records on a device, if that can."""
    return Recorder(device) if device.type == "cuda" and torch.version.cuda is not None else None
