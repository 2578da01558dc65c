"""From a trained module to an ONNX file that gives the same results: :func:`export_onnx`."""

import inspect
import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

import torch
from rich.filesize import decimal
from torch import Tensor, nn

from lightning_ort._arguments import check_choice, check_number, check_path, check_type, check_writable
from lightning_ort._imports import NAMESPACES, ONNXSCRIPT, __version__, absence
from lightning_ort.compat.onnxruntime import mark_preprocessed
from lightning_ort.compat.torch import tree_map
from lightning_ort.compat.torch_graphs import expression_of
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES
from lightning_ort.compiler.regions.reproducer_script import largest_difference
from lightning_ort.onnx_export.failure import ExportFailed, branch_on_size, explain, line_in
from lightning_ort.onnx_export.session import METADATA_PREFIX, OnnxSession
from lightning_ort.onnx_export.signature import Quantize, Structure, bind_sample, mapped, named_inputs, named_outputs

if TYPE_CHECKING:
    import onnx_ir as ir

TORCH_DTYPES = {data_type: dtype for dtype, data_type in DTYPES.items()}
BATCH = "batch"  # what the size that may change is called in the model
# Pairs that onnxruntime (1.19) makes one node of that gives other results: a Slice at negative bounds, which count from
# the end (its GatherToSliceFusion), and a pool with a padding of its own, which is not counted as zeros (Pad_Fusion).
_MERGED_WRONGLY = {"Range": ("Gather",), "Pad": ("AveragePool", "MaxPool")}


@dataclass(frozen=True)
class Exported:
    """What was written; as a string, one line about it."""

    path: Path
    inputs: tuple[str, ...]  # name, dtype and shape of each
    outputs: tuple[str, ...]
    bytes: int  # with the weights
    error: float  # largest difference to the module's results, see `largest_difference`
    quantize: Quantize | None = None
    quantized_error: float | None = None

    def __str__(self) -> str:
        text = f"{self.path}: {', '.join(self.inputs)} -> {', '.join(self.outputs)}, {decimal(self.bytes)}"
        text += f", differs from torch by {self.error:.2g}"
        return text if self.quantize is None else f"{text}, as {self.quantize} by {self.quantized_error:.2g}"


def check_settings(path: str | Path, dynamic_batch: bool, tolerance: float, quantize: str | None) -> None:
    """Raise what :func:`export_onnx` would raise for its settings, before anything has been trained."""
    check_number("tolerance", tolerance)
    check_choice("dynamic_batch", dynamic_batch, (True, False))
    check_choice("quantize", quantize, (*get_args(Quantize), None))
    check_writable("path", check_path("path", path), is_folder=False)
    if not ONNXSCRIPT:
        install = "pip install 'lightning-ort[export]'"
        raise ModuleNotFoundError(f"Export to ONNX needs onnxscript: {install}. {absence(ONNXSCRIPT)}")


