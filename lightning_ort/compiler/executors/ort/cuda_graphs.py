"""Regions recorded as CUDA graphs: all kernels are launched at once, instead of one by one.

onnxruntime's ``enable_cuda_graph`` records the kernels of a run and replays them on the same addresses. It needs a
stream of its own, because torch's default stream cannot be recorded. So inputs are copied to fixed addresses and
outputs from them. That pays if launching takes longer than computing, which is found by timing.

onnxruntime records each graph for the thread that runs it, such as autograd's in a backward pass, and in the mode in
which a CUDA call of any other thread that could synchronize breaks the recording (``cudaStreamCaptureModeGlobal``, 1.19
to 1.31). So each thread makes recordings of its own, and none is made while a DataLoader pins memory in another thread:
what is recorded is replayed, and what is not runs kernel by kernel.

Source: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from packaging.version import Version
from torch import nn

from lightning_ort.compat.onnxruntime import installed_version
from lightning_ort.compat.torch import pins_memory
from lightning_ort.compiler.executors.ort.binding import BoundSession, run_options
from lightning_ort.compiler.nodes import is_static
from lightning_ort.compiler.regions import Region

if TYPE_CHECKING:
    import onnxruntime


_FIRST = Version("1.20")
_UNRECORDED = -1  # the number with which onnxruntime neither records nor replays


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
    version = installed_version()
    if version < _FIRST:
        return f"onnxruntime {version} waits for the GPU after each replay, {_FIRST} and later ones do not"
    if pins_memory():
        return "a DataLoader pins memory in another thread, which breaks a recording; DataLoader(pin_memory=False)"
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

    def __init__(
        self,
        region: Region,
        session: "onnxruntime.InferenceSession",
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(region, session, device, stream=stream)
        outputs = self._allocate(self._static_sizes)
        self._allocate = lambda sizes: list(outputs)  # the same in each run
        self._device = device
        self._stream = stream
        self._lock = threading.Lock()  # threads share the places
        self._thread = 0
        self._plain_options = run_options(stream, _UNRECORDED)
        self._places: list[torch.Tensor | None] = [None] * len(region.inputs)
        # of the current recording; a parameter that moves is still the same object
        self._addresses: list[int] = []
        self._moved: set[int] = set()
        self._recordings = 0

    def __call__(self, *args: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the region and return new outputs."""
        with self._lock, self._in_order():
            places = [self._fill(index, arg) for index, arg in enumerate(args)]
            addresses, thread = [place.data_ptr() for place in places], threading.get_ident()
            if addresses != self._addresses or thread != self._thread:
                self._addresses, self._thread = addresses, thread
                if pins_memory():
                    self.run_options, self._thread = self._plain_options, 0  # recorded when that is possible
                else:
                    self._recordings += 1
                    self.run_options = run_options(self._stream, self._recordings)
            outputs = super().__call__(*places)
            return [output.clone() for output in outputs]

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Let copies to the places wait for the last replay, and the next replay for copies of the outputs."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        yield
        self._stream.wait_stream(current)

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
