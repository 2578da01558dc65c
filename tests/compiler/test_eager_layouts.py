"""Strides of results: those of eager, also where torch traces a graph with others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.lowering.decompositions import LAYOUTS
from tests.conversion.harness import compile_function

aten = torch.ops.aten


def transposed(*sizes: int) -> torch.Tensor:
    return numbers(*sizes).transpose(0, -1).contiguous().transpose(0, -1)


def numbers(*sizes: int) -> torch.Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(0)) + 0.25


def channels_last(*sizes: int) -> torch.Tensor:
    return numbers(*sizes).contiguous(memory_format=torch.channels_last)


PAIRS = [
    (transposed(10, 1, 5), transposed(10, 5)),
    (transposed(10, 5), torch.tensor(2.0)),
    (torch.tensor(2.0), transposed(10, 5)),
    (transposed(10, 5), numbers(1, 5)),
    (numbers(10, 5), transposed(10, 5)),
    (transposed(10, 5), numbers(10, 5)),
    (transposed(4, 3, 5), transposed(4, 1, 5)),
    (channels_last(2, 3, 4, 5), numbers(3, 1, 1)),
    (channels_last(2, 3, 1, 5), numbers(2, 3, 4, 5)),
    (numbers(5, 4).t().expand(3, 4, 5), numbers(4, 5)),
    (transposed(6, 1, 5), transposed(1, 7, 1)),
]


def elementwise_ops() -> list[torch._ops.OpOverload]:
    """Those of torch that take two tensors and nothing else that has no default."""
    found = [aten.floor_divide.default]
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            needed = [str(argument.type) for argument in arguments if not argument.has_default_value()]
            returned = [str(result.type) for result in op._schema.returns]
            in_place = name.endswith("_") or any(argument.is_out for argument in arguments)
            if (
                torch.Tag.pointwise in op.tags
                and not in_place
                and needed == ["Tensor", "Tensor"]
                and returned == ["Tensor"]
            ):
                found.append(op)
    return found


def strides(x: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("op", elementwise_ops(), ids=str)
def test_elementwise_results_lie_as_in_eager(op: torch._ops.OpOverload) -> None:
    compared = 0
    for pair in PAIRS if op in LAYOUTS else PAIRS[:4]:
        for dtype in (torch.float32, torch.int64):
            inputs = [x.to(dtype) for x in pair]
            try:
                expected = op(*inputs)
            except (RuntimeError, NotImplementedError):  # not for this dtype
                continue
            compiled, _ = compile_function(lambda *x: (op(*x),), inputs, 1, cache_dir=None)
            (result,) = compiled(*inputs)
            assert strides(result) == strides(expected), (dtype, [(x.shape, x.stride()) for x in inputs])
            compared += 1
    assert compared >= 3


OTHERS = {
    "copysign": lambda x, y: torch.copysign(x.exp(), y),
    "ldexp": lambda x, y: torch.ldexp(x.exp(), y),
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "pow_of_number": lambda x, y: 2.5**x,
    "put": lambda x, y: x.put(torch.tensor([1, 2]), torch.tensor([3.0, 4.0])),
    "dropout_backward": lambda x, y: aten.native_dropout_backward(x, x > 0.5, 2.0),
    "then_more": lambda x, y: torch.logical_and(x, y).float().exp(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_results_lie_as_in_eager(name: str, dynamic: bool) -> None:
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1}))
    compiled = torch.compile(OTHERS[name], backend=backend, dynamic=dynamic)
    for pair in (PAIRS[0], PAIRS[5]):
        expected = OTHERS[name](*pair)
        result = compiled(*pair)
        torch.testing.assert_close(result, expected)
        assert strides(result) == strides(expected)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_unpooling_keeps_channels_last(layout: torch.memory_format) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled, places = F.max_pool2d(x, 2, return_indices=True)
            return F.max_unpool2d(pooled * 2, places, 2)

    x = torch.randn(2, 3, 4, 6).contiguous(memory_format=layout)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1}))
    expected, results = Net()(x), [torch.compile(Net(), backend=backend)(x) for _ in range(2)]
    assert expected.is_contiguous(memory_format=layout)
    for result in results:  # of the first run, and of code that is generated after it
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)
    assert backend.report.ort_runs > 0
