"""Values of the ONNX graph, which converters compute with, and the registration of converters."""

import pytest
import torch

from lightning_ort.compiler.executors.ort.conversion import GraphBuilder, Unsupported, Value, converts, where
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS
from lightning_ort.compiler.executors.ort.kernels import Kernels

aten = torch.ops.aten


@pytest.fixture
def x() -> Value:
    return _input(torch.float32)


def _input(dtype: torch.dtype) -> Value:
    ctx = GraphBuilder(Kernels("standard", ("CPUExecutionProvider",)))
    node = torch.fx.Graph().placeholder("x")
    node.meta["val"] = torch.ones(2, dtype=dtype)
    ctx.add_input(node, "i0")
    return ctx.value(node)


def _emitted(value: Value) -> list[str]:
    return [node.op_type for node in value.ctx.nodes]


def test_formula(x: Value) -> None:
    assert _emitted(x * 2 + 1 / x - x**2) == ["Mul", "Div", "Add", "Pow", "Sub"]


def test_scalars_take_the_dtype_of_the_value_and_their_side(x: Value) -> None:
    difference = 1 - x
    one, other = difference.ir.producer().inputs
    assert one.const_value.numpy().dtype == "float32"
    assert other is x.ir


def test_equal_constants_and_casts_are_emitted_once(x: Value) -> None:
    total = x.cast(torch.float64) + x.cast(torch.float64) + 1 + 1
    assert _emitted(total) == ["Cast", "Add", "Add", "Add"]
    assert x.cast(torch.float32) is x
    assert x.ctx.const(1, torch.float64) is x.ctx.const(1, torch.float64)


def test_dtypes_of_results(x: Value) -> None:
    assert ((x < 1) & ~(x == 0) | (x != 2)).dtype is torch.bool
    assert where(x > 0, 0, x).dtype is torch.float32
    assert where(x > 0, 0, 1, torch.int64).dtype is torch.int64
    assert x.op("Shape").dtype is torch.int64
    assert [value.dtype for value in x.op("TopK", [1], outputs=2)] == [torch.float32, torch.int64]


def test_mixed_dtypes_are_errors(x: Value) -> None:
    with pytest.raises(TypeError, match=r"Add of torch.float32 and torch.float64"):
        x + x.cast(torch.float64)
    with pytest.raises(Unsupported, match=r"Mul of torch.int64 and 0.5"):
        _input(torch.int64) * 0.5
    with pytest.raises(TypeError, match="not known while the graph is built"):
        bool(x == 0)


def test_docstring_must_be_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CONVERTERS, aten.tanh_backward.default)

    def converter() -> None:
        """tanh_backward(Tensor grad, Tensor output) -> Tensor"""

    if torch.__version__.startswith("2.13."):
        with pytest.raises(ValueError, match=r"must be a schema: aten::tanh_backward\(Tensor grad_output, Tensor out"):
            converts(aten.tanh_backward.default)(converter)
        assert aten.tanh_backward.default not in CONVERTERS
    converter.__doc__ = "tanh_backward(Tensor grad_output, Tensor output) -> Tensor"
    converts(aten.tanh_backward.default)(converter)
    monkeypatch.undo()
