"""Run a function on ONNX Runtime, forward and backward, and compare it with eager in float64."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.report import CompileReport
from tests.ort_settings import config_of

# rtol, atol: against float64, so these are errors, not differences of two errors
TOLERANCES = {torch.float32: (2e-5, 1e-5), torch.float64: (1e-9, 1e-11)}


@dataclass
class Run:
    """What a function returned, its gradients and its inputs afterwards (it may have written to them)."""

    outputs: list[Any]
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)


def compile_function(
    fn: Callable[..., Any], inputs: Sequence[Any], num_outputs: int, **config: Any
) -> tuple[Callable[..., Any], CompileReport]:
    """Compile a function that returns a tuple as dynamo would hand it over, without the time that dynamo takes."""
    # nothing is kept: to the cache, all of these opaque functions are one
    plain = {"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1, "intra_op_threads": 1}}
    backend = ORTBackend(config_of(**{**plain, **config}))
    graph = as_graph(fn, len(inputs), num_outputs)
    if backend.config.debug.step_graph != "joint":
        return backend(graph, list(inputs)), backend.report
    # what dynamo says of a step: it ends here, its result is a loss, and it calls functions of torch or Python alone
    fn.__module__ = operator.__name__
    graph.compile_subgraph_reason = SimpleNamespace(graph_break=False)
    graph.graph.output_node().all_input_nodes[0].meta["example_value"] = torch.zeros((), requires_grad=True)
    with tracing(TracingContext(FakeTensorMode(static_shapes=True))):
        return backend(graph, list(inputs)), backend.report


def as_graph(fn: Callable[..., Any], num_inputs: int, num_outputs: int) -> fx.GraphModule:
    """A function that returns a tuple as dynamo would hand it over: one opaque call."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{index}") for index in range(num_inputs)]
    call = graph.call_function(fn, tuple(placeholders))
    graph.output(tuple(graph.call_function(operator.getitem, (call, index)) for index in range(num_outputs)))
    return fx.GraphModule({}, graph)


def as_tuple(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> tuple[Any, ...]:
        result = fn(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    return call


def run(fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[torch.Tensor] | None = None) -> Run:
    """Call a function that returns a tuple, and its backward pass where an output has one.

    Random numbers are the same at every call.
    """
    torch.manual_seed(0)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]  # writing may add others
    outputs = list(fn(*inputs))
    result = Run(outputs, inputs=list(inputs))
    differentiable = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    if differentiable:
        given = cotangents or cotangents_for(outputs)
        result.gradients = list(
            torch.autograd.grad(
                differentiable,
                leaves,
                [g.to(out) for g, out in zip(given, differentiable, strict=True)],
                allow_unused=True,
            )
        )
    return result


def cotangents_for(outputs: Sequence[Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    differentiable = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    return [torch.randn(out.shape, dtype=torch.float64, generator=generator) for out in differentiable]


def copies(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """The inputs as fresh leaves with the same strides, floating ones in ``dtype``."""
    fresh = []
    for x in inputs:
        if isinstance(x, torch.Tensor):
            target = dtype if dtype is not None and x.is_floating_point() else x.dtype
            strided = torch.empty_strided(x.shape, x.stride(), dtype=target, device=x.device)
            x = strided.copy_(x.detach()).requires_grad_(x.requires_grad)
        fresh.append(x)
    return fresh


def check(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    tolerance: tuple[float, float],
    in_torch: frozenset[str] = frozenset(),
    **config: Any,
) -> CompileReport:
    """Assert that a function gives on ONNX Runtime what it gives in eager, and that ONNX Runtime ran it.

    Args:
        fn: The function.
        inputs: What to call it with; gradients are compared for those that require them.
        tolerance: Relative and absolute tolerance against eager in float64.
        in_torch: ATen ops that are known to stay in torch.
        **config: Fields of the config.
    """
    config.setdefault("fallback", "warn" if in_torch else "raise")
    report = compare(fn, inputs, tolerance=tolerance, **config)
    left = torch_reasons(report)
    assert set(left) <= in_torch, left
    with_compute = [graph for graph in report.graphs if graph.num_nodes]
    assert in_torch or report.ort_runs == len(with_compute) > 0, report.to_text()
    return report


def compare(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    tolerance: tuple[float, float],
    reference: torch.dtype | None = torch.float64,
    **config: Any,
) -> CompileReport:
    """Assert that a function gives what it gives in eager, whoever runs it.

    The arguments are those of :func:`check`; ``reference`` is what eager computes in, ``None`` for the inputs' own
    dtypes, in which what overflows does so for both.
    """
    eager = as_tuple(fn)
    expected = run(eager, copies(inputs, reference))
    same = run(eager, copies(inputs))
    given = copies(inputs)
    compiled, report = compile_function(eager, given, len(expected.outputs), **config)
    actual = run(compiled, given)
    assert_alike(actual, expected, same, tolerance)
    return report


def assert_alike(actual: Run, expected: Run, same: Run, tolerance: tuple[float, float]) -> None:
    """Assert that a call gave what eager gives in float64; dtypes and integers are those of eager's ``same`` call."""
    rtol, atol = tolerance
    pairs = [
        *(("output", *values) for values in zip(actual.outputs, expected.outputs, same.outputs, strict=True)),
        *(("gradient", *values) for values in zip(actual.gradients, expected.gradients, same.gradients, strict=True)),
        *(("input", *values) for values in zip(actual.inputs, expected.inputs, same.inputs, strict=True)),
    ]
    for index, (what, got, want, alike) in enumerate(pairs):
        if not isinstance(want, torch.Tensor):
            assert got == want
            continue
        assert isinstance(got, torch.Tensor), f"{what} {index}: {got}"
        assert got.dtype == alike.dtype, f"{what} {index}"
        assert got.shape == want.shape, f"{what} {index}"
        if not want.is_floating_point():
            want = alike  # a comparison may fall the other way in float64
        torch.testing.assert_close(
            got.detach().to(want.dtype), want.detach(), rtol=rtol, atol=atol, equal_nan=True, msg=_labelled(what, index)
        )


def _labelled(what: str, index: int) -> Callable[[str], str]:
    return lambda message: f"{what} {index}: {message}"


def torch_reasons(report: CompileReport) -> dict[str, Reason | None]:
    """Which ATen ops stayed in torch, and why."""
    return {
        op: region.node_reasons.get(op, region.reason)
        for graph in report.graphs
        for region in graph.regions
        if region.executor == "torch"
        for op in region.ops
    }
