"""Records what a function launches on a GPU, to launch it again at once: :class:`Recorder`."""

import functools
from collections.abc import Callable

import torch

from lightning_ort.compat.cuda_graphs import end_failed_capture, free_workspaces


class Recorder:
    """Makes recordings, which are CUDA graphs, on a stream of its own, each with memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.failed = False  # to record; then the others draw no numbers of torch's generator any more

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

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
        pool = torch.cuda.graph_pool_handle()
        free_workspaces()
        try:
            # other threads, as those that pin memory, may go on
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            torch.cuda.set_stream(now)
            end_failed_capture(now.device_index, pool)
            self.failed = True
            raise
        return graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records on a device, if that can."""
    return Recorder(device) if device.type == "cuda" and torch.version.cuda is not None else None
