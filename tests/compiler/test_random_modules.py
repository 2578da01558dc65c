"""Random modules: loss and gradients on ONNX Runtime are as near to float64 as eager's are."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.compiler.random_modules import PROGRAMS, Program
from tests.conversion import harness
from tests.conversion.changing_sizes import compile_for

# how far ONNX Runtime may be from float64: so many times as far as eager, and so much of the largest magnitude, as
# eager's error may be 0 by luck; of a result that cancels to 0, such as a constant minus its mean, only rounding is
# left, so magnitudes count from SMALL on (those of the inputs are about 1)
TIMES_EAGER, OF_LARGEST, SMALL = 20, 5e-5, 1e-2


def function_of(program: Program) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The module's mean square as a function of its input, parameters and buffers; and these, in float64."""
    module, x = program.build()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    buffers = {id(buffer) for buffer in module.buffers()}

    def loss(x: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor]:
        output = torch.func.functional_call(module, dict(zip(tensors, values, strict=True)), (x,))
        return (output.square().mean(),)

    needs_gradient = [x.is_floating_point(), *(id(value) not in buffers for value in tensors.values())]
    pairs = zip([x, *tensors.values()], needs_gradient, strict=True)
    return loss, [value.detach().requires_grad_(wanted) for value, wanted in pairs]


def largest(tensors: Sequence[Any]) -> float:
    found = (torch.nan_to_num(x.detach()) for x in tensors if x is not None and x.numel())
    return max((float(x.abs().max()) for x in found), default=0.0)


def jittered(tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The tensors with their last bits changed: what eager makes of them shows how far rounding alone may go."""
    generator = torch.Generator().manual_seed(seed)
    changed = []
    for x in harness.copies(tensors):
        if seed and x.is_floating_point():
            with torch.no_grad():
                x.mul_(1 + torch.finfo(x.dtype).eps * torch.randn(x.shape, generator=generator, dtype=x.dtype))
        changed.append(x)
    return changed


def check(program: Program, step_graph: str) -> None:
    fn, exact = function_of(program)
    given = harness.copies(exact, torch.float32)
    compiled, report = harness.compile_function(fn, given, 1, step_graph=step_graph)
    compare(fn, exact, compiled, given)
    assert not [entry for entry in report.fallbacks if entry.reason.type.is_failure], report.fallbacks
    assert report.ort_runs > 0, report.to_text()
    assert (report.graphs[0].name == "step_0") == (step_graph == "joint")


def compare(
    fn: Callable[..., Any], exact: Sequence[torch.Tensor], compiled: Callable[..., Any], given: Sequence[torch.Tensor]
) -> None:
    """Assert that a compiled function is as near to float64 as eager, on float32 copies of the inputs."""
    expected = harness.run(fn, harness.copies(exact))
    single = harness.copies(given)
    eager = [harness.run(fn, jittered(single, seed)) for seed in range(4)]  # the first as it is
    actual = harness.run(compiled, given)
    for kind in ("outputs", "gradients", "inputs"):  # the inputs for the buffers, which a batch norm updates
        wants, gots = getattr(expected, kind), getattr(actual, kind)
        likes = zip(*(getattr(result, kind) for result in eager), strict=True)
        scale = max(largest(wants), SMALL)
        for index, (want, got, like) in enumerate(zip(wants, gots, likes, strict=True)):
            if want is None:
                assert got is None, f"{kind} {index}"
                continue
            assert torch.equal(got.isnan(), want.isnan()), f"{kind} {index}"  # of a mean of nothing
            error, *errors = (largest([value.double() - want]) for value in (got, *like))
            allowed = max(errors)
            assert error <= TIMES_EAGER * allowed + OF_LARGEST * scale, f"{kind} {index}: {error}, eager {allowed}"


def check_changing(program: Program, step_graph: str) -> None:
    """Compare calls with other numbers of rows: two of which the graph is for, then one and none."""
    fn, exact = function_of(program)
    rows = len(exact[0])
    calls = [exact]
    for number in (rows + 3, rows + 1 if rows < 3 else rows - 1, *{1, 0} - {rows}):
        batch = exact[0].detach()[torch.arange(number) % rows]
        if batch.is_floating_point():  # what is repeated is another number
            batch = batch * torch.linspace(1, 0.5, number, dtype=batch.dtype).view(-1, *[1] * (batch.dim() - 1))
        calls.append([batch.requires_grad_(exact[0].requires_grad), *exact[1:]])
    taken = [inputs for inputs in calls if takes(fn, inputs)]
    assume(len(taken) > 1)  # a layer may be for a number of rows
    torch._dynamo.reset()
    compiled, backend = compile_for(fn, rows, step_graph=step_graph)
    for inputs in taken:
        compare(fn, inputs, compiled, harness.copies(inputs, torch.float32))
    failures = [entry for entry in backend.report.fallbacks if entry.reason.type.is_failure]
    assert not failures, failures
    assert backend.report.ort_runs > 0, backend.report.to_text()


def takes(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> bool:
    try:
        harness.run(fn, harness.copies(inputs))
    except Exception:  # a layer may be made for a number of rows
        return False
    return True


COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


@settings(max_examples=20, derandomize=True, **COMMON)
@given(PROGRAMS)
def test_random_modules(program: Program) -> None:
    check(program, "split")


@settings(max_examples=20, derandomize=True, **COMMON)
@given(PROGRAMS)
def test_random_modules_as_one_graph(program: Program) -> None:
    check(program, "joint")


@settings(max_examples=6, derandomize=True, **COMMON)
@given(PROGRAMS, st.sampled_from(["split", "joint"]))
def test_random_modules_on_changing_sizes(program: Program, step_graph: str) -> None:
    check_changing(program, step_graph)


def test_batch_norm_in_two_layouts() -> None:
    """Where torch's kernel takes input and gradient to be in different layouts, ours is right and eager's is not."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((1, 4, 2, 1), 2, 2))

    def normalized(x: torch.Tensor, *affine: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.batch_norm(x, None, None, *affine, training=True).sin(),)

    def fn(x: torch.Tensor, *affine: torch.Tensor) -> tuple[torch.Tensor]:
        return normalized(x.transpose(1, 2), *affine)

    def right(x: torch.Tensor, *affine: torch.Tensor) -> tuple[torch.Tensor]:
        return normalized(x.transpose(1, 2).contiguous(), *affine)

    given = [x, weight, bias]
    compiled, report = harness.compile_function(fn, given, 1, step_graph="split")
    compare(right, harness.copies(given, torch.float64), compiled, given)
    assert report.ort_runs > 0


@pytest.mark.slow
@settings(max_examples=1000, print_blob=True, **COMMON)
@given(PROGRAMS, st.sampled_from(["split", "joint"]))
def test_many_random_modules_on_changing_sizes(program: Program, step_graph: str) -> None:
    check_changing(program, step_graph)


@pytest.mark.slow
@settings(max_examples=2000, print_blob=True, **COMMON)
@given(PROGRAMS, st.sampled_from(["split", "joint"]))
def test_many_random_modules(program: Program, step_graph: str) -> None:
    check(program, step_graph)
