"""One ONNX graph under construction: what converters write to."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, EXPANDED, FORMS, Unsupported
from lightning_ort.compiler.nodes import ANY_BYTE
from lightning_ort.compiler.report import ReasonType

if TYPE_CHECKING:
    from lightning_ort.compiler.executors.ort.kernels import Kernels

# opset 18 and IR 10 are what onnxruntime 1.19 knows; newer builds read them too
OPSET = 18
IR_VERSION = 10
MICROSOFT = "com.microsoft"
# in the meta of an FX node: the form that it was found to be fastest in
FORM = "onnx_form"

Scalar = bool | int | float
Arg = fx.Node | Scalar

DTYPES: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}


def element_type(dtype: torch.dtype) -> Any:
    """What onnxruntime's IO binding takes for a dtype: numpy's, or ONNX's number for bfloat16, which numpy lacks."""
    data_type = DTYPES[dtype]
    return int(data_type) if data_type is ir.DataType.BFLOAT16 else data_type.numpy()


def dtype_of(arg: Arg) -> torch.dtype:
    """The dtype of an argument's value; an integer counts as int64, a float as float32, a symbolic one as float64."""
    if isinstance(arg, fx.Node):
        val = arg.meta["val"]
        if isinstance(val, torch.Tensor):
            return val.dtype
        return {torch.SymBool: torch.bool, torch.SymFloat: torch.float64}.get(type(val), torch.int64)
    if isinstance(arg, bool):
        return torch.bool
    return torch.int64 if isinstance(arg, int) else torch.float32


def input_dtype(node: fx.Node) -> torch.dtype:
    """What a region's input is declared as and bound as: its dtype, or bytes for booleans that may be any byte."""
    return torch.uint8 if node.meta.get(ANY_BYTE) else dtype_of(node)


