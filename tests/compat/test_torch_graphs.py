"""The private names of torch's graphs, and of AOTAutograd, still exist and mean the same."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends import common
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import FloorToInt, ToFloat, Where

from lightning_ort.compat import aot_autograd
from lightning_ort.compat import torch_graphs as compat

aten = torch.ops.aten


def trace(
    function: Callable[..., Any],
    *args: torch.Tensor,
    compiler: Callable[[str, fx.GraphModule], None] = lambda kind, gm: None,
    dynamic: bool = False,
    backward_at_once: bool = False,
    **options: Any,
) -> dict[str, fx.GraphModule]:
    """The graphs that AOTAutograd makes of a function."""
    graphs: dict[str, fx.GraphModule] = {}

    def keep(kind: str) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            graphs[kind] = gm
            compiler(kind, gm)
            return compat.boxed(gm.forward)

        return compile_graph

    backend = common.aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), **options)

    def compile_all(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if not backward_at_once:
            return backend(gm, inputs)
        with aot_autograd.backward_at_once(autocast=False):
            return backend(gm, inputs)

    torch.compile(function, backend=compile_all, dynamic=dynamic)(*args)
    return graphs


def symbolic_size(rows: int = 7) -> torch.SymInt:
    """The rows of a tensor that were traced as a symbol."""
    graph = trace(lambda x: x * 2, torch.randn(rows, 3), dynamic=True)["forward"]
    return next(node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt))


def test_op_overload() -> None:
    assert isinstance(aten.add.Tensor, compat.OpOverload)
    assert not isinstance(aten.add, compat.OpOverload)


def test_python_kernels() -> None:
    # torch decomposes this op above autograd, whatever AOTAutograd's table says; without that kernel it stays whole
    op = aten.hardshrink.default
    called = []

    def meta(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
        called.append(x)
        return torch.empty_like(x)

    kernels = {(op, "Autograd"): None, (op, "Meta"): meta}
    before = op.py_kernels.copy()
    x = torch.randn(3, requires_grad=True)
    with compat.python_kernels(kernels):
        graph = trace(lambda x: F.hardshrink(x), x)["forward"].graph
    assert graph.find_nodes(op="call_function", target=op)
    assert called
    assert op.py_kernels == before
    with pytest.raises(KeyError), compat.python_kernels(kernels):
        raise KeyError
    assert op.py_kernels == before


def test_promoted_dtype() -> None:
    assert compat.promoted_dtype(torch.zeros(2, dtype=torch.int32), 1.5) is torch.float32
    x, y = torch.zeros(2, dtype=torch.float32), torch.zeros((), dtype=torch.float64)
    assert compat.promoted_dtype(x, y) is torch.float32
    assert compat.promoted_dtype(x, y[None]) is torch.float64


def test_flop_formula() -> None:
    formula = compat.flop_formula(aten.mm.default)
    assert formula is not None
    x, y = torch.zeros(2, 3), torch.zeros(3, 5)
    assert formula(x, y, out_val=x @ y) == 2 * 2 * 3 * 5
    assert compat.flop_formula(aten.relu.default) is None
    assert compat.flop_formula(math.sin) is None


def test_is_contiguous_or_false() -> None:
    assert compat.is_contiguous_or_false(torch.zeros(2, 3))
    assert not compat.is_contiguous_or_false(torch.zeros(2, 3).t())


def test_suggest_memory_format() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert compat.suggest_memory_format(x) is torch.contiguous_format
    assert compat.suggest_memory_format(x.to(memory_format=torch.channels_last)) is torch.channels_last


@pytest.mark.parametrize("make", [compat.empty_strided_cpu, compat._empty_strided])  # the second where torch has none
def test_empty_strided_cpu(make: Callable[..., torch.Tensor]) -> None:
    x = make((2, 3), (1, 2), torch.float64)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (1, 2), torch.float64, "cpu")


def test_fake_tensors() -> None:
    seen = []

    def look(kind: str, gm: fx.GraphModule) -> None:
        with compat.without_fake_tensors():
            seen.append(torch.zeros(2))
        mode = compat.fake_mode_of(next(iter(gm.graph.nodes)).meta["val"])
        assert mode is not None
        with mode:
            seen.append(torch.zeros(2))

    trace(lambda x: x * 2, torch.randn(3), compiler=look)
    assert [compat.fake_mode_of(tensor) is None for tensor in seen] == [True, False]
    assert compat.fake_mode_of(3) is None


def test_without_tracing() -> None:
    lengths = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        with compat.without_tracing():
            lengths.append(torch.zeros(3, device="meta").exp().shape[0])
        return x * 2

    graph = make_fx(fn, tracing_mode="fake")(torch.randn(3)).graph
    assert lengths == [3]
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["aten.mul.Tensor"]


def test_symbolic_numbers() -> None:
    size = symbolic_size()
    assert compat.hint_of(size) == 7
    assert compat.expression_of(size).is_Symbol
    assert compat.expression_of(size + 1).subs(compat.expression_of(size), 4) == 5
    assert compat.is_positive(size)
    assert not compat.is_positive(size - 5)


def test_guards_of() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 5 else x

    program = torch.export.export(Module(branch), (torch.randn(7, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    size = next(iter(program.graph.nodes)).meta["val"].shape[0]
    locations = [guard.sloc.framework_loc for guard in compat.guards_of(size)]
    assert any(getattr(location, "filename", None) == __file__ for location in locations)


class Module(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_size_printer() -> None:
    size = symbolic_size()
    symbol = compat.expression_of(size)
    for made in (size * 3 - 2, size // 4, size % 4, (size + 1) * size, torch.sym_max(size, 9), size // 2 * 2):
        code = compat.size_printer().doprint(compat.expression_of(made).xreplace({symbol: sympy.Symbol("n")}))
        assert eval(code, {"math": math, "n": 7}) == compat.hint_of(made)


def test_size_printer_of_floats_and_choices() -> None:
    n = sympy.Symbol("n", integer=True)
    for expression, value in ((FloorToInt(ToFloat(n) * 1.7), 11), (Where(n > 3, n, 2), 7), (Where(n > 8, n, 2), 2)):
        code = compat.size_printer().doprint(expression)
        assert eval(code, {"math": math, "n": 7}) == value


def test_backward_at_once() -> None:
    x = torch.randn(3, requires_grad=True)
    assert set(trace(lambda x: x.sin(), x)) == {"forward"}
    torch._dynamo.reset()
    assert set(trace(lambda x: x.sin(), x, backward_at_once=True)) == {"forward", "backward"}


@pytest.mark.parametrize("min_cut", [None, {"aggressive_recomputation": True}])
def test_split_joint_graph(min_cut: dict[str, Any] | None) -> None:
    halves: list[fx.GraphModule] = []
    marked: list[fx.Node] = []

    def split(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        (sin,) = joint.graph.find_nodes(op="call_function", target=aten.sin.default)
        (mul,) = joint.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        primal, tangent = joint.graph.find_nodes(op="placeholder")
        found = [aot_autograd.half_of(node) for node in (primal, sin, tangent, mul)]
        assert found == ["forward", "forward", "backward", "backward"]
        assert [aot_autograd.is_graph_argument(node) for node in (primal, tangent, sin)] == [True, False, False]
        aot_autograd.assign_to_backward(cos := joint.graph.find_nodes(op="call_function", target=aten.cos.default)[0])
        assert aot_autograd.half_of(cos) == "backward"
        marked.append(cos)
        halves.extend(aot_autograd.split_joint_graph(joint, inputs, min_cut, **kwargs))
        return tuple(halves)

    x = torch.randn(3, requires_grad=True)
    graphs = trace(lambda x: x.sin(), x, partition_fn=split, backward_at_once=True)
    assert [graphs["forward"].code, graphs["backward"].code] == [half.code for half in halves]
    assert any(node.target is aten.cos.default for node in graphs["backward"].graph.nodes)
    assert len(marked) == 1


def test_traced_graph_facts() -> None:
    assert aot_autograd.traced_graph_facts() is None
    facts: list[aot_autograd.GraphFacts | None] = []

    def counted(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count

    def look(kind: str, gm: fx.GraphModule) -> None:
        facts.append(aot_autograd.traced_graph_facts())

    trace(counted, torch.randn(3), torch.zeros(()), compiler=look)
    trace(lambda x: x.view(-1), torch.randn(3, 2), compiler=look)
    assert facts == [(2, [0], True), (1, [], False)]


@pytest.mark.parametrize("allow", [False, True])
def test_allow_retain_graph(allow: bool) -> None:
    aot_autograd.allow_retain_graph()  # nothing is traced

    def compile_backward(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if allow:
            aot_autograd.allow_retain_graph()
        return compat.boxed(gm.forward)

    backend = common.aot_autograd(fw_compiler=lambda gm, _: compat.boxed(gm.forward), bw_compiler=compile_backward)

    def compile_all(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with aot_autograd.backward_at_once(autocast=False), torch._functorch.config.patch(donated_buffer=True):
            return backend(gm, inputs)

    x = torch.randn(3, requires_grad=True)
    loss = torch.compile(lambda x: x.sin().exp().sum(), backend=compile_all)(x)
    with contextlib.nullcontext() if allow else pytest.raises(RuntimeError, match="donated buffer"):
        loss.backward(retain_graph=True)
        loss.backward()


def test_boxed_calls() -> None:
    args = [1, 2]
    assert compat.boxed(lambda a, b: a + b)(args) == 3
    assert compat.boxed(lambda a, b: a + b)._boxed_call
    assert compat.mark_boxed(lambda args: args[0])._boxed_call


def test_generate_boxed_code() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    compat.generate_boxed_code(graph)
    graph.output((graph.call_function(torch.add, (x, 1)),))
    args = [torch.ones(2)]
    (result,) = fx.GraphModule(torch.nn.Module(), graph).forward(args)
    assert result.tolist() == [2, 2]
    assert args == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_promoted_dtype_of_half_types(dtype: torch.dtype) -> None:
    assert compat.promoted_dtype(torch.zeros(2, dtype=dtype), 1.5) is dtype
