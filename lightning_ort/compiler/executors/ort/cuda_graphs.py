"""A region as a CUDA graph: all its kernels are launched at once, where a step of many small ones waits for launches.

onnxruntime's ``enable_cuda_graph`` records the kernels of a run and replays them: on the same addresses, and on a
stream of its own, since torch's default stream cannot be recorded. So inputs are copied to addresses that stay, and
outputs from them, which pays where launching takes longer than computing; the region's timing finds out.

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
    """Return the stream on which the graphs of a device are recorded and replayed."""
    return torch.cuda.Stream(device)


def why_none(device: torch.device) -> str | None:
    """Return why no region of a graph on a device is recorded, or ``None``."""
    if device.type != "cuda":
        return f"the tensors are on {device}"
    if torch.are_deterministic_algorithms_enabled():
        return "timing decides, and deterministic mode has none"
    return None


def can_record(region: Region) -> bool:
    """Whether a region's tensors are all on a GPU, and of sizes that do not vary."""
    nodes = (*region.inputs, *region.outputs)
    return all(is_static(node) and getattr(node.meta["val"], "is_cuda", False) for node in nodes)


class RecordedSession:
    """A session whose kernels are recorded once and replayed; called like the region's module.

    Parameters are read where they are, since they stay there; one that moves all the same is copied from then on.

    Args:
        region: A region that :func:`can_record` is true of.
        session: Its session, made to record on :func:`stream_of` its device.
        device: Where the region's tensors are.

    """

    def __init__(self, region: Region, session: "onnxruntime.InferenceSession", device: torch.device) -> None:
        self._session = BoundSession(region, session, device)
        self._session.keep_outputs()
        self._device = device
        self._places: list[torch.Tensor | None] = [None] * len(region.inputs)
        # of the recording in use; a parameter is the same object wherever it moves
        self._addresses: list[int] = []
        self._moved: set[int] = set()
        self._recordings = 0

    def __call__(self, *args: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the region.

        Args:
            *args: The region's inputs.

        Returns:
            The region's outputs, newly allocated.

        """
        places = [self._fill(index, arg) for index, arg in enumerate(args)]
        addresses = [place.data_ptr() for place in places]
        if addresses != self._addresses:
            self._addresses = addresses
            self._recordings += 1
            self._session.run_options = run_options(self._device, self._recordings)
        if self._device.type != "cuda":
            outputs = self._session(*places)
        else:
            ours, theirs = stream_of(self._device), torch.cuda.current_stream(self._device)
            ours.wait_stream(theirs)
            with torch.cuda.stream(ours):
                outputs = self._session(*places)
            theirs.wait_stream(ours)
        return [output.clone() for output in outputs]

    def _fill(self, index: int, arg: torch.Tensor) -> torch.Tensor:
        """Return the tensor that stays for an input, with the input's content."""
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
