"""Regions recorded as CUDA graphs: all kernels are launched at once, instead of one by one.

onnxruntime's ``enable_cuda_graph`` records the kernels of a run and replays them on the same addresses. It needs a
stream of its own, because torch's default stream cannot be recorded. So inputs are copied to fixed addresses and
outputs from them. That pays if launching takes longer than computing, which is found by timing.

Source: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_ort.compiler.executors.ort.binding import BoundSession, run_options
from lightning_ort.compiler.nodes import is_static
from lightning_ort.compiler.regions import Region

if TYPE_CHECKING:
    import onnxruntime


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which the CUDA graphs of a device are recorded and replayed."""
    return torch.cuda.Stream(device)


def unsupported_reason(device: torch.device) -> str | None:
    """Return why no region on a device is recorded, or ``None``."""
    if device.type != "cuda":
        return f"the tensors are on {device}"
    if torch.are_deterministic_algorithms_enabled():
        return "it is decided by timing, and deterministic mode times nothing"
    return None


def can_record(region: Region) -> bool:
    """Return whether all tensors of a region are on a GPU and of static shape."""
    nodes = (*region.inputs, *region.outputs)
    return all(is_static(node) and getattr(node.meta["val"], "is_cuda", False) for node in nodes)


class RecordedSession(BoundSession):
    """A session whose kernels are recorded once and replayed; called like the region's module.

    The session has to be built to record on :func:`stream_of` the device, and :func:`can_record` to be true of the
    region. Parameters are read in place, because they rarely move; a parameter that does move is copied from then on.
    """

    def __init__(self, region: Region, session: "onnxruntime.InferenceSession", device: torch.device) -> None:
        super().__init__(region, session, device)
        outputs = self._allocate(self._static_sizes)
        self._allocate = lambda sizes: list(outputs)  # the same in each run
        self._device = device
        self._places: list[torch.Tensor | None] = [None] * len(region.inputs)
        # of the current recording; a parameter that moves is still the same object
        self._addresses: list[int] = []
        self._moved: set[int] = set()
        self._recordings = 0

    def __call__(self, *args: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the region and return new outputs."""
        places = [self._fill(index, arg) for index, arg in enumerate(args)]
        addresses = [place.data_ptr() for place in places]
        if addresses != self._addresses:
            self._addresses = addresses
            self._recordings += 1
            self.run_options = run_options(self._device, self._recordings)
        if self._device.type != "cuda":
            outputs = super().__call__(*places)
        else:
            ours, theirs = stream_of(self._device), torch.cuda.current_stream(self._device)
            ours.wait_stream(theirs)
            with torch.cuda.stream(ours):
                outputs = super().__call__(*places)
            theirs.wait_stream(ours)
        return [output.clone() for output in outputs]

    def _fill(self, index: int, arg: torch.Tensor) -> torch.Tensor:
        """Copy an input to the place where it is read in each run; return that place."""
        place = self._places[index]
        if isinstance(place, nn.Parameter) and self._addresses[index] != arg.data_ptr():
            self._moved.add(index)
            place = None
        if isinstance(arg, nn.Parameter) and arg.is_contiguous() and index not in self._moved:
            self._places[index] = arg
            return arg
        if place is None or isinstance(place, nn.Parameter):
            place = self._places[index] = torch.empty_like(arg, memory_format=torch.contiguous_format)
        return place.copy_(arg)
