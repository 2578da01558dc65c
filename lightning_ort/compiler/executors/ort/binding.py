"""The hot path: a session bound to torch's memory, nothing copied.

A call compares addresses, rebinds what moved, allocates the outputs and runs. Parameters and, most of the time,
activations stay where they are, so in steady state little is rebound.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._prims_common import is_contiguous_or_false

from lightning_ort.compiler import mask_prefetcher as masks
from lightning_ort.compiler import openmp
from lightning_ort.compiler.executors.ort.conversion.graph import dtype_of, element_type, input_dtype
from lightning_ort.compiler.executors.ort.session import RegionRejected
from lightning_ort.compiler.layouts import in_order, memory_order
from lightning_ort.compiler.nodes import is_random, is_static
from lightning_ort.compiler.output_shapes import emptied, output_sizes
from lightning_ort.compiler.regions import Region
from lightning_ort.compiler.report import Reason, ReasonType, RegionReport

if TYPE_CHECKING:
    import onnxruntime

aten = torch.ops.aten

# how far the first run may be from torch under check_against_eager: |difference| <= this x the largest magnitude
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# inductor's allocator: a quarter of the time of torch.empty_strided, which a small region would feel
_empty_strided_cpu = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", None)


# onnxruntime takes no null pointer, which is where torch has a tensor of no elements
_EMPTY = torch.zeros(1)


class _Binding(threading.local):
    """What a session is bound to, for each thread its own: a run lets other threads go on, which bind their tensors.

    Args:
        session: The session.
        dtypes: Of each input; of a number that is no tensor its dtype as one, else ``None``.
        num_outputs: How many outputs there are.

    """

    def __init__(
        self, session: "onnxruntime.InferenceSession", dtypes: Sequence[torch.dtype | None], num_outputs: int
    ) -> None:
        inputs: list[Any] = [None] * len(dtypes)
        outputs: list[Any] = [None] * num_outputs
        numbers = {index: torch.zeros((), dtype=dtype) for index, dtype in enumerate(dtypes) if dtype is not None}
        # in one attribute, since each access takes time
        self.parts = session.io_binding()._iobinding, inputs, outputs, numbers


class BoundSession:
    """A session with its inputs and outputs bound to torch's memory; called like the region's module.

    Args:
        region: The region that the session's model was made of.
        session: The session.
        device: Where the region's tensors are.
        rest: Let torch's threads rest while the session computes with its own.

    Attributes:
        run_options: Options of its runs.

    Raises:
        RegionRejected: If an output's shape cannot be known before the run.

    """

    def __init__(
        self, region: Region, session: "onnxruntime.InferenceSession", device: torch.device, *, rest: bool = False
    ) -> None:
        from onnxruntime.capi.onnxruntime_pybind11_state import OrtDevice

        self.session = session
        self._rest = rest
        host = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
        is_tensor = [isinstance(node.meta["val"], torch.Tensor) for node in region.inputs]
        dtypes = [None if tensor else dtype_of(node) for node, tensor in zip(region.inputs, is_tensor, strict=True)]
        self._bound = _Binding(session, dtypes, len(region.outputs))
        self.run_options = run_options(device)
        self._place = host
        if device.type == "cuda":
            self._place = OrtDevice(OrtDevice.cuda(), OrtDevice.default_memory(), device.index or 0)
        # onnxruntime leaves out inputs that no node reads
        used = {value.name for value in session.get_inputs()}
        self._inputs = [
            # sizes, and scalars that take part in a graph on an accelerator, are on the CPU
            (name if name in used else None, host if _on_host(node) else self._place, element_type(input_dtype(node)))
            for node, name in ((node, f"i{index}") for index, node in enumerate(region.inputs))
        ]
        self._outputs = [(f"o{index}", element_type(dtype_of(node))) for index, node in enumerate(region.outputs)]
        self._allocate = _allocator(region.outputs, device)
        self._restride = _non_contiguous(region.outputs)
        sizes = output_sizes(region)
        self._static_sizes = sizes if isinstance(sizes, tuple) else None
        self._input_sizes = [tuple(getattr(node.meta["val"], "shape", ())) for node in region.inputs]
        self._sizes_of = None if isinstance(sizes, tuple) else sizes

    def __call__(self, *args: Any) -> Sequence[torch.Tensor]:
        """Run the region.

        Args:
            *args: The region's inputs: tensors, and integers for symbolic sizes.

        Returns:
            The region's outputs, newly allocated.

        """
        kept: Any = None  # what has to live until the run is over
        binding, bound, bound_outputs, numbers = self._bound.parts
        if self._static_sizes is not None:
            sizes = self._static_sizes
            for index, tensor in enumerate(args):
                if not tensor.is_contiguous() or (type(tensor) is not nn.Parameter and tensor.is_neg()):
                    kept = (kept, tensor := _in_memory(tensor))
                address = tensor.data_ptr()
                if address != bound[index]:
                    if not address and tensor.numel():
                        kept = (kept, tensor := _in_memory(tensor))
                        address = tensor.data_ptr()
                    self._bind_input(binding, index, self._input_sizes[index], address)
                    bound[index] = address
        else:
            sizes = self._sizes_of(*args)  # type: ignore[misc]
            for index, value in enumerate(args):
                tensor = value
                if index in numbers:
                    tensor = numbers[index].fill_(value)
                elif not tensor.is_contiguous() or tensor.is_neg():
                    kept = (kept, tensor := _in_memory(tensor))
                address = tensor.data_ptr()
                if not address and tensor.numel():
                    kept = (kept, tensor := _in_memory(tensor))
                    address = tensor.data_ptr()
                where = (address, tensor.shape)
                if where != bound[index]:
                    self._bind_input(binding, index, tuple(tensor.shape), address)
                    bound[index] = where
        outputs = self._allocate(sizes)
        for index, tensor in enumerate(outputs):
            size, address = sizes[index], tensor.data_ptr()
            if (address, size) != bound_outputs[index]:
                name, dtype = self._outputs[index]
                binding.bind_output(name, self._place, dtype, size, address or _EMPTY.data_ptr())
                bound_outputs[index] = (address, size)
        if self._rest:
            openmp.rest()
        self.session._sess.run_with_iobinding(binding, self.run_options)
        for index, order in self._restride:
            outputs[index] = in_order(outputs[index], order)
        return outputs

    def keep_outputs(self) -> None:
        """From now on return the same outputs in each run, and overwrite what they held."""
        assert self._static_sizes is not None
        kept = self._allocate(self._static_sizes)
        self._allocate = lambda sizes: list(kept)

    def _bind_input(self, binding: Any, index: int, size: tuple[int, ...], address: int) -> None:
        name, place, dtype = self._inputs[index]
        if name is not None:
            binding.bind_input(name, place, dtype, size, address or _EMPTY.data_ptr())


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as they are read from memory: contiguous, and with nothing left to be done to them.

    Torch negates some tensors (``x.conj().imag``) when they are read, and has others that are known to be zero without
    memory (tangents of forward-mode derivatives).

    Raises:
        ValueError: If its values are in no memory of its own, such as those of a wrapper.

    """
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.resolve_neg().contiguous()
    if not tensor.data_ptr() and tensor.numel():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no memory")
    return tensor


