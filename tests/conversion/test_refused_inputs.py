"""What eager refuses is refused on ONNX Runtime, with eager's words."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.conversion.harness import compile_function


def loss(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.binary_cross_entropy(x, target),)


@pytest.mark.parametrize("wrong", [1.5, -1e-3, float("nan")])
def test_binary_cross_entropy_refuses_what_is_no_probability(wrong: float) -> None:
    target = torch.rand(6)
    compiled, report = compile_function(loss, [torch.rand(6), target], 1, fallback="raise")
    x = torch.rand(6)
    x[3] = wrong
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        compiled(x, target)
    x[3] = 0.5  # and it runs on with what is right
    torch.testing.assert_close(compiled(x, target)[0], loss(x, target)[0])
    assert report.ort_runs == 1


def bernoulli(p: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.bernoulli(p) * 2,)


def test_bernoulli_draws_and_refuses_as_eager() -> None:
    p = torch.rand(50)
    compiled, report = compile_function(bernoulli, [p], 1)
    torch.manual_seed(1)
    expected = bernoulli(p)[0]
    torch.manual_seed(1)
    assert torch.equal(compiled(p)[0], expected)
    assert report.ort_runs == 1
    with pytest.raises(RuntimeError, match="p_in"):
        compiled(p + 1)


def test_logsumexp_refuses_no_dimensions() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp() * 2, x.logsumexp(())

    x = torch.randn(3, 4)
    compiled, report = compile_function(fn, [x], 2, cache_dir=None)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        fn(x)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        compiled(x)
    assert report.fallbacks == []
    assert report.graphs[0].num_ort_nodes == 2  # the others, which torch's error came before


@pytest.mark.parametrize("make", [torch.linspace, torch.logspace])
def test_a_range_of_tensors_refuses_what_its_dtype_cannot_hold(make: Callable[..., torch.Tensor]) -> None:
    def fn(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor]:
        return (make(start, end, 5, dtype=torch.int32) + 1,)

    low, high, huge = (torch.tensor(value) for value in (0, 4, 2**40))
    compiled, report = compile_function(fn, [low, high], 1, cache_dir=None)
    assert torch.equal(compiled(low, high)[0], fn(low, high)[0])
    assert report.ort_runs == 1
    with pytest.raises(RuntimeError, match="without overflow"):
        fn(low, huge)
    with pytest.raises(RuntimeError, match="without overflow"):
        compiled(low, huge)
