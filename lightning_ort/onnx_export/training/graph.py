"""The graph of a model that any ONNX runtime runs: ONNX's own operators, and sizes that are known when it runs."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import fx
from typing_extensions import override

from lightning_ort.compat.torch_graphs import OpOverload, expression_of
from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, FORMS, Unsupported
from lightning_ort.compiler.executors.ort.kernels import CPU, Kernels
from lightning_ort.compiler.reason import ReasonType

OPSET, IR_VERSION = 18, 9  # onnxruntime 1.17 reads them
_UNARY = {"sqrt": "Sqrt", "exp": "Exp", "log": "Log", "sin": "Sin", "cos": "Cos", "tanh": "Tanh"}  # of sizes


def written_whole() -> frozenset[OpOverload]:
    """The ops that need no decomposition."""
    return frozenset({*CONVERTERS, *FORMS})


class PortableGraph(GraphBuilder):
    """A :class:`GraphBuilder` that emits standard operators only, and computes sizes itself."""

    has_contributed = False
    dequantizes = False  # onnxruntime-web reads bytes wrongly on WebGPU (1.30)

    def __init__(self) -> None:
        super().__init__(Kernels("standard", (CPU,)))
        self.draws: list[tuple[str, Sequence[Any]]] = []  # kinds and sizes of random numbers, in the order of the graph
        self.dims: dict[sympy.Symbol, tuple[Value, int]] = {}  # which size of which input a symbol is
        self._sizes: dict[Any, Value] = {}

    @override
    def add_input(self, node: fx.Node, name: str) -> None:
        super().add_input(node, name)
        for axis, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int) and (symbol := expression_of(size)).is_Symbol:
                self.dims.setdefault(symbol, (self.values[node], axis))

    def add_tensor(self, node: fx.Node, name: str, tensor: torch.Tensor, stored: torch.dtype | None = None) -> None:
        """Make an FX node a constant of the model, which may be stored in another dtype than it is computed with."""
        if tensor.dtype not in DTYPES:
            raise Unsupported(f"a constant of {tensor.dtype}", ReasonType.DTYPE)
        dtype = tensor.dtype if stored is None else stored
        array = tensor.detach().to(dtype).cpu().contiguous().numpy()
        value = ir.Value(
            name=name,
            type=ir.TensorType(DTYPES[dtype]),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        constant = self._constants["tensor", name] = Value(self, value, dtype)
        self.values[node] = constant.cast(tensor.dtype)

    def new_input(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Value:
        """Declare an input that is no node of the graph."""
        value = Value(self, ir.Value(name=name, type=ir.TensorType(DTYPES[dtype]), shape=ir.Shape(shape)), dtype)
        self.inputs.append(value.ir)
        return value

    def draw(self, kind: str, sizes: Sequence[Any]) -> Value:
        """Random numbers in float32, an input of the model: ``"uniform"`` from 0 to 1, or ``"normal"``."""
        self.draws.append((kind, sizes))
        return self.new_input(f"random/{len(self.draws) - 1}", torch.float32, (0,) * len(sizes))

    @override
    def convert(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            self.values[node] = self.number(value.node.expr)
            return
        written = FORMS.get(node.target)  # type: ignore[call-overload]
        if written is None:
            super().convert(node)
        else:
            self.values[node] = written(self, node, *node.args, **node.kwargs)

    @override
    def ms(self, op_type: str, *inputs: Any, **options: Any) -> Any:
        raise Unsupported(f"{op_type}, which is not an operator of ONNX", ReasonType.NO_KERNEL)

    @override
    def sum_at(
        self, x: Value, places: Sequence[Value], updates: Value, rank: int, summands: Sequence[Any], what: str
    ) -> Value:
        depth, total = len(places), places[0]
        if depth > 1:  # taken as one dimension, where negative places count from the end
            total = self.const(0, torch.int64)
            for dim, place in enumerate(places):
                size = x.op("Shape", start=dim, end=dim + 1).squeeze(0)
                total = total * size + where(place < 0, place + size, place)
        shape = self.ints([-1])
        if depth < rank:
            shape = self.op("Concat", shape, x.op("Shape", start=depth), axis=0)
        flat, updates = x if depth == 1 else x.reshape(shape), updates.reshape(shape)
        rows = total.reshape([-1] + [1] * (rank - depth)).expand(updates.op("Shape"))
        # it adds in one thread, and ScatterND in several, which lose parts of large sums
        found = flat.op("ScatterElements", rows, updates, axis=0, reduction="add")
        return found if depth == 1 else found.reshape(x.op("Shape"))

    @override
    def write_slice(self, x: Value, rank: int, axis: int, updates: Value, start: Any, step: Any = 1) -> Value:
        length, count = (value.op("Shape", start=axis, end=axis + 1).squeeze(0) for value in (x, updates))
        first = self.value(0 if start is None else start, torch.int64)
        first = where(first < 0, first + length, first).max(0).min(length)
        places = self.op("Range", 0, count, 1) * step + first
        places = places.reshape([1] * axis + [-1] + [1] * (rank - axis - 1)).expand(updates.op("Shape"))
        return x.op("ScatterElements", places, updates, axis=axis)

    def number(self, expression: Any) -> Value:
        """A number that is computed from sizes: an int64 scalar, or a float64 one."""
        if expression not in self._sizes:
            self._sizes[expression] = self._number(sympy.sympify(expression))
        return self._sizes[expression]

    def _number(self, expression: sympy.Expr) -> Value:
        if expression.is_Integer:
            return self.const(int(expression), torch.int64)
        if expression.is_Float or expression.is_Rational:
            return self.const(float(expression), torch.float64)
        if expression.is_Symbol:
            if expression not in self.dims:
                raise Unsupported("a size that depends on the values of tensors", ReasonType.DYNAMIC_SHAPE)
            value, axis = self.dims[expression]
            return value.op("Shape", start=axis, end=axis + 1, dtype=torch.int64).squeeze(0)
        return self._computed(type(expression).__name__, [self.number(part) for part in expression.args])

    def _computed(self, name: str, parts: list[Value]) -> Value:
        if any(part.dtype is torch.float64 for part in parts):
            parts = [part.cast(torch.float64) for part in parts]
        operators = {"Add": "Add", "Mul": "Mul", "Max": "Max", "Min": "Min", "CleanDiv": "Div", "FloorDiv": "Div"}
        operators |= {"Mod": "Mod", "PythonMod": "Mod", "Pow": "Pow", "PowByNatural": "Pow"}
        if name in operators:  # sizes are not negative, so that a Div rounds down
            result = parts[0]
            for part in parts[1:]:
                result = result.op(operators[name], part)
            return result
        floats = [part.cast(torch.float64) for part in parts]
        if name in ("IntTrueDiv", "FloatTrueDiv"):
            return floats[0] / floats[1]
        if name == "FloatPow":
            return floats[0].op("Pow", floats[1])
        if name == "ToFloat":
            return floats[0]
        if name in ("CeilToInt", "FloorToInt", "TruncToInt"):
            return floats[0].op("Floor" if name != "CeilToInt" else "Ceil").cast(torch.int64)
        if name.startswith("OpaqueUnaryFn_") and (function := name.removeprefix("OpaqueUnaryFn_")) in _UNARY:
            return floats[0].op(_UNARY[function])
        raise Unsupported(f"a size computed by {name}", ReasonType.DYNAMIC_SHAPE)

    def constants_used(self) -> list[ir.Value]:
        """The constants so far."""
        return [constant.ir for constant in self._constants.values()]
