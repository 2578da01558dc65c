"""Run a call on ONNX Runtime and in eager, and let float64 say which differences are more than eager's own rounding."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager

from lightning_ort.compiler.report import CompileReport
from tests.conversion.changing_sizes import compile_for, other_sizes, resized, sizes_of
from tests.conversion.harness import as_graph, compile_function
from tests.conversion.opinfo_cases import Case, copies, with_values
from tests.conversion.opinfo_judge import Leeway, bits, close_at_once, judge, real, same_values, structure


class Status(enum.Enum):
    """How a call ended."""

    OK = "as eager"
    IN_TORCH = "nothing for ONNX Runtime"
    NOT_TRACED = "not captured by torch"
    EAGER_FAILS = "eager raises"
    UNDEFINED = "eager differs from itself"
    TORCH = "torch's own capture differs alike"
    EXPLAINED = "differs for a known reason"
    MISMATCH = "mismatch"
    CRASH = "crash"
    TIMEOUT = "timeout"
    EAGER_CRASH = "eager ends the process"


@dataclass(frozen=True)
class Outcome:
    """What one call gave.

    Args:
        status: How it ended.
        values: ``"plain"`` or the kind of special values.
        detail: What differs.
        forward: Whether ONNX Runtime ran in the forward pass.
        backward: The same for the backward pass.
        ops: The ATen ops that it ran.
    """

    status: Status
    values: str = "plain"
    detail: str = ""
    forward: bool = False
    backward: bool = False
    ops: tuple[str, ...] = ()


@dataclass
class _Run:
    """What a call left: what it returned, the gradients, and its inputs, which it may have written to."""

    outputs: list[Any]
    gradients: list[Any]
    inputs: list[Any]

    def named(self) -> list[tuple[str, Any]]:
        groups = (("output", self.outputs), ("gradient", self.gradients), ("input", self.inputs))
        return [(f"{what} {index}", value) for what, values in groups for index, value in enumerate(values)]


def check(
    case: Case, kernels: str = "auto", values: Sequence[str] = (), at: Callable[[str], None] = lambda stage: None
) -> list[Outcome]:
    """Compare a call with eager.

    Args:
        case: The call.
        kernels: Of :class:`~lightning_ort.config.ORTConfig`.
        values: Kinds of special values to call it with besides its own.
        at: Told what comes next, for whoever has to say where the process ended.

    Returns:
        An outcome for its own values, and, where ONNX Runtime runs anything, one for each kind.
    """
    at("eager")
    eager = _attempt(case.fn, copies(case.inputs))
    if isinstance(eager, Exception):
        return [Outcome(Status.EAGER_FAILS, detail=_text(eager))]
    at("compile")

    def compiled_anew() -> tuple[Callable[..., Any], CompileReport]:
        return compile_function(case.fn, copies(case.inputs), len(eager.outputs), kernels=kernels, cache_dir=None)

    try:
        compiled, report = compiled_anew()
    except Exception as error:
        status = Status.NOT_TRACED if _torch_fails(case, len(eager.outputs)) else Status.MISMATCH
        return [Outcome(status, detail=f"compile: {_text(error)}")]
    failed = [f"{entry.where}: {entry.reason}" for entry in report.fallbacks if entry.reason.type.is_failure]
    if failed:
        return [Outcome(Status.MISMATCH, detail=failed[0])]
    if not any(region.executor == "ort" for graph in report.graphs for region in graph.regions):
        return [Outcome(Status.IN_TORCH)]
    outcomes = []
    for kind in ("plain", *values):
        inputs = case.inputs if kind == "plain" else with_values(case.inputs, kind)
        if report.fallbacks:  # a graph that failed is not run again
            compiled, report = compiled_anew()
        if inputs is not None:
            outcomes.append(_compare(case, inputs, compiled, report, kind, at))
    return outcomes


def check_sizes(case: Case, kernels: str = "auto", at: Callable[[str], None] = lambda stage: None) -> list[Outcome]:
    """Compare a call, and others whose inputs differ in one size, with eager; the arguments are those of :func:`check`.

    It is the first size of the inputs for which eager takes other values: two others, one and none.
    """
    for size in sizes_of(case.inputs):
        calls = [case.inputs]
        for new in other_sizes(size):
            given = resized(case.inputs, size, new)
            at(f"eager with {new} for {size}")
            if not isinstance(_attempt(case.fn, copies(given)), Exception):
                calls.append(given)
        if len(calls) > 1:
            break
    else:
        return []
    compiled, backend = compile_for(case.fn, size, kernels=kernels)
    outcomes = []
    for inputs in calls:
        at(f"compile for {size}")
        outcome = _compare(case, inputs, compiled, backend.report, "plain", at)
        if outcome.status is Status.MISMATCH and _torch_fails(replace(case, inputs=inputs), 1):
            outcome = replace(outcome, status=Status.NOT_TRACED)
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        outcomes.append(replace(outcome, detail=f"{shapes}: {outcome.detail}" if outcome.detail else "", ops=()))
    ran = any(region.executor == "ort" for graph in backend.report.graphs for region in graph.regions)
    return outcomes if ran or any(outcome.detail for outcome in outcomes) else [Outcome(Status.IN_TORCH)]


def _compare(
    case: Case,
    inputs: list[torch.Tensor],
    compiled: Callable[..., Any],
    report: CompileReport,
    kind: str,
    at: Callable[[str], None],
) -> Outcome:
    at(f"eager on {kind}")
    eager = _attempt(case.fn, copies(inputs))
    before = _runs(report)
    at(f"run on {kind}")
    ours = _attempt(compiled, copies(inputs))
    forward, backward = (after > old for after, old in zip(_runs(report), before, strict=True))
    failed = [str(entry.reason) for entry in report.fallbacks if entry.reason.type.is_failure]
    at(f"compare on {kind}")
    if isinstance(eager, Exception):
        difference = None if isinstance(ours, Exception) else f"eager raises {_text(eager)}"
        status = Status.EAGER_FAILS
    elif failed:
        difference, status = failed[0], Status.OK
    elif isinstance(ours, Exception):
        difference, status = f"raises {_text(ours)}", Status.OK
    else:
        difference, status = _difference(case, inputs, ours, eager, kind), Status.OK
    if difference is not None:
        status = Status.MISMATCH
        if isinstance(eager, _Run) and _differs_from_itself(case.fn, inputs, eager):
            status = Status.UNDEFINED
        elif _torch_differs(case, inputs, ours, eager, kind, bool(failed)):
            status = Status.TORCH
    return Outcome(status, kind, difference or "", forward, backward, _ops_on_ort(report) if kind == "plain" else ())


def _ops_on_ort(report: CompileReport) -> tuple[str, ...]:
    regions = [region for graph in report.graphs for region in graph.regions if region.executor == "ort"]
    return tuple(sorted({op for region in regions for op in region.ops}))


def _runs(report: CompileReport) -> tuple[int, int]:
    """How often ONNX Runtime ran in forward and in backward graphs."""
    counts = {False: 0, True: 0}
    for graph in report.graphs:
        counts["backward" in graph.name] += sum(region.runs for region in graph.regions)
    return counts[False], counts[True]


def _attempt(fn: Callable[..., Any], inputs: list[torch.Tensor], **kwargs: Any) -> _Run | Exception:
    try:
        return _run(fn, inputs, **kwargs)
    except Exception as error:
        return error


def _run(fn: Callable[..., Any], inputs: list[torch.Tensor], *, seed: int = 0, move: float = 0.0) -> _Run:
    """Call a function and its backward pass, with what comes from outside multiplied by 1 + or - ``move``."""
    generator = torch.Generator().manual_seed(7)
    if move:
        with torch.no_grad():
            for x in dict.fromkeys(inputs):
                if (x.is_floating_point() or x.is_complex()) and 0 not in x.stride():
                    x.mul_(1 + move * _signs(x, generator))
    torch.manual_seed(seed)
    leaves = list(dict.fromkeys(x for x in inputs if x.requires_grad))
    outputs = list(fn(*inputs))
    result = _Run(outputs, [], [x.detach() for x in inputs])
    differentiable = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    if leaves and differentiable:
        generator = torch.Generator().manual_seed(8)
        cotangents = []
        for out in differentiable:
            dtype = torch.complex64 if out.is_complex() else torch.float32  # the same numbers in every dtype
            cotangent = torch.randn(out.shape, dtype=dtype, generator=generator).to(out.dtype)
            cotangents.append(cotangent * (1 + move * _signs(cotangent, generator)) if move else cotangent)
        result.gradients = list(torch.autograd.grad(differentiable, leaves, cotangents, allow_unused=True))
    return result


def _signs(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8) * 2 - 1


def _differs_from_itself(fn: Callable[..., Any], inputs: list[torch.Tensor], eager: _Run) -> bool:
    again = _attempt(fn, copies(inputs))
    return isinstance(again, Exception) or any(
        structure(a, b) or not torch.equal(bits(a), bits(b))
        for (_, a), (_, b) in zip(again.named(), eager.named(), strict=True)
        if isinstance(a, torch.Tensor)
    )


def _torch_fails(case: Case, num_outputs: int) -> bool:
    """Whether torch cannot capture a call either, with nothing of ours in the way."""
    try:
        inputs = copies(case.inputs)
        aot_eager(as_graph(case.fn, len(inputs), num_outputs), inputs)
    except Exception:
        return True
    return False


def _torch_differs(
    case: Case, inputs: list[torch.Tensor], ours: _Run | Exception, eager: _Run | Exception, kind: str, failed: bool
) -> bool:
    """Whether the graph that torch captures, run by torch, differs from eager as well, and as ours does.

    Where ours ``failed``, that is whether theirs raises, and eager, which ran instead, gave eager's results.
    """

    def captured(*given: torch.Tensor) -> Any:
        num_outputs = len((eager if isinstance(ours, Exception) else ours).outputs)  # type: ignore[union-attr]
        return aot_eager(as_graph(case.fn, len(inputs), num_outputs), copies(inputs))(*given)

    theirs = _attempt(captured, copies(inputs))
    if failed and isinstance(ours, _Run) and isinstance(eager, _Run):
        return isinstance(theirs, Exception) and _difference(case, inputs, ours, eager, kind) is None
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        return isinstance(theirs, Exception) and isinstance(ours, Exception)
    if isinstance(eager, Exception):
        return True
    differs = _difference(case, inputs, theirs, eager, kind) is not None
    return differs and _difference(case, inputs, ours, theirs, kind) is None


def _difference(case: Case, inputs: list[torch.Tensor], ours: _Run, eager: _Run, kind: str) -> str | None:
    """What differs by more than rounding, or ``None``."""
    adds = not case.elementwise
    leeway = Leeway(kind == "plain" or (kind == "huge" and adds), False, kind == "huge" and adds)
    pairs = list(zip(ours.named(), eager.named(), strict=False))
    if len(ours.named()) != len(eager.named()):
        return f"{len(ours.gradients)} gradients instead of {len(eager.gradients)}"
    doubtful = []
    for index, ((name, got), (_, want)) in enumerate(pairs):
        if not isinstance(want, torch.Tensor):
            if got is not want and got != want and not (got != got and want != want):
                return f"{name}: {got} instead of {want}"
            continue
        # a gradient is added to .grad, whatever its strides
        if (problem := structure(got, want, strides=name.startswith("output"))) is not None:
            return f"{name}: {problem}"
        if not close_at_once(got, want):
            doubtful.append(index)
    if not doubtful:
        return None
    references = _references(case.fn, inputs, eager)
    if case.elementwise and inputs[0].shape == eager.outputs[0].shape and not inputs[0].is_complex():
        leeway = replace(leeway, small=torch.nan_to_num(real(inputs[0]).abs(), nan=0.0).clamp(max=1.0))
    if case.reduces:
        sizes = real(inputs[0]).abs()
        small = sizes[sizes < 100]  # special values aside, which are far below or beyond
        leeway = replace(leeway, small=float(small.max()) if small.numel() else 0.0)
    # where the places are not among what it returns, equal values are expected
    tied = case.ties and not any(x.dtype is torch.int64 for x in eager.outputs)
    for index in doubtful:
        (name, got), (_, want) = pairs[index]
        if case.ties and want.dtype is torch.int64 and name.startswith("output") and same_values(inputs[0], got, want):
            tied = True
            continue
        if tied and name.startswith("gradient"):  # it goes where the value was taken
            continue
        if not name.startswith("output"):
            # the gradient of what was broadcast is a sum
            overflow = leeway.overflow or (kind == "huge" and any(x.shape != inputs[0].shape for x in inputs))
            leeway = replace(leeway, gradient=name.startswith("gradient"), overflow=overflow, small=0.0)
        problem = judge(got, want, [reference[index] for reference in references], leeway)
        if problem is not None:
            return f"{name}: {problem}"
    return None


def _references(fn: Callable[..., Any], inputs: list[torch.Tensor], eager: _Run) -> list[list[Any]]:
    """The results in float64, then with inputs moved by as much as rounding may; none where a generator draws."""
    other_seed = _attempt(fn, copies(inputs), seed=1)
    is_random = isinstance(other_seed, Exception) or _difference_of_bits(other_seed, eager)
    rounding = max((torch.finfo(x.dtype).eps for x in inputs if x.is_floating_point()), default=0.0)
    found = []
    for move in (0.0, rounding, -rounding):
        run = _attempt(fn, copies(inputs, torch.float64), move=move)
        if isinstance(run, Exception) or len(run.named()) != len(eager.named()):
            break
        found.append([value for _, value in run.named()])
    if is_random and found and not _same_draws(eager.outputs, found[0]):
        return []
    return found


def _same_draws(results: list[Any], wide: list[Any]) -> bool:
    """Whether what was drawn in float64 is what was drawn in float32, as the results show."""
    return all(
        torch.allclose(real(x), real(y), rtol=1e-3, atol=1e-3 * float(real(y).abs().nan_to_num().max()), equal_nan=True)
        for x, y in zip(results, wide, strict=False)
        if isinstance(x, torch.Tensor) and x.numel()
    )


def _difference_of_bits(a: _Run, b: _Run) -> bool:
    return any(
        isinstance(x, torch.Tensor) and (structure(x, y) is not None or not torch.equal(bits(x), bits(y)))
        for (_, x), (_, y) in zip(a.named(), b.named(), strict=False)
    )


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