def run_options(device: torch.device, recording: int | None = None) -> "onnxruntime.RunOptions":
    """Return what a session's runs are set to.

    Args:
        device: Where the tensors are.
        recording: Number of the CUDA graph to record or to replay.

    """
    import onnxruntime

    options = onnxruntime.RunOptions()
    if device.type == "cuda":
        # both sides use torch's stream, or one that waits for it: order is kept without waiting for the device
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if recording is not None:
        options.add_run_config_entry("gpu_graph_id", str(recording))
    return options


class TorchRegion:
    """A torch region as the compiled graph calls it.

    Args:
        region: The region.

    """

    def __init__(self, region: Region) -> None:
        # how it appears in the code of the compiled graph
        self.__name__, self.__module__ = region.name, __name__
        self._masks = _draw_together(region.module.graph)
        self._module = region.module

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the region."""
        return self._module.forward(*args) if self._masks is None else self._module.forward(*args, *self._masks())


def _draw_together(graph: fx.Graph) -> masks.Masks | None:
    """Have the masks of a region drawn by our own functions.

    Returns:
        What draws them, if the region has come to take them as inputs after its own; else the region does.

    """
    random = [node for node in graph.nodes if is_random(node)]
    draws = [node for node in random if node.target is aten.bernoulli.p and "generator" not in node.kwargs]
    if not draws:
        return None
    together = len(draws) == len(random) and all(
        node.args[0].target is aten.empty.memory_format and is_static(node) for node in draws
    )
    if not (together and draws[0].meta["val"].device.type == "cpu" and masks.draws_alike()):
        for node in draws:
            node.target = masks.bernoulli
        return None
    kinds = [(tuple(node.meta["val"].shape), node.meta["val"].dtype, float(node.args[1])) for node in draws]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for index, node in enumerate(draws):
            node.replace_all_uses_with(graph.placeholder(f"mask_{index}"))
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return masks.Masks(kinds)


class OrtRegion:
    """An ORT region as the compiled graph calls it: it runs in torch for good once a run has failed.

    Args:
        region: The region.
        session: Its bound session.
        report: Where runs are counted.
        on_failure: Called with the reason when a run fails; may raise to refuse the fallback.
        check: Compare the first run with torch.

    """

    def __init__(
        self,
        region: Region,
        session: Callable[..., Sequence[torch.Tensor]],
        report: RegionReport,
        on_failure: Callable[[Reason], None],
        check: bool,
    ) -> None:
        # how it appears in the code of the compiled graph
        self.__name__, self.__module__ = region.name, __name__
        self._module = region.module
        self._run: Callable[..., Sequence[torch.Tensor]] | None = self._checked(session) if check else session
        self._emptied = emptied(region)
        self.report = report
        self._on_failure = on_failure

    def __call__(self, *args: Any) -> Sequence[torch.Tensor]:
        """Run the region."""
        if self._run is None or (self._emptied is not None and self._emptied(*args)):
            return self._module.forward(*args)
        try:
            outputs = self._run(*args)
        except RegionRejected as error:
            reason = error.reason
        except Exception as error:  # onnxruntime raises classes of its own that derive from Exception alone
            reason = RegionRejected(ReasonType.RUN_FAILED, error).reason
        else:
            self.report.runs += 1
            return outputs
        # a region has no side effects, so torch can do it again; where torch raises too, as at a label that is out of
        # range, the error is the user's, and the region stays as it is
        outputs = self._module.forward(*args)
        self._run = None
        self.report.executor, self.report.reason = "torch", reason
        self._on_failure(reason)
        return outputs

    def rename(self, name: str) -> None:
        """Take another name in the report and in the code of the compiled graph."""
        self.__name__ = self.report.name = name

    def _checked(self, session: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
        def run(*args: Any) -> Sequence[torch.Tensor]:
            outputs = session(*args)
            for index, (got, expected) in enumerate(zip(outputs, self._module.forward(*args), strict=True)):
                if (difference := mismatch(got, expected)) is not None:
                    raise RegionRejected(ReasonType.MISMATCH, f"output {index}: {difference}")
            self._run = session
            return outputs

        return run


def mismatch(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """How a result differs from torch's beyond :data:`TOLERANCE`, or ``None``."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point:
        wrong = int((got != expected).sum())
        return f"{wrong} of {expected.numel()} elements differ" if wrong else None
    finite = expected.isfinite()
    if not torch.equal(torch.nan_to_num(got[~finite]), torch.nan_to_num(expected[~finite])):
        return "infinities or NaN in other places"
    if not bool(finite.any()):
        return None
    reference = expected[finite].double()
    difference = float((got[finite].double() - reference).abs().max())
    allowed = TOLERANCE[expected.dtype] * max(float(reference.abs().max()), 1e-3)
    # written so that a NaN difference fails
    return None if difference <= allowed else f"largest difference {difference:.3g}, allowed {allowed:.3g}"


def _allocator(outputs: Sequence[fx.Node], device: torch.device) -> Callable[[Any], list[torch.Tensor]]:
    """A function from sizes to newly allocated contiguous tensors."""
    dtypes = [node.meta["val"].dtype for node in outputs]
    if device.type == "cpu" and _empty_strided_cpu is not None and all(is_static(node) for node in outputs):
        specs = [
            (tuple(node.meta["val"].shape), _contiguous_strides(node.meta["val"].shape), dtype)
            for node, dtype in zip(outputs, dtypes, strict=True)
        ]
        return lambda sizes: [_empty_strided_cpu(*spec) for spec in specs]
    return lambda sizes: [
        torch.empty(size, dtype=dtype, device=device) for size, dtype in zip(sizes, dtypes, strict=True)
    ]


def _on_host(node: fx.Node) -> bool:
    value = node.meta["val"]
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(strides))


def _non_contiguous(outputs: Sequence[fx.Node]) -> list[tuple[int, list[int]]]:
    """Outputs that later nodes expect in another memory layout, such as channels_last: index, order of dimensions."""
    values = [(index, node.meta["val"]) for index, node in enumerate(outputs)]
    return [(index, memory_order(val)) for index, val in values if not is_contiguous_or_false(val)]
