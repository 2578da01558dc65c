"""Random modules: loss and gradients on ONNX Runtime are as near to float64 as eager's are."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compiler.random_modules import PROGRAMS, Program
from tests.conversion import harness

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
    return max((float(x.detach().abs().max()) for x in tensors if x is not None and x.numel()), default=0.0)


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
    single = harness.copies(exact, torch.float32)
    expected = harness.run(fn, harness.copies(exact))
    eager = [harness.run(fn, jittered(single, seed)) for seed in range(4)]  # the first as it is
    given = harness.copies(single)
    compiled, report = harness.compile_function(fn, given, 1, step_graph=step_graph)
    actual = harness.run(compiled, given)

    assert not [entry for entry in report.fallbacks if entry.reason.type.is_failure], report.fallbacks
    assert report.ort_runs > 0, report.to_text()
    assert (report.graphs[0].name == "step_0") == (step_graph == "joint")
    for kind in ("outputs", "gradients", "inputs"):  # the inputs for the buffers, which a batch norm updates
        wants, gots = getattr(expected, kind), getattr(actual, kind)
        likes = zip(*(getattr(result, kind) for result in eager), strict=True)
        scale = max(largest(wants), SMALL)
        for index, (want, got, like) in enumerate(zip(wants, gots, likes, strict=True)):
            if want is None:
                assert got is None, f"{kind} {index}"
                continue
            error, *errors = (largest([value.double() - want]) for value in (got, *like))
            allowed = max(errors)
            assert error <= TIMES_EAGER * allowed + OF_LARGEST * scale, f"{kind} {index}: {error}, eager {allowed}"


COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=100, derandomize=True, **COMMON)
@given(PROGRAMS)
def test_random_modules(program: Program) -> None:
    check(program, "split")


@settings(max_examples=100, derandomize=True, **COMMON)
@given(PROGRAMS)
def test_random_modules_as_one_graph(program: Program) -> None:
    check(program, "joint")


@pytest.mark.slow
@settings(max_examples=2000, print_blob=True, **COMMON)
@given(PROGRAMS, st.sampled_from(["split", "joint"]))
def test_many_random_modules(program: Program, step_graph: str) -> None:
    check(program, step_graph)
