"""An index that eager refuses is refused: with eager's error, and without a word about ONNX Runtime."""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.config import ORTConfig
from tests.conversion.harness import compile_function

X = torch.arange(12.0).view(4, 3)

# what eager refuses a negative index of
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gather": lambda x, i: x.gather(0, i.view(1, 1)),
    "gather_last": lambda x, i: x.t().gather(-1, i.view(1, 1)),
    "index_select": lambda x, i: x.index_select(0, i),
    "scatter": lambda x, i: x.scatter(0, i.view(1, 1), torch.ones(1, 1)),
    "scatter_value": lambda x, i: x.scatter(0, i.view(1, 1), 5.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i.view(1, 1), torch.ones(1, 1)),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i.view(1, 1), torch.ones(1, 1), "amax"),
    "scatter_mean": lambda x, i: x.scatter_reduce(0, i.view(1, 1), torch.ones(1, 1), "mean", include_self=False),
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(1, 3)),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(1, 3)),
    "embedding": lambda x, i: F.embedding(i, x),
    "nll_loss": lambda x, i: F.nll_loss(x.t()[:1], i),
    "nll_loss_images": lambda x, i: F.nll_loss(x.t()[:1].unsqueeze(-1), i.view(1, 1)),
    "cross_entropy": lambda x, i: F.cross_entropy(x.t()[:1], i, torch.ones(4)),
}
# these count from the end, as eager does
FROM_THE_END: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda x, i: x[i] * 2,
    "index_pairs": lambda x, i: x[i, i + 1] * 2,
    "index_put": lambda x, i: x.index_put((i,), torch.ones(1, 3)),
    "index_put_add": lambda x, i: x.index_put((i,), torch.ones(1, 3), accumulate=True),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
}


def _error(call: Callable[[], object]) -> tuple[type[BaseException], str]:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        call()
    return caught.type, str(caught.value)


@pytest.mark.parametrize("fallback", [pytest.param("warn", marks=pytest.mark.slow), "raise"])
@pytest.mark.parametrize("bad", [-1, 4, *(pytest.param(bad, marks=pytest.mark.slow) for bad in (-5, 2**40, -(2**63)))])
@pytest.mark.parametrize("name", OPS)
def test_eager_raises(name: str, bad: int, fallback: str, caplog: pytest.LogCaptureFixture) -> None:
    _check(OPS[name], bad, fallback, caplog)


@pytest.mark.parametrize("bad", [4, -5, 2**40])
@pytest.mark.parametrize("name", FROM_THE_END)
def test_beyond_the_end(name: str, bad: int, caplog: pytest.LogCaptureFixture) -> None:
    _check(FROM_THE_END[name], bad, "raise", caplog)


def _check(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    bad: int,
    fallback: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, wrong = torch.tensor([1]), torch.tensor([bad])
    compiled, report = compile_function(lambda x, i: (function(x, i),), [X, good], 1, fallback=fallback, cache_dir=None)
    with caplog.at_level(logging.WARNING, "lightning_ort"):
        assert _error(lambda: compiled(X, wrong)) == _error(lambda: function(X, wrong))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert report.fallbacks == []
    assert report.ort_runs == 0
    torch.testing.assert_close(compiled(X, good)[0], function(X, good))  # the next batch runs as ever
    assert report.ort_runs == 1


# onnxruntime makes a slice of a range of indices, in which a negative bound counts from the end
RANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "backwards": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)].sum(1),
    "backwards_in_full": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)] * 2,
    "from_before_the_start": lambda x: x[torch.arange(1 - x.shape[0], 1)].sum(0),
    "forwards": lambda x: x[torch.arange(1, x.shape[0], 2)].sum(0),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_of_indices(name: str) -> None:
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, fallback="raise", debug={"min_region_nodes": 1}))
    compiled = torch.compile(RANGES[name], backend=backend, dynamic=True)
    for shape in ((4, 3), (5, 7)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), RANGES[name](x))
    assert backend.report.ort_runs == 2


@pytest.mark.parametrize("name", FROM_THE_END)
def test_from_the_end(name: str) -> None:
    function, index = FROM_THE_END[name], torch.tensor([-2])
    compiled, report = compile_function(lambda x, i: (function(x, i),), [X, index], 1, fallback="raise", cache_dir=None)
    torch.testing.assert_close(compiled(X, index)[0], function(X, index))
    assert report.ort_runs == 1


@pytest.mark.parametrize("beyond", [-1, 4, -5, 2**40])
def test_wraps_around(beyond: int) -> None:
    x, index = X + 1, torch.tensor([[beyond]])
    compiled, report = compile_function(
        lambda x, i: (torch.take_along_dim(x, i, 0),), [x, index], 1, fallback="raise", cache_dir=None
    )
    torch.testing.assert_close(compiled(x, index)[0], torch.take_along_dim(x, index, 0))  # torch 2.13
    assert report.ort_runs == 1


def test_gradient_of_a_bad_label_is_never_taken() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    compiled, report = compile_function(
        lambda x, y: (F.cross_entropy(x, y),), [logits, torch.tensor([0, 1, 2])], 1, fallback="raise", cache_dir=None
    )
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        compiled(logits, torch.tensor([0, -1, 2]))
    compiled(logits, torch.tensor([0, 3, -100]))[0].backward()  # -100 is ignored by default
    assert report.ort_runs == 2
    assert logits.grad is not None
    assert bool((logits.grad[2] == 0).all())


def test_along_a_dimension_that_varies() -> None:
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, fallback="raise", debug={"min_region_nodes": 1}))
    compiled = torch.compile(lambda x, i: (x * 2).index_select(0, i) + 1, backend=backend, dynamic=True)
    for rows in (5, 7):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x, torch.tensor([rows - 1])), x[rows - 1 :] * 2 + 1)
        for bad in (-1, rows):
            with pytest.raises(IndexError):
                compiled(x, torch.tensor([bad]))
    assert backend.report.ort_runs == 2
