"""One ONNX graph under construction, and its values, which converters compute with."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.metadata import (
    DTYPES,
    Arg,
    dtype_of,
    input_dtype,
    onnx_shape,
    shape_of,
    static,
)
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, Unsupported
from lightning_ort.compiler.executors.ort.kept_models import MICROSOFT
from lightning_ort.compiler.executors.ort.kernels import Kernels
from lightning_ort.compiler.executors.ort.providers import provider_of
from lightning_ort.compiler.graphs.nodes import ANY_BYTE, reached
from lightning_ort.compiler.reason import ReasonType

# what onnxruntime's CUDA provider has no kernels for at opset 18 (1.31.1; found by loading models of one node, without
# a GPU): they compute in float32 between two casts, as torch's own kernels of these dtypes do inside
_BFLOAT16 = """
    Equal Less Greater LessOrEqual GreaterOrEqual
    Ceil Cos Elu Floor HardSigmoid IsInf LeakyRelu Log LogSoftmax Reciprocal Round Sin Softplus
    ArgMax ArgMin AveragePool Clip CumSum Pad ReduceMax ReduceMin ReduceProd Resize TopK
"""
_IN_FLOAT32: dict[torch.dtype, set[str]] = {
    torch.float16: {"IsInf", "LogSoftmax"},  # the latter for its sum
    torch.bfloat16: {*_BFLOAT16.split()},
}
# what ScatterND can add up, or reduce otherwise; it loads in any dtype, and fails when it runs
_SCATTERED = (torch.float32, torch.float16)


def _dtype_without_kernel(op_type: str, dtypes: Sequence[torch.dtype], reduction: str | None) -> torch.dtype | None:
    """Return which dtype of the inputs has to be cast to float32, if any; ``Unsupported`` if that would not do."""
    if op_type == "ScatterND" and reduction is not None and dtypes[0] not in _SCATTERED:
        if dtypes[0] is not torch.bfloat16:
            raise Unsupported(f"ScatterND that reduces {dtypes[0]} on a GPU", ReasonType.NO_KERNEL)
        return dtypes[0]
    return next((dtype for dtype in dtypes if op_type in _IN_FLOAT32.get(dtype, ())), None)


# opset 18 and IR 10 are what onnxruntime 1.19 knows; newer builds read them too, and lack some kernels of newer opsets
OPSET = 18
IR_VERSION = 10
# of those that ScatterND adds: its cost model starts a second thread at 210,000 (1.19)
_MAX_SERIAL_SUMMANDS = 1 << 16

# the dtype of a result is that of the first input, except for these
_BOOLEAN = {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}
_INTEGER = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size"}
_LIKE_SECOND_INPUT = {"DequantizeLinear", "Where"}

Operand = Union["Value", Arg]


def _operator(op_type: str, reflected: bool = False) -> Callable[["Value", Operand], "Value"]:
    """A binary operator, elementwise; reflected: the value is the second input."""

    def apply(self: "Value", other: Operand) -> "Value":
        if isinstance(other, Value) and other.dtype != self.dtype:
            raise TypeError(f"{op_type} of {self.dtype} and {other.dtype}")
        if isinstance(other, float) and not self.dtype.is_floating_point and not other.is_integer():
            raise Unsupported(f"{op_type} of {self.dtype} and {other}")
        value = self.ctx.value(other, self.dtype)
        return value.op(op_type, self) if reflected else self.op(op_type, value)

    return apply


class Value:
    """A value of the ONNX graph, with operators: ``grad * (1 - y * y)`` emits two ``Mul`` and a ``Sub``.

    The other operand may be a Python scalar or an FX node, which are taken in this value's dtype. Between two values
    of different dtypes an operator raises ``TypeError``: use :meth:`cast`. ``==`` and ``!=`` are operators too, so test
    for identity with ``is``.
    """

    __slots__ = ("ctx", "dtype", "ir")
    __hash__ = object.__hash__

    def __init__(self, ctx: "GraphBuilder", value: ir.Value, dtype: torch.dtype) -> None:
        self.ctx = ctx
        self.ir = value
        self.dtype = dtype

    def op(self, op_type: str, *others: Any, **attrs: Any) -> "Value":
        """An ONNX operator with this value as its first input; see :meth:`GraphBuilder.op`."""
        return self.ctx.op(op_type, self, *others, **attrs)

    __add__, __radd__ = _operator("Add"), _operator("Add", reflected=True)
    __sub__, __rsub__ = _operator("Sub"), _operator("Sub", reflected=True)
    __mul__, __rmul__ = _operator("Mul"), _operator("Mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("Div"), _operator("Div", reflected=True)
    __pow__, __rpow__ = _operator("Pow"), _operator("Pow", reflected=True)
    __lt__, __le__ = _operator("Less"), _operator("LessOrEqual")
    __gt__, __ge__ = _operator("Greater"), _operator("GreaterOrEqual")
    __eq__ = _operator("Equal")  # type: ignore[assignment]
    __and__, __or__ = _operator("And"), _operator("Or")
    min, max = _operator("Min"), _operator("Max")

    def __ne__(self, other: Operand) -> "Value":  # type: ignore[override]
        return ~(self == other)

    def __invert__(self) -> "Value":
        return self.op("Not")

    def __neg__(self) -> "Value":
        return self.op("Neg")

    def __abs__(self) -> "Value":
        return self.op("Abs")

    def __bool__(self) -> bool:
        raise TypeError("a value of the graph is not known while the graph is built")

    def is_nan(self) -> "Value":
        """Where it is NaN."""
        return self.op("IsNaN")

    def cast(self, dtype: torch.dtype) -> "Value":
        """The value in another dtype; the same cast is emitted once."""
        return self if dtype == self.dtype else self.ctx.cast(self, dtype)

    def reshape(self, shape: "Value | Sequence[int]") -> "Value":
        """``Reshape``, in which 0 copies a size and -1 infers one."""
        return self.op("Reshape", shape)

    def expand(self, shape: "Value | Sequence[int]") -> "Value":
        """Broadcast to a shape."""
        return self.op("Expand", shape)

    def unsqueeze(self, *dims: int) -> "Value":
        """Insert dimensions of size 1."""
        return self.op("Unsqueeze", dims)

    def squeeze(self, *dims: int) -> "Value":
        """Remove dimensions of size 1."""
        return self.op("Squeeze", dims)

    def transpose(self, perm: Sequence[int]) -> "Value":
        """Permute the dimensions."""
        # not even a Transpose that leaves them: onnxruntime 1.19 folds any before a Gemm into it, as a swap
        return self if list(perm) == list(range(len(perm))) else self.op("Transpose", perm=list(perm))


class GraphBuilder:
    """Collects the ONNX nodes of one region, for the kernels of the installed onnxruntime."""

    has_contributed = True  # whether it may have ONNX Runtime's contributed operators, as :meth:`ms` emits them
    dequantizes = True  # whether ``DequantizeLinear`` may make floats of bytes

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.values: dict[fx.Node, Any] = {}
        self._constants: dict[tuple[Any, ...], Value] = {}
        self._casts: dict[tuple[ir.Value, torch.dtype], Value] = {}
        self._count = 0

    @property
    def on_cpu(self) -> bool:
        """Whether onnxruntime's CPU kernels may run it, whose slow and wrong ones need another form.

        They run what providers before them have no kernel for, unless one of these is asked alone.
        """
        return not any(provider_of(name).asked_alone for name in self.kernels.providers)

    # what a region is made of

    def add_input(self, node: fx.Node, name: str) -> None:
        """Declare a graph input for an FX node: a tensor, or a symbolic number as an int64 or float64 scalar."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            if val.dtype not in DTYPES:
                raise Unsupported(f"{val.dtype} has no ONNX counterpart here", ReasonType.DTYPE)
            dtype, shape = input_dtype(node), onnx_shape(val.shape)
        elif isinstance(val, (int, torch.SymInt, torch.SymFloat)):
            dtype, shape = dtype_of(node), ir.Shape([])
        else:
            raise Unsupported(f"an input of type {type(val).__name__}", ReasonType.DTYPE)
        value = Value(self, ir.Value(name=name, type=ir.TensorType(DTYPES[dtype]), shape=shape), dtype)
        self.inputs.append(value.ir)
        self.values[node] = value.cast(torch.bool) if node.meta.get(ANY_BYTE) else value

    def convert(self, node: fx.Node) -> None:
        """Emit one FX node, or raise :class:`Unsupported` if there is no converter, or it refuses the arguments."""
        converter = CONVERTERS.get(node.target)  # type: ignore[call-overload]
        if converter is None:
            raise Unsupported(str(node.target), ReasonType.NO_CONVERTER)
        self.values[node] = converter(self, node, *node.args, **node.kwargs)

    def constants(self, outputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Those of these FX nodes that depend on no input, and what they alone are made from."""
        variable = set(self.inputs)
        for made in self.nodes:
            if not variable.isdisjoint(source for source in made.inputs if source is not None):
                variable.update(made.outputs)

        def has_constants(node: fx.Node) -> bool:
            found = self.values[node]
            values = found if isinstance(found, tuple) else (found,)
            return not any(value is not None and value.ir in variable for value in values)

        return [*reached(filter(has_constants, outputs), lambda node: filter(has_constants, node.all_input_nodes))]

    def model(self, outputs: Sequence[fx.Node], name: str) -> ir.Model:
        """The graph as a model; its outputs ``o0``, ``o1``, ... are all results of these FX nodes."""
        results: list[ir.Value] = []
        for node in outputs:
            val, value = node.meta["val"], self.values[node]
            pairs = zip(val, value, strict=True) if isinstance(val, (tuple, list)) else [(val, value)]
            for tensor, result in pairs:
                if result is None:  # left out by output_mask
                    continue
                # a graph output must not be an input or an initializer, nor be listed twice; an Identity copies
                made_here = result.ir.producer() is not None and not any(result.ir is other for other in results)
                output = (result if made_here else result.op("Identity")).ir
                output.name = f"o{len(results)}"
                output.type = ir.TensorType(DTYPES[tensor.dtype])
                output.shape = onnx_shape(tensor.shape)
                results.append(output)
        graph = ir.Graph(
            self.inputs,
            results,
            nodes=live(self.nodes, results),
            initializers=[constant.ir for constant in self._constants.values()],
            opset_imports={"": OPSET, MICROSOFT: 1},
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="lightning_ort")

    # what converters call

    def op(
        self,
        op_type: str,
        *inputs: Any,
        outputs: int = 1,
        domain: str = "",
        dtype: torch.dtype | None = None,
        **attrs: Any,
    ) -> Any:
        """Emit an ONNX node.

        Args:
            op_type: The ONNX operator.
            *inputs: Its inputs: values; FX nodes; sequences of integers, which become int64 constants; ``None`` for an
                optional one left out.
            outputs: How many outputs it has.
            domain: ``""`` for ONNX, :data:`MICROSOFT` for ONNX Runtime's contributed operators.
            dtype: The dtype of the (first) output, where it follows neither from the operator nor from its inputs.
            **attrs: Attributes; those that are ``None`` are left out.

        Returns:
            The output, or a tuple of them if there are several.
        """
        values = [
            None if arg is None else self.ints(arg) if isinstance(arg, (list, tuple)) else self.value(arg)
            for arg in inputs
        ]
        dtypes = [value.dtype for value in values if value is not None]
        narrow = None if self.on_cpu else _dtype_without_kernel(op_type, dtypes, attrs.get("reduction"))
        if narrow is not None:
            wide = [
                value.cast(torch.float32) if value is not None and value.dtype is narrow else value for value in values
            ]
            results = self.op(op_type, *wide, outputs=outputs, domain=domain, **attrs)
            several = results if isinstance(results, tuple) else (results,)
            back = tuple(value.cast(narrow) if value.dtype is torch.float32 else value for value in several)
            return back if isinstance(results, tuple) else back[0]
        while values and values[-1] is None:  # onnxruntime 1.19 takes an empty name at the end of Squeeze for an input
            values.pop()
        node = ir.node(
            op_type,
            [None if value is None else value.ir for value in values],
            {name: value for name, value in attrs.items() if value is not None},
            domain=domain,
            num_outputs=outputs,
        )
        for output in node.outputs:
            output.name = f"v{self._count}"
            self._count += 1
        node.name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(node)
        first = dtype or _result_dtype(op_type, values)
        second = torch.int64 if op_type in ("MaxPool", "TopK") else first  # indices
        results = tuple(Value(self, output, second if index else first) for index, output in enumerate(node.outputs))
        return results[0] if outputs == 1 else results

    def ms(self, op_type: str, *inputs: Any, **options: Any) -> Any:
        """Emit a node of ONNX Runtime's contributed operators (``com.microsoft``, version 1)."""
        return self.op(op_type, *inputs, domain=MICROSOFT, **options)

    def const(self, value: Any, dtype: torch.dtype) -> Value:
        """A constant: a scalar or a nested list of them, as a tensor of ``dtype``."""
        if isinstance(value, fx.Node):
            raise Unsupported(f"a symbolic number where a constant is needed: {value}")
        if dtype not in DTYPES:
            raise Unsupported(f"a constant of {dtype}", ReasonType.DTYPE)
        try:
            array = np.asarray(value, dtype=DTYPES[dtype].numpy())
        except (OverflowError, ValueError) as error:  # -1 as uint8, an infinity as int64
            raise Unsupported(f"{value} as {dtype}") from error
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"c{len(self._constants)}"
            constant = ir.Value(
                name=name,
                type=ir.TensorType(DTYPES[dtype]),
                shape=ir.Shape(array.shape),
                const_value=ir.tensor(array, name=name),
            )
            self._constants[key] = Value(self, constant, dtype)
        return self._constants[key]

    def ints(self, values: int | Sequence[int]) -> Value:
        """An int64 constant, 1-D for a sequence: axes, split sizes and such."""
        return self.const(values, torch.int64)

    def value(self, arg: Operand, dtype: torch.dtype | None = None) -> Value:
        """The value of an FX node, or a constant for a Python scalar; cast to ``dtype`` if that is given."""
        if isinstance(arg, (bool, int, float)):
            return self.const(arg, dtype or dtype_of(arg))
        value = arg if isinstance(arg, Value) else self.values[arg]
        return value if dtype is None else value.cast(dtype)

    def product(self, dtype: torch.dtype, *args: Arg) -> Value:
        """The product of scalars: a constant, unless one is symbolic."""
        result = self.const(math.prod(arg for arg in args if not isinstance(arg, fx.Node)), dtype)
        for arg in args:
            if isinstance(arg, fx.Node):
                result = result * arg
        return result

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """A value in another dtype; the same cast is emitted once."""
        if dtype not in DTYPES:
            raise Unsupported(f"a cast to {dtype}", ReasonType.DTYPE)
        key = (value.ir, dtype)
        if key not in self._casts:
            self._casts[key] = self.op("Cast", value, dtype=dtype, to=int(DTYPES[dtype]))
        return self._casts[key]

    def sizes(self, sizes: Sequence[int | fx.Node]) -> Value:
        """A shape as a 1-D int64 value; symbolic entries are read from their int64 scalars."""
        if all(isinstance(size, int) for size in sizes):
            return self.ints(list(sizes))  # type: ignore[arg-type]
        parts = [
            self.ints([size]) if isinstance(size, int) else self.op("Unsqueeze", self.values[size], self.ints([0]))
            for size in sizes
        ]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def reshape_like(self, value: Value, node: fx.Node, sizes: Sequence[int | fx.Node]) -> Value:
        """Reshape to ``sizes``, the sizes of ``node``; one symbolic size is left to ONNX as -1."""
        known = [size if isinstance(size, int) else None for size in shape_of(node)]
        if known.count(None) <= 1 and 0 not in known:
            return self.op("Reshape", value, self.ints([-1 if size is None else size for size in known]))
        # allowzero: a 0 is an empty dimension here, not "copy from the input"
        return self.op("Reshape", value, self.sizes(sizes), allowzero=1 if 0 in known else None)

    def sum_at(
        self, x: Value, places: Sequence[Value], updates: Value, rank: int, summands: Sequence[Any], what: str
    ) -> Value:
        """Add to entries of ``x``, of a rank, at places that may repeat: a tensor of each of its first dimensions.

        ScatterND adds without a lock, so that a sum of one thread overwrites that of another (1.19;
        https://github.com/microsoft/onnxruntime/issues/23396): of 100 gradients of an embedding with 8,192 tokens in
        two threads, four were wrong, by up to a fifth. So many ``summands``, the traced shape of ``updates``, are
        refused.
        """
        if self.on_cpu and (not static(summands) or math.prod(summands) > _MAX_SERIAL_SUMMANDS):
            raise Unsupported(f"{what}: onnxruntime's threads lose parts of large sums at repeated places")
        return x.op("ScatterND", self.rows(places), updates, reduction="add")

    def write_slice(self, x: Value, rank: int, axis: int, updates: Value, start: Any, step: Any = 1) -> Value:
        """Replace the entries of a dimension from ``start`` on, where sizes or bounds are symbolic."""
        raise Unsupported("writing to a slice of symbolic size", ReasonType.DYNAMIC_SHAPE)  # torch's kernel is faster

    def rows(self, places: Sequence[Value]) -> Value:
        """Index tensors of one shape as the rows [..., k] that GatherND and ScatterND take."""
        rows = [value.unsqueeze(-1) for value in places]
        return rows[0] if len(rows) == 1 else self.op("Concat", *rows, axis=-1)

    def shape_tensor(self, node: fx.Node) -> Value:
        """The run-time shape of a tensor node as a 1-D int64 value; a constant where it is static."""
        sizes = shape_of(node)
        if static(sizes):
            return self.ints([int(size) for size in sizes])
        return self.op("Shape", self.values[node])


def _result_dtype(op_type: str, inputs: Sequence[Value | None]) -> torch.dtype:
    if op_type in _BOOLEAN:
        return torch.bool
    if op_type in _INTEGER:
        return torch.int64
    value = inputs[op_type in _LIKE_SECOND_INPUT]
    assert value is not None
    return value.dtype


def live(nodes: list[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    """Drop nodes that no output needs, such as a transpose that was folded into a Gemm."""
    needed = {id(value) for value in outputs}
    kept = []
    for node in reversed(nodes):
        if any(id(output) in needed for output in node.outputs):
            needed.update(id(value) for value in node.inputs if value is not None)
            kept.append(node)
        else:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    return kept[::-1]
