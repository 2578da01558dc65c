"""The hot path: a session bound to torch's memory, which copies no tensors.

A call compares addresses, binds the tensors that moved, allocates the outputs and runs the session. Parameters, and
most of the time activations, keep their addresses, so that in steady state little is bound again.
"""

import functools
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lightning_ort.compat.onnxruntime import memory_of, new_binding, run_function
from lightning_ort.compat.torch import is_zero_tensor, storage_address
from lightning_ort.compat.torch_graphs import empty_strided_cpu, storage_use_count
from lightning_ort.compiler.executors.ort.dtypes import dtype_of, element_type, input_dtype
from lightning_ort.compiler.executors.ort.providers import provider_of
from lightning_ort.compiler.executors.ort.streams import OrderedRun, WaitingRun
from lightning_ort.compiler.graphs.nodes import GRADIENTS_FROM, base_of, in_order, is_static, memory_order
from lightning_ort.compiler.machine import openmp
from lightning_ort.compiler.regions.region import Region, output_shapes_fn

if TYPE_CHECKING:
    import onnxruntime

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides and dtype of a tensor

# to bind a larger one takes little time beside computing it, and its memory is better given back
MAX_BYTES = 65_536
MAX_BYTES_IN_ALL = 4 * 2**20  # of a set

_ADDRESS: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_DATA: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("data")


def kept_outputs_of(region: Region) -> frozenset[int]:
    """Return which outputs of a region on the CPU are small results of a step as one graph."""
    if storage_use_count is None or not all(map(is_static, region.outputs)):
        return frozenset()
    output = region.outputs[0].graph.output_node() if region.outputs else None
    if output is None or GRADIENTS_FROM not in output.meta:
        return frozenset()
    results = {base_of(node) for node in output.all_input_nodes}
    values = {index: node.meta["val"] for index, node in enumerate(region.outputs) if node in results}
    kept, in_all = [], 0
    for size, index in sorted((val.numel() * val.element_size(), index) for index, val in values.items()):
        in_all += size
        if 0 < size <= MAX_BYTES and in_all <= MAX_BYTES_IN_ALL:
            kept.append(index)
    return frozenset(kept)


class KeptOutputs:
    """Allocates outputs of a session, those in ``kept``, small results of a step as one graph, in memory that stays.

    A session is bound to the addresses of its outputs, which takes three times as long as to allocate them, and four
    times as long as a small kernel. A gradient lives until the next step but one, so its memory moves from step to
    step. Here it stays, in two sets that take turns: the Trainer runs a step before it drops the last one's gradients.
    """

    def __init__(self, specs: Iterable[Spec], kept: frozenset[int]) -> None:
        pairs = list(enumerate(specs))
        self._kept = [spec for index, spec in pairs if index in kept]
        self._others = [(index, spec) for index, spec in pairs if index not in kept]
        self._tensors: list[Any] = [None] * len(self._kept)  # that nobody else gets
        self._storages: list[Any] = [None] * len(self._kept)
        self._addresses = [0] * len(self._kept)
        self._users: tuple[list[int], ...] = ()  # as long as nobody else refers to the memory

    def allocate(self) -> list[torch.Tensor]:
        """Return a new tensor for each output; the memory of some was used before, if nobody refers to it any more."""
        if not self._users or self._see() != self._users:
            self._renew()
        # another tensor each time: what the last user did to sizes, hooks or attributes of theirs has no effect
        outputs = [*map(_DATA, self._tensors)]
        for index, spec in self._others:
            outputs.insert(index, empty_strided_cpu(*spec))
        return outputs

    def _see(self) -> tuple[list[int], ...]:
        """How many tensors, and how many storages, refer to the memory, and where it is, which changes if shared."""
        return (
            [*map(storage_use_count, self._addresses)],  # type: ignore[arg-type]
            [*map(sys.getrefcount, self._storages)],
            [*map(_ADDRESS, self._tensors)],
        )

    def _renew(self) -> None:
        """Take other memory where somebody refers to it."""
        taken: Iterable[int] = range(len(self._kept))
        if self._users:
            rows = zip(zip(*self._see(), strict=True), zip(*self._users, strict=True), strict=True)
            taken = [index for index, (now, before) in enumerate(rows) if now != before]
        for index in taken:
            self._tensors[index] = empty_strided_cpu(*self._kept[index])
            self._storages[index] = self._tensors[index].untyped_storage()
            self._addresses[index] = storage_address(self._storages[index])
        self._users = self._see()