def export_onnx(
    module: nn.Module,
    path: str | Path,
    sample: Any = None,
    *,
    dynamic_batch: bool = True,
    tolerance: float = 1e-4,
    quantize: Quantize | None = None,
) -> Exported:
    """Write a module's ``forward``, in evaluation mode, as an ONNX model.

    The model is run by ONNX Runtime on the sample inputs, and with a dynamic batch on other batches made of the
    sample's rows, and compared with the module. The file gets its name when all is well; until then an older file of
    that name stays. The module is left as it was found. The file holds names, dtypes and shapes of inputs and outputs,
    the module's hyperparameters as JSON, and versions, as metadata under ``lightning_ort.*``.

    Args:
        module: The module, on any device.
        path: The file. A model of more than 2 GB has its weights beside it, in ``<path>.data``.
        sample: Inputs, shape and dtype as in use: a tensor, a tuple of positional arguments or a dict of arguments by
            name. None takes the module's ``example_input_array``.
        dynamic_batch: Let the first size of the first input change, in all inputs that share it.
        tolerance: Largest difference of float outputs, as in :func:`largest_difference`.
        quantize: ``"fp16"`` or ``"int8"``: make the weights smaller, after the comparison. How far the results are then
            from the module's is reported, and only NaN, infinities or another shape are refused.

    Returns:
        What was written.

    Raises:
        ValueError: If there is no sample, no ``forward``, or a setting is not one of the allowed ones.
        TypeError: If inputs or outputs are something else than tensors.
        ModuleNotFoundError: If onnxscript is not installed.
        ExportFailed: If an op or construct cannot be exported, which names the line; or if the results differ.
    """
    check_type("module", module, nn.Module, "a torch.nn.Module")
    check_settings(path, dynamic_batch, tolerance, quantize)
    if quantize is not None and sum(parameter.nbytes for parameter in module.parameters()) >= 2**31:
        raise ValueError(
            f"quantize={quantize!r}: the weights are larger than 2 GB, which protobuf does not support. Pass None."
        )
    bound = bind_sample(module, sample)
    batch = _batch_size(bound) if dynamic_batch else None
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _as_served(module), TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        structure, outputs = named_outputs(_run(module, bound), named_inputs(bound))
        program = _convert(module, bound, list(outputs), batch)
        source_lines = _take_source_lines(program.model)
        _keep_apart(program.model)
        for key, value in _metadata(module, program.model, structure, quantize).items():
            program.model.metadata_props[METADATA_PREFIX + key] = json.dumps(value, default=str)
        file = Path(folder) / "float" / path.name
        file.parent.mkdir()
        program.save(file)
        calls = [bound]
        if batch is not None:  # a size, or the branch for one, may have become part of the model
            calls += [mapped(bound, partial(_rows, batch=batch, count=count)) for count in (1, batch + 1)]
        session, error = _verified(module, file, calls, tolerance, source_lines)
        quantized_error = None
        if quantize is not None:
            file, source = Path(folder) / "quantized" / path.name, file
            file.parent.mkdir()
            _write_quantized(source, file, quantize)
            session, quantized_error = _verified(module, file, calls, sys.float_info.max, source_lines)
        # the weights' file, if there is one, before the model that names it
        written = [part.replace(path.parent / part.name) for part in sorted(file.parent.iterdir(), reverse=True)]
    return Exported(
        path,
        tuple(map(str, session.inputs)),
        tuple(map(str, session.outputs)),
        sum(part.stat().st_size for part in written),
        error,
        quantize,
        quantized_error,
    )


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """After the block each part of a module trains, or is evaluated, as before."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


@contextmanager
def left_alone(module: nn.Module, quiet: Iterable[str]) -> Iterator[None]:
    """Leave a module's modes and buffers as they were, and let these loggers tell of errors alone."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    loggers = [logging.getLogger(name) for name in quiet]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with modes_kept(module):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)