def shape_of(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    """The sizes of a tensor node; symbolic ones are ``torch.SymInt``."""
    return tuple(node.meta["val"].shape)


def rank_of(node: fx.Node) -> int:
    """The number of dimensions of a tensor node."""
    return int(node.meta["val"].dim())


def onnx_shape(sizes: Sequence[Any]) -> ir.Shape:
    """Sizes as ONNX has them: a symbolic one becomes a named dimension."""
    return ir.Shape([size if isinstance(size, int) else str(size) for size in sizes])


def static(sizes: Sequence[Any]) -> bool:
    """Whether no size is symbolic."""
    return all(isinstance(size, int) for size in sizes)


def same_shape(x: fx.Node, y: fx.Node) -> bool:
    """Whether two tensor nodes surely have the same shape; unlike ``==`` on symbolic sizes this installs no guard."""
    pairs = list(zip(shape_of(x), shape_of(y), strict=False))
    return rank_of(x) == rank_of(y) and all(_expression(a) == _expression(b) for a, b in pairs)


def forms_of(node: fx.Node, kernels: "Kernels") -> tuple[str, ...]:
    """The forms that a node's op can be written in with these kernels, the usual one first; none: there is but one."""
    forms = FORMS.get(node.target, ())  # type: ignore[call-overload]
    return tuple(form for form in forms if form == EXPANDED or kernels.has_training(form))


def _expression(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else size.node.expr


class GraphBuilder:
    """Collects the ONNX nodes of one region.

    Args:
        kernels: What the installed onnxruntime has; ``None`` means no training kernels.

    """

    def __init__(self, kernels: "Kernels") -> None:
        self.kernels = kernels
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.values: dict[fx.Node, Any] = {}
        self._initializers: dict[tuple[Any, ...], ir.Value] = {}
        self._casts: dict[tuple[ir.Value, torch.dtype], ir.Value] = {}
        self._count = 0

    @property
    def on_cpu(self) -> bool:
        """Whether onnxruntime's CPU kernels run it."""
        return self.kernels.providers[0] == "CPUExecutionProvider"

    # what a region is made of

    def add_input(self, node: fx.Node, name: str) -> None:
        """Declare a graph input for an FX node: a tensor, or a symbolic number as an int64 or float64 scalar."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            if val.dtype not in DTYPES:
                raise Unsupported(f"{val.dtype} has no ONNX counterpart here", ReasonType.DTYPE)
            value = ir.Value(name=name, type=ir.TensorType(DTYPES[input_dtype(node)]), shape=onnx_shape(val.shape))
        elif isinstance(val, (int, torch.SymInt, torch.SymFloat)):
            value = ir.Value(name=name, type=ir.TensorType(DTYPES[dtype_of(node)]), shape=ir.Shape([]))
        else:
            raise Unsupported(f"an input of type {type(val).__name__}", ReasonType.DTYPE)
        self.inputs.append(value)
        self.values[node] = self.cast(value, torch.bool) if node.meta.get(ANY_BYTE) else value

    def convert(self, node: fx.Node) -> None:
        """Emit one FX node.

        Raises:
            Unsupported: If there is no converter, or it refuses the arguments.

        """
        converter = CONVERTERS.get(node.target)  # type: ignore[call-overload]
        if converter is None:
            raise Unsupported(str(node.target), ReasonType.NO_CONVERTER)
        self.values[node] = converter(self, node, *node.args, **node.kwargs)

    def model(self, outputs: Sequence[fx.Node], name: str) -> ir.Model:
        """Close the graph.

        Args:
            outputs: The FX nodes whose values are the graph's outputs, in order; named ``o0``, ``o1``, ... A node with
                several results counts as all that are there.
            name: Name of the graph.

        """
        closed: list[ir.Value] = []
        for node in outputs:
            val, value = node.meta["val"], self.values[node]
            pairs = zip(val, value, strict=True) if isinstance(val, (tuple, list)) else [(val, value)]
            for tensor, result in pairs:
                if result is None:  # what output_mask left out
                    continue
                # a graph output must not be an input or an initializer, nor be listed twice; an Identity copies
                made_here = result.producer() is not None and not any(result is other for other in closed)
                output = result if made_here else self.op("Identity", result)
                output.name = f"o{len(closed)}"
                output.type = ir.TensorType(DTYPES[tensor.dtype])
                output.shape = onnx_shape(tensor.shape)
                closed.append(output)
        graph = ir.Graph(
            self.inputs,
            closed,
            nodes=_live(self.nodes, closed),
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET, MICROSOFT: 1},
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="lightning_ort")

    # what converters call

    def op(self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
        """Emit an ONNX node.

        Args:
            op_type: The ONNX operator.
            *inputs: Its inputs; ``None`` for an optional one left out.
            outputs: How many outputs to name.
            domain: ``""`` for ONNX, :data:`MICROSOFT` for ONNX Runtime's contributed operators.
            **attrs: Attributes; those that are ``None`` are left out.

        Returns:
            The output, or a tuple of them where there are several.

        """
        given = list(inputs)
        while given and given[-1] is None:  # onnxruntime 1.19 takes an empty name at the end of Squeeze for an input
            given.pop()
        node = ir.node(
            op_type,
            given,
            {name: value for name, value in attrs.items() if value is not None},
            domain=domain,
            num_outputs=outputs,
        )
        for output in node.outputs:
            output.name = f"v{self._count}"
            self._count += 1
        node.name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def ms(self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attrs: Any) -> Any:
        """Emit a node of ONNX Runtime's contributed operators (``com.microsoft``, version 1)."""
        return self.op(op_type, *inputs, outputs=outputs, domain=MICROSOFT, **attrs)

    def const(self, value: Any, dtype: torch.dtype) -> ir.Value:
        """A constant: a scalar or a nested list of them, as a tensor of ``dtype``."""
        if isinstance(value, fx.Node):
            raise Unsupported(f"a symbolic number where a constant is needed: {value}")
        if dtype is torch.bfloat16 or dtype not in DTYPES:
            raise Unsupported(f"a constant of {dtype}", ReasonType.DTYPE)
        try:
            array = np.asarray(value, dtype=DTYPES[dtype].numpy())
        except (OverflowError, ValueError) as error:  # -1 as uint8, an infinity as int64
            raise Unsupported(f"{value} as {dtype}") from error
        key = (dtype, array.shape, array.tobytes())
        if key not in self._initializers:
            name = f"c{len(self._initializers)}"
            self._initializers[key] = ir.Value(
                name=name,
                type=ir.TensorType(DTYPES[dtype]),
                shape=ir.Shape(array.shape),
                const_value=ir.tensor(array, name=name),
            )
        return self._initializers[key]

    def ints(self, values: int | Sequence[int]) -> ir.Value:
        """An int64 constant, 1-D for a sequence: axes, split sizes and such."""
        return self.const(values, torch.int64)

    def value(self, arg: Arg, dtype: torch.dtype | None = None) -> ir.Value:
        """The ONNX value of an argument.

        Args:
            arg: An FX node, or a Python scalar, which becomes a constant.
            dtype: Cast to this dtype where the argument has another; a scalar without it gets its natural dtype.

        """
        if not isinstance(arg, fx.Node):
            return self.const(arg, dtype or dtype_of(arg))
        value = self.values[arg]
        return value if dtype is None or dtype_of(arg) == dtype else self.cast(value, dtype)

    def product(self, dtype: torch.dtype, *args: Arg) -> ir.Value:
        """The product of scalars: a constant, but for symbolic ones."""
        numbers = [arg for arg in args if not isinstance(arg, fx.Node)]
        result = self.const(math.prod(numbers), dtype)
        for arg in args:
            if isinstance(arg, fx.Node):
                result = self.op("Mul", result, self.value(arg, dtype))
        return result

    def cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        """A value in another dtype; the same cast is emitted once."""
        if dtype not in DTYPES:
            raise Unsupported(f"a cast to {dtype}", ReasonType.DTYPE)
        key = (value, dtype)
        if key not in self._casts:
            self._casts[key] = self.op("Cast", value, to=int(DTYPES[dtype]))
        return self._casts[key]

    def scaled_mask(self, mask: fx.Node, scale: float, dtype: torch.dtype) -> ir.Value:
        """Booleans as 0 and ``scale``."""
        if dtype is torch.float32 and 0 < scale < math.inf:
            # one pass over memory for Cast and Mul, in half the time; exact, since the mask is 0 or 1
            return self.op("DequantizeLinear", self.value(mask, torch.uint8), self.const(scale, dtype))
        return self.op("Mul", self.value(mask, dtype), self.const(scale, dtype))

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Permute the dimensions."""
        # not even a Transpose that leaves them: onnxruntime 1.19 folds any before a Gemm into it, as a swap
        return value if list(perm) == list(range(len(perm))) else self.op("Transpose", value, perm=list(perm))

    def sizes(self, sizes: Sequence[int | fx.Node]) -> ir.Value:
        """A shape as a 1-D int64 value; symbolic entries are read from their int64 scalars."""
        if all(isinstance(size, int) for size in sizes):
            return self.ints(list(sizes))  # type: ignore[arg-type]
        parts = [
            self.ints([size]) if isinstance(size, int) else self.op("Unsqueeze", self.values[size], self.ints([0]))
            for size in sizes
        ]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def reshape_like(self, value: ir.Value, node: fx.Node, sizes: Sequence[int | fx.Node]) -> ir.Value:
        """Reshape to ``sizes``, the sizes of ``node``; one symbolic size is left to ONNX as -1."""
        known = [size if isinstance(size, int) else None for size in shape_of(node)]
        if known.count(None) <= 1 and 0 not in known:
            return self.op("Reshape", value, self.ints([-1 if size is None else size for size in known]))
        # allowzero: a 0 is an empty dimension here, not "copy from the input"
        return self.op("Reshape", value, self.sizes(sizes), allowzero=1 if 0 in known else None)

    def shape_tensor(self, node: fx.Node) -> ir.Value:
        """The run-time shape of a tensor node as a 1-D int64 value; a constant where it is static."""
        sizes = shape_of(node)
        if static(sizes):
            return self.ints([int(size) for size in sizes])
        return self.op("Shape", self.values[node])

    def form(self, node: fx.Node) -> str:
        """Which of its op's forms a node is to be written in: what was chosen for it, else the first there is."""
        forms, chosen = forms_of(node, self.kernels), node.meta.get(FORM)
        return chosen if chosen in forms else forms[0]


def _live(nodes: list[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
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