# onnxruntime rejects null pointers, which are the addresses of torch's empty tensors
_EMPTY = torch.zeros(1)
_IS_CONTIGUOUS: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_IS_NEGATIVE: Callable[[torch.Tensor], bool] = torch.Tensor.is_neg
_SHAPE = operator.attrgetter("shape")


class _Bindings(threading.local):
    """A session's bindings, of each thread: during a run other threads continue, and bind their own tensors.

    There are two, which take turns, if outputs have memory that stays.
    """

    def __init__(
        self,
        session: "onnxruntime.InferenceSession",
        counts: tuple[int, int],
        numbers: dict[int, torch.dtype],
        make_outputs: Callable[[], KeptOutputs] | None,
    ) -> None:
        parts = []
        for _ in range(1 if make_outputs is None else 2):
            bound: list[list[Any]] = [[None] * count for count in counts]  # of inputs and of outputs
            tensors = {index: torch.zeros((), dtype=dtype) for index, dtype in numbers.items()}
            parts.append((new_binding(session), *bound, tensors, None if make_outputs is None else make_outputs()))
        # one attribute, because each access to a thread-local one takes time
        self.turns = itertools.cycle(parts)


class BoundSession:
    """A session of a region with its inputs and outputs bound to torch's memory; called like the region's module.

    With ``pause_openmp`` it ends torch's OpenMP threads before each run. ``stream`` is that of a session of the
    CUDA provider.
    Raises ``RegionRejected`` if the shape of an output is not known before the run.
    """

    def __init__(
        self,
        region: Region,
        session: "onnxruntime.InferenceSession",
        device: torch.device,
        pause_openmp: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        values = [node.meta["val"] for node in region.inputs]
        is_number = [not isinstance(value, torch.Tensor) for value in values]
        numbers = {index: dtype_of(node) for index, node in enumerate(region.inputs) if is_number[index]}
        self.session = session
        self._run = run_function(session)
        if stream is not None:
            self._run = OrderedRun(self._run, device, stream)
        elif device.type == "cuda":
            self._run = WaitingRun(self._run, device)
        self._pause_openmp = pause_openmp
        self._memory, host = memory_of(device), memory_of(torch.device("cpu"))
        # onnxruntime drops inputs that no node reads
        used = {value.name for value in session.get_inputs()}
        self._inputs = []
        # sizes are in host memory, and so are the CPU scalars of a graph on an accelerator
        in_host = [number or value.device.type == "cpu" for number, value in zip(is_number, values, strict=True)]
        for index, node in enumerate(region.inputs):
            name = f"i{index}" if f"i{index}" in used else None
            self._inputs.append((name, host if in_host[index] else self._memory, element_type(input_dtype(node))))
        # to a provider with other memory onnxruntime copies them when they are bound, not in each run
        reads_host = all(provider_of(name).tensors == "cpu" for name in session.get_providers())
        self._copied = () if reads_host else tuple(itertools.compress(itertools.count(), in_host))
        self._outputs = [(f"o{index}", element_type(dtype_of(node))) for index, node in enumerate(region.outputs)]
        kept = kept_outputs_of(region) if device.type == "cpu" else None
        make_outputs = functools.partial(KeptOutputs, _specs(region.outputs), kept) if kept else None
        self._bindings = _Bindings(session, (len(region.inputs), len(region.outputs)), numbers, make_outputs)
        self._allocate = _allocator(region.outputs, device)
        # outputs that later nodes expect in another memory layout, such as channels_last
        orders = enumerate(memory_order(node.meta["val"]) for node in region.outputs)
        self._restride = [(index, order) for index, order in orders if order != sorted(order)]
        sizes = output_shapes_fn(region)
        self._static_sizes = sizes if isinstance(sizes, tuple) else None
        self._sizes_of = None if isinstance(sizes, tuple) else sizes
        self._input_sizes = [tuple(getattr(value, "shape", ())) for value in values]

    def __call__(self, *args: Any) -> Sequence[torch.Tensor]:
        """Run the region on its inputs, tensors or integers for symbolic sizes, and return new outputs."""
        binding, bound, bound_outputs, numbers, own = next(self._bindings.turns)
        for index in self._copied:
            bound[index] = None
        sizes: Any = self._static_sizes
        fixed, tensors = sizes is not None, args
        if not fixed:
            sizes = self._sizes_of(*args)  # type: ignore[misc]
            tensors = tuple(numbers[i].fill_(arg) if i in numbers else arg for i, arg in enumerate(args))
        addresses = [*map(_ADDRESS, tensors)]
        if 0 in addresses or not all(map(_IS_CONTIGUOUS, tensors)) or any(map(_IS_NEGATIVE, tensors)):
            tensors = tuple(map(_in_memory, tensors))  # which live until the run is over
            addresses = [*map(_ADDRESS, tensors)]
        shapes: Any = self._input_sizes if fixed else [*map(_SHAPE, tensors)]
        places: list[Any] = addresses if fixed else [*zip(addresses, shapes, strict=True)]
        for index in itertools.compress(itertools.count(), map(operator.ne, places, bound)):
            self._bind_input(binding, index, tuple(shapes[index]), addresses[index])
            bound[index] = places[index]
        outputs = self._allocate(sizes) if own is None else own.allocate()
        addresses = [*map(_ADDRESS, outputs)]
        places = addresses if fixed else [*zip(addresses, sizes, strict=True)]
        for index in itertools.compress(itertools.count(), map(operator.ne, places, bound_outputs)):
            name, dtype = self._outputs[index]
            binding.bind_output(name, self._memory, dtype, sizes[index], addresses[index] or _EMPTY.data_ptr())
            bound_outputs[index] = places[index]
        if self._pause_openmp:
            openmp.pause_openmp()
        self._run(binding, None)
        for index, order in self._restride:
            outputs[index] = in_order(outputs[index], order)
        return outputs

    def _bind_input(self, binding: Any, index: int, size: tuple[int, ...], address: int) -> None:
        name, memory, dtype = self._inputs[index]
        if name is not None:
            binding.bind_input(name, memory, dtype, size, address or _EMPTY.data_ptr())


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose memory holds the values.

    Torch negates some tensors when they are read (``x.conj().imag``), and has tensors of zeros without memory
    (tangents of forward-mode derivatives). Raises ``ValueError`` for others without memory, such as wrappers.
    """
    if is_zero_tensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.resolve_neg().contiguous()
    if not tensor.data_ptr() and tensor.numel():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no memory")
    return tensor


def _allocator(outputs: Sequence[fx.Node], device: torch.device) -> Callable[[Any], list[torch.Tensor]]:
    """Return a function from sizes to new contiguous tensors."""
    # a quarter of the time of torch.empty, which matters for small regions
    if device.type == "cpu" and all(map(is_static, outputs)):
        specs = _specs(outputs)
        return lambda sizes: [empty_strided_cpu(*spec) for spec in specs]
    dtypes = [node.meta["val"].dtype for node in outputs]
    return lambda sizes: [
        torch.empty(size, dtype=dtype, device=device) for size, dtype in zip(sizes, dtypes, strict=True)
    ]


def _specs(outputs: Sequence[fx.Node]) -> list[Spec]:
    vals = [node.meta["val"] for node in outputs]
    strides = [torch.empty(val.shape, device="meta").stride() for val in vals]
    return list(zip((tuple(val.shape) for val in vals), strides, (val.dtype for val in vals), strict=True))
