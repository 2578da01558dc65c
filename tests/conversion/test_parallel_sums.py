"""Sums at repeated places, of which onnxruntime's threads lose parts where there are many."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend

WIDTH = 256

SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "aten.embedding_dense_backward.default": lambda x, rows, places: F.embedding(places, rows) * x,
    "aten.index_put.default": lambda x, rows, places: rows.index_put((places,), x * 2, accumulate=True),
    "aten.index_add.default": lambda x, rows, places: rows.index_add(0, places, x * 2),
    "aten.unfold_backward.default": lambda x, rows, places: x.unfold(1, 3, 1) * 2,
}


def gradients(name: str, x: Tensor, rows: Tensor, places: Tensor, backend: ORTBackend | None) -> list[Tensor]:
    run = SUMS[name] if backend is None else torch.compile(SUMS[name], backend=backend)
    leaves = [x.clone().requires_grad_(), rows.clone().requires_grad_()]
    result = run(*leaves, places)
    result.tanh().sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def ops(backend: ORTBackend, executor: str) -> set[str]:
    regions = [region for graph in backend.report.graphs for region in graph.regions if region.executor == executor]
    return {op for region in regions for op in region.ops}


@pytest.mark.parametrize("name", SUMS)
def test_many_summands_are_added_up_in_torch(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, rows = torch.randn(4096, WIDTH, generator=generator), torch.randn(50, WIDTH, generator=generator)
    places = torch.randint(0, 50, (4096,), generator=generator)
    backend = ORTBackend(ORTConfig(placement="always", debug={"intra_op_threads": 2, "min_region_nodes": 1}))
    got = gradients(name, x, rows, places, backend)
    for value, expected in zip(got, gradients(name, x, rows, places, None), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    assert backend.report.ort_runs > 0
    assert name in ops(backend, "torch")
    reasons = [region.node_reasons.get(name) for graph in backend.report.graphs for region in graph.regions]
    assert any("threads lose parts of large sums" in str(reason) for reason in reasons)


@pytest.mark.parametrize("name", SUMS)
def test_a_few_are_added_up_in_one_thread(name: str) -> None:
    """The same bits each time: two threads would differ sooner or later, with three places for all."""
    generator = torch.Generator().manual_seed(0)
    count = 256 if name != "aten.unfold_backward.default" else 85
    x, rows = torch.randn(count, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)
    places = torch.randint(0, 3, (count,), generator=generator)
    backend = ORTBackend(ORTConfig(placement="always", debug={"intra_op_threads": 2, "min_region_nodes": 1}))
    first = gradients(name, x, rows, places, backend)
    for value, expected in zip(first, gradients(name, x, rows, places, None), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    assert name in ops(backend, "ort")
    for _ in range(20):
        assert all(map(torch.equal, gradients(name, x, rows, places, backend), first))


def test_a_symbolic_number_of_summands_is_added_up_in_torch() -> None:
    def add(x: Tensor, places: Tensor) -> Tensor:
        return torch.zeros(3, WIDTH).index_add(0, places, x * 2)

    backend = ORTBackend(ORTConfig(placement="always", debug={"min_region_nodes": 1}))
    compiled = torch.compile(add, backend=backend, dynamic=True)
    x, places = torch.randn(7, WIDTH), torch.randint(0, 3, (7,))
    torch.testing.assert_close(compiled(x, places), add(x, places))
    assert backend.report.ort_runs > 0
    assert "aten.index_add.default" in ops(backend, "torch")
