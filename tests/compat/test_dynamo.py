"""Each private name of ``torch._dynamo`` that is used means what it did in the torch that it was read in."""

import collections
import copy
import gc
import inspect
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning_utilities.core.imports import RequirementCache
from torch import nn
from torch.utils._sympy.interp import handlers
from torch.utils._sympy.reference import TensorReferenceAnalysis

from lightning_ort.compat import dynamo
from lightning_ort.compat.torch import is_wrapped

LOGGERS = [logging.getLogger(f"torch._dynamo.{name}") for name in ("convert_frame", "exc")]


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What dynamo logs; nothing of it is shown."""
    kept: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        kept.append(record)
        return False

    for logger in LOGGERS:
        logger.addFilter(keep)
    yield kept
    for logger in LOGGERS:
        logger.removeFilter(keep)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def halves(x: torch.Tensor, by: int = 2) -> torch.Tensor:
    y = x / by
    torch._dynamo.graph_break()
    return y + 1


def isolated(function: Callable[..., Any], backend: Any = "eager", **kwargs: Any) -> Any:
    return dynamo.compile_isolated(function, backend=backend, **kwargs)


def test_compile_callbacks() -> None:
    ids: list[str | None] = []
    starts, ends = dynamo.COMPILE_CALLBACKS
    for callbacks in (starts, ends):
        callbacks.append(lambda args: ids.append(dynamo.compile_id(args)))
    isolated(double)(torch.ones(2))
    first, last = ids
    assert first == last
    assert first is not None
    torch._dynamo.reset()
    assert not starts
    assert not ends
    assert (starts, ends) == dynamo.COMPILE_CALLBACKS


def test_a_callback_may_be_about_something_else_than_a_frame() -> None:
    other = dynamo.CallbackArgs(dynamo.CallbackTrigger.LAZY_BACKWARD, "0/0")
    assert dynamo.compile_id(other) is None


def test_recompiles_are_counted() -> None:
    compiled, marker = isolated(halves, dynamic=False), dynamo.last_compilation()
    compiled(torch.ones(2))
    assert dynamo.compilations_since(marker, None, ()) == (0, None, None)
    marker = dynamo.last_compilation()
    compiled(torch.ones(3))  # its frame, and the rest of it
    assert dynamo.compilations_since(marker, None, ()) == (2, None, None)


def test_another_backend_for_the_same_code_is_no_recompile() -> None:
    compiled = [torch.compile(double, backend=lambda gm, inputs: gm.forward) for _ in range(2)]  # not isolated
    marker = dynamo.last_compilation()
    for each in compiled:
        each(torch.ones(2))
    assert len(dynamo._compilations_since(marker, ())) == 2
    assert dynamo.compilations_since(marker, None, ()) == (0, None, None)


def test_compilations_are_known_by_their_ids() -> None:
    ids: list[Any] = []
    dynamo.COMPILE_CALLBACKS[0].append(lambda args: ids.append(dynamo.compile_id(args)))
    compiled, marker = isolated(double, dynamic=False), dynamo.last_compilation()
    for size in (2, 3):
        compiled(torch.ones(size))
    assert dynamo.compilations_since(marker, None, ())[0] == 1
    assert dynamo.compilations_since(marker, None, ids) == (0, None, None)


def breaks_in_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def rest_breaks_in_loop(x: torch.Tensor) -> torch.Tensor:
    x = x * 3
    torch._dynamo.graph_break()
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


@pytest.mark.parametrize(("function", "rest"), [(breaks_in_loop, False), (rest_breaks_in_loop, True)])
def test_what_dynamo_skips_is_said(function: Any, rest: bool) -> None:
    marker = dynamo.last_compilation()
    isolated(function)(torch.ones(2))
    _, skipped, skipped_rest = dynamo.compilations_since(marker, function.__code__, ())
    assert (skipped is None) is rest
    reason = skipped_rest if rest else skipped
    assert reason is not None
    assert dynamo.compilations_since(marker, double.__code__, ()) == (0, None, None)
    assert "graph break" in dynamo.explanation(reason)


def test_graph_breaks() -> None:
    before = dynamo.graph_breaks()
    isolated(halves)(torch.ones(2))
    *others, reason = dynamo.graph_breaks()
    assert others == before
    assert not dynamo.is_at_autograd_grad(reason)

    def differentiates(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * x).sum(), x)[0]

    before = dynamo.graph_breaks()
    isolated(differentiates)(torch.ones(2, requires_grad=True))
    assert any(map(dynamo.is_at_autograd_grad, dynamo.graph_breaks()[len(before) :]))


def test_suppressed_error(records: list[logging.LogRecord]) -> None:
    def failing(gm: Any, inputs: Any) -> Any:
        raise KeyError("ours")

    with dynamo.settings_for_steps(()):
        isolated(double, failing)(torch.ones(2))
    (error,) = filter(None, map(dynamo.suppressed_error, records))
    assert isinstance(dynamo.backend_error(error), KeyError)
    assert dynamo.backend_error(KeyError()) is dynamo.backend_error(None) is None
    assert not any(map(dynamo.recompile_limit, records))


def test_recompile_limit(records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "RECOMPILE_LIMIT", 2)
    compiled = isolated(halves, dynamic=False)
    with dynamo.settings_for_steps(()):
        for by in range(1, 6):
            compiled(torch.ones(2), by)
    limit, function, reason = next(filter(None, map(dynamo.recompile_limit, records)))
    assert str(limit) == "2"
    assert "halves" in str(function)
    assert "by" in str(reason)
    assert not any(map(dynamo.suppressed_error, records))


@pytest.mark.skipif(
    "log_warning" in inspect.signature(torch._dynamo.exc.unimplemented_with_warning).parameters,
    reason="torch 2.15 no longer logs it",
)
def test_untraceable_operation(records: list[logging.LogRecord]) -> None:
    def writes(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = x * 2
        out[mask] = out.sum()
        return out

    isolated(writes, "aot_eager")(torch.ones(3, requires_grad=True), torch.tensor([True, False, True]))
    assert {*filter(None, map(dynamo.untraceable_operation, records))} == {"aten.nonzero.default"}


def test_explanation() -> None:
    assert dynamo.explanation("First.\n  Explanation: because of this.\n  Hint: none") == "because of this."
    assert dynamo.explanation("Only this.\nAnd more.") == "Only this."
    assert dynamo.explanation(" ") == "no message"
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(halves, backend="eager", fullgraph=True)(torch.ones(2))
    assert "\n" not in dynamo.explanation(str(caught.value))
    assert "Explanation: " in str(caught.value)


def test_settings_hold_within_their_context() -> None:
    config = torch._dynamo.config
    names = ("allow_unspec_int_on_nn_module", "suppress_errors", "allow_rnn")
    before = {name: getattr(config, name) for name in (*names, "ignore_logging_functions", "trace_numpy")}
    assert not all(before[name] for name in names)
    with dynamo.settings_for_steps([print]):
        assert all(getattr(config, name) for name in names)
        assert not config.trace_numpy
        assert print in config.ignore_logging_functions
    assert {name: getattr(config, name) for name in before} == before


def test_a_counter_does_not_compile_again_and_again() -> None:
    class Counts(nn.Module):
        steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.steps

    module = Counts()
    compiled, marker = isolated(module.forward), dynamo.last_compilation()
    for step in range(6):
        module.steps = step
        with dynamo.settings_for_steps(()):
            assert compiled(torch.zeros(1)).item() == step
    assert dynamo.compilations_since(marker, None, ())[0] <= 2


def test_wrapped_functions() -> None:
    assert not is_wrapped(double)
    assert is_wrapped(torch.compile(double, backend="eager"))
    assert is_wrapped(torch.compiler.disable(double))


def test_compiled_modules() -> None:
    module = nn.Linear(2, 2)
    assert not dynamo.is_compiled_module(module)
    assert dynamo.is_compiled_module(torch.compile(module, backend="eager"))


@pytest.mark.parametrize("function", [double, halves])
def test_released_regions_compile_again(function: Any) -> None:
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = isolated(function, backend)
    compiled(torch.ones(2))
    count = len(graphs)
    regions = [dynamo.region_of(compiled)]
    dynamo.release_regions(regions)
    assert regions == []
    compiled(torch.ones(2))
    assert len(graphs) == 2 * count
    dynamo.release_regions([])
    compiled(torch.ones(2))
    assert len(graphs) == 2 * count


@pytest.mark.parametrize("function", [double, halves])
def test_other_regions_of_the_same_code_are_not_released(function: Any) -> None:
    first, second = isolated(function), isolated(function)
    assert dynamo.region_of(first) != dynamo.region_of(second)


@pytest.mark.parametrize("function", [double, halves])
def test_released_regions_free_their_graphs(function: Any) -> None:
    runs = []

    class Run:
        def __init__(self, gm: Any) -> None:
            self.forward = gm.forward
            runs.append(weakref.ref(self))

        def __call__(self, *args: Any) -> Any:
            return self.forward(*args)

    def backend(gm: Any, inputs: Any) -> Any:
        return Run(gm)

    compiled = isolated(function, backend)
    compiled(torch.ones(2))
    dynamo.release_backend(backend)
    dynamo.release_regions([dynamo.region_of(compiled)])
    gc.collect()
    assert runs
    assert not any(run() for run in runs)


def test_a_released_backend_is_not_kept_for_the_reset() -> None:
    resets = []

    class Backend:
        def __call__(self, gm: Any, inputs: Any) -> Any:
            return gm.forward

        def reset(self) -> None:
            resets.append(self)

    released, kept = Backend(), Backend()
    for backend in (released, kept):
        isolated(double, backend)(torch.ones(2))
    dynamo.release_backend(released)
    torch._dynamo.reset()
    assert resets == [kept]


def test_break_frames() -> None:
    before = len(dynamo.graph_breaks())
    isolated(halves)(torch.ones(2))
    ((reason, frames),) = dynamo.break_frames(before)
    assert reason == dynamo.graph_breaks()[-1]
    file, line = frames[-1]
    assert file == __file__
    assert halves.__code__.co_firstlineno < line < halves.__code__.co_firstlineno + 10


def test_prepare_divergences(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributions import Normal, kl, kl_divergence

    known: dict[Any, Any] = {}
    monkeypatch.setattr(kl, "_KL_MEMOIZE", known)
    kl_divergence(Normal(0.0, 1.0), Normal(1.0, 2.0))
    found = dict(known)
    known.clear()
    dynamo.prepare_divergences()
    assert found.items() <= known.items()
    for (left, right), function in known.items():
        assert kl._dispatch_kl(left, right) is function


def test_prepare_numbers() -> None:
    """Without it a graph that tensors are multiplied in with `step % 4` fails as a whole."""
    dynamo.prepare_numbers()
    for name in handlers().values():
        assert callable(getattr(TensorReferenceAnalysis, name))
    with pytest.raises(NotImplementedError):
        TensorReferenceAnalysis.python_mod(1, 2)


def test_numbers_in_graphs() -> None:
    for numbers in (True, False):
        with dynamo.settings_for_steps([], numbers):
            assert torch._dynamo.config.capture_scalar_outputs is numbers
    assert not torch._dynamo.config.capture_scalar_outputs


def test_is_last_graph() -> None:
    last: list[bool] = []

    def backend(gm: Any, inputs: Any) -> Any:
        last.append(dynamo.is_last_graph(gm))
        return gm.forward

    torch.compile(halves, backend=backend)(torch.ones(2))
    assert last == [False, True]


def test_outside_graphs() -> None:
    def copied(x: torch.Tensor) -> Any:
        return x + 1, copy.deepcopy(collections.OrderedDict(a=1))

    for outside in ([copy.deepcopy], [copy.copy, copy.deepcopy]):
        torch._dynamo.reset()
        with dynamo.outside_graphs(*outside), dynamo.outside_graphs(copy.deepcopy):  # as two threads may have it
            assert isolated(copied)(torch.ones(2))[1] == {"a": 1}
    torch._dynamo.reset()
    if not RequirementCache("torch>=2.14"):  # which copies it right
        assert isolated(copied)(torch.ones(2))[1] == {}


@pytest.mark.parametrize(
    "variable", ["TORCHDYNAMO_DISABLE", pytest.param("TORCH_COMPILE_DISABLE", marks=pytest.mark.slow)]
)
def test_nothing_is_compiled_where_it_is_switched_off(variable: str) -> None:
    script = "import torch; torch.compile(torch.sin, backend=lambda gm, inputs: 1 / 0)(torch.ones(1)); print('ran')"
    result = subprocess.run([sys.executable, "-c", script], env={**os.environ, variable: "1"}, capture_output=True)
    assert result.stdout.decode().split() == ["ran"], result.stderr