@contextmanager
def _as_served(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and leave nothing of what happens in here."""
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    with (
        # each export would tell that torchvision is not installed, or which initializers stay apart
        left_alone(module, ("torch.onnx._internal.exporter._registration", "onnx_ir")),
        torch.no_grad(),
        torch.random.fork_rng(list(devices)),
        torch.compiler.set_stance("force_eager"),  # torch.export traces what has been compiled as it was
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's own calls to torch
        warnings.filterwarnings("ignore", module=r"torch\.onnx")  # inputs share the name of their batch
        warnings.filterwarnings("ignore", message=r"The tensor attributes self\..*_flat_weights")  # of nn.LSTM
        module.eval()
        yield


def _batch_size(bound: inspect.BoundArguments) -> int:
    sizes = [tensor.shape[0] for tensor in named_inputs(bound).values() if tensor.dim()]
    if not sizes:
        raise ValueError("The sample inputs have no batch dimension: pass dynamic_batch=False.")
    if sizes[0] == 0:
        raise ValueError("The batch of the sample inputs is empty: pass at least one row.")
    return sizes[0]


def _rows(tensor: Tensor, batch: int, count: int) -> Tensor:
    """Return another number of a batch's rows; a tensor that is not one of the batch's stays."""
    if tensor.dim() == 0 or tensor.shape[0] != batch:
        return tensor
    return tensor[torch.arange(count, device=tensor.device) % batch]


def _run(module: nn.Module, bound: inspect.BoundArguments) -> Any:
    try:
        return module(*bound.args, **bound.kwargs)
    except Exception as error:  # whatever the user's code raises
        raise ExportFailed(f"{_called(module, bound)} fails: {explain(error)}") from error


def _called(module: nn.Module, bound: inspect.BoundArguments) -> str:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named_inputs(bound).items())
    return f"{type(module).__name__}.forward({shapes})"


def _convert(
    module: nn.Module, bound: inspect.BoundArguments, outputs: list[str], batch: int | None
) -> "torch.onnx.ONNXProgram":
    def shapes(size: Any) -> dict[str, Any]:
        def dynamic(tensor: Tensor) -> dict[int, Any]:
            return {0: size} if batch is not None and tensor.dim() and tensor.shape[0] == batch else {}

        return {name: tree_map(dynamic, value) for name, value in bound.arguments.items()}

    name = type(module).__name__
    try:
        program = torch.onnx.export(
            module, bound.args, kwargs=bound.kwargs, dynamic_shapes=shapes(BATCH), dynamo=True, verbose=False
        )
    except Exception as error:  # torch raises what the user's code or a converter raised, in several classes
        raise ExportFailed(f"{name} cannot be exported: {explain(error)}") from error
    assert program is not None
    _rename(program.model, list(named_inputs(bound)), outputs)
    if batch is not None and (span := _sizes_it_is_right_for(program, batch)):
        line = branch_on_size(module, bound.args, bound.kwargs, shapes(torch.export.Dim.AUTO))
        raise ExportFailed(
            f"{name}.forward does this only for a batch of {span}. Make it independent of the batch size, or pass "
            f"dynamic_batch=False to export it only for {batch}." + (f"\n  at {line}" if line else "")
        )
    return program


def _rename(model: "ir.Model", inputs: list[str], outputs: list[str]) -> None:
    """Name inputs and outputs, and what has one of these names already otherwise."""
    ends = [*model.graph.inputs, *model.graph.outputs]
    inner = [*model.graph.initializers.values(), *(value for node in model.graph.all_nodes() for value in node.outputs)]
    for value in inner:
        if value.name in {*inputs, *outputs} and not any(value is end for end in ends):
            value.name = f"{value.name}_inner"
    for value, name in zip(ends, [*inputs, *outputs], strict=True):
        value.name = name


def _sizes_it_is_right_for(program: "torch.onnx.ONNXProgram", batch: int) -> str | None:
    """Return for which sizes of the batch a model is made, if not for all: torch.onnx does that without a word."""
    if not any(BATCH in map(str, value.shape or ()) for value in program.model.graph.inputs):
        return str(batch)
    assert program.exported_program is not None
    limits = program.exported_program.range_constraints
    for node in program.exported_program.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta["val"], "shape", ()):
            found = limits.get(expression_of(size)) if isinstance(size, torch.SymInt) else None
            if found is not None and (found.lower > 2 or found.upper < 2**31):
                return f"at least {found.lower}" if found.lower > 2 else f"at most {found.upper}"
    return None


def _take_source_lines(model: "ir.Model") -> dict[str, str]:
    """Return the user's line that each node comes from, and take it out of the model: that may be given away."""
    lines = {}
    for node in model.graph.all_nodes():
        line = line_in(node.metadata_props.pop("pkg.torch.onnx.stack_trace", ""))
        if node.name and line:
            lines[node.name] = line
    return lines


def _keep_apart(model: "ir.Model") -> None:
    """Put a Reshape that changes nothing between two nodes of ``_MERGED_WRONGLY``."""
    import onnx_ir as ir

    for node in list(model.graph.all_nodes()):
        for index, value in enumerate(node.inputs):
            maker = value.producer() if value is not None else None
            if value is None or maker is None or node.op_type not in _MERGED_WRONGLY.get(maker.op_type, ()):
                continue
            assert value.shape is not None
            assert node.graph is not None
            same_sizes = ir.node("Constant", [], {"value": ir.tensor([0] * len(value.shape), ir.DataType.INT64)})
            between = ir.node("Reshape", [value, same_sizes.outputs[0]])
            between.outputs[0].type, between.outputs[0].shape = value.type, value.shape
            node.graph.insert_before(node, [same_sizes, between])
            node.replace_input_with(index, between.outputs[0])


def _verified(
    module: nn.Module, file: Path, calls: list[inspect.BoundArguments], tolerance: float, source_lines: dict[str, str]
) -> tuple[OnnxSession, float]:
    """Return the model as a session, and the largest difference of its outputs to the module's over some calls."""
    import onnx

    try:
        onnx.checker.check_model(file)
        session = OnnxSession(file)
    except Exception as error:  # onnxruntime raises classes of its own that derive from Exception alone
        text = f"The exported model is not valid: {_with_line(error, source_lines)}"
        if "NOT_IMPLEMENTED" in text:
            text += "\n  It has no such kernel for these dtypes; for float32 it has most: call .float() on the module."
        raise ExportFailed(text) from error
    return session, max(_compare(module, session, call, tolerance, source_lines) for call in calls)


def _with_line(error: Exception, source_lines: dict[str, str]) -> str:
    line = next((line for name, line in source_lines.items() if f"'{name}'" in str(error)), None)
    return f"{str(error).strip()}\n  at {line}" if line else str(error)


def _compare(
    module: nn.Module,
    session: OnnxSession,
    call: inspect.BoundArguments,
    tolerance: float,
    source_lines: dict[str, str],
) -> float:
    """Return the largest difference of the model's outputs to the module's, which must be within tolerance."""
    inputs = named_inputs(call)
    _, expected = named_outputs(_run(module, call), inputs)
    try:
        _, got = named_outputs(session(inputs), inputs)
    except Exception as error:  # onnxruntime's own classes
        raise ExportFailed(f"{_called(module, call)} fails as a model: {_with_line(error, source_lines)}") from error
    largest = 0.0
    for (name, result), reference in zip(got.items(), expected.values(), strict=True):
        difference = largest_difference(result, reference)
        if not difference <= tolerance:
            raise ExportFailed(
                f"{_called(module, call)}: the exported model's {name!r} {list(result.shape)} differs from the "
                f"module's {list(reference.shape)} by {difference:.3g}; allowed is {tolerance:.3g}. The "
                "result must not depend on random numbers, state or the batch size. If it only differs by rounding, "
                "use a larger tolerance."
            )
        largest = max(largest, difference)
    return largest


def _metadata(module: nn.Module, model: "ir.Model", structure: Structure, quantize: Quantize | None) -> dict[str, Any]:
    def described(value: "ir.Value") -> dict[str, Any]:
        assert value.dtype is not None
        dtype = str(TORCH_DTYPES[value.dtype]).removeprefix("torch.")
        shape = [size if isinstance(size, int) else size.value for size in value.shape or ()]
        return {"name": value.name, "dtype": dtype, "shape": shape}

    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "inputs": [described(value) for value in model.graph.inputs],
        "outputs": [described(value) for value in model.graph.outputs],
        "structure": structure,
        "hparams": dict(getattr(module, "hparams", {})),
        "quantize": quantize,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that an export depends on, by the names of their modules."""
    import onnx
    import onnxruntime

    imported = (sys.modules[each.package] for each in NAMESPACES if each.imported)
    found = {package.__name__: package.__version__ for package in (torch, onnx, onnxruntime, *imported)}
    return {"lightning_ort": __version__} | found


def _write_quantized(source: Path, target: Path, kind: Quantize) -> None:
    """Write a model with smaller weights; inputs and outputs keep their dtypes.

    ``"fp16"`` computes in float16. ``"int8"`` has 8-bit weights in matrix products, convolutions and embeddings, and
    quantizes what they are multiplied with in each run.
    """
    import onnx
    import onnx_ir as ir

    model = onnx.load(source)
    # the tools transpose weights under their old names, and then refuse the shapes noted for these (onnxruntime 1.19)
    del model.graph.value_info[:]
    if kind == "fp16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        half = ir.from_proto(convert_float_to_float16(model, keep_io_types=True))
        half.graph.sort()  # its casts of the inputs come last (onnxruntime 1.19)
        ir.save(half, target)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    mark_preprocessed(model)  # constants and BatchNorms are folded already, and it warns without
    # unsigned: the CPU has no ConvInteger for signed weights, and sums of u8 x s8 overflow before AVX-512 VNNI
    quantize_dynamic(model, target, weight_type=QuantType.QUInt8)
