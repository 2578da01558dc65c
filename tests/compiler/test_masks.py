"""Masks are torch's, to the bit, and leave its generator where torch would."""

import functools

import pytest
import torch
import torch.nn.functional as F

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors import masks
from lightning_ort.compiler.executors.mask_kernel import MaskKernel
from lightning_ort.config import ORTConfig


@pytest.fixture
def drawn_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements were drawn, call for call."""
    if not masks.matches_torch():
        pytest.skip("torch draws otherwise on this processor")
    counts: list[int] = []
    fill = masks._fill
    monkeypatch.setattr(masks, "mask_kernel", functools.cache(MaskKernel))  # none that another test has compiled
    monkeypatch.setattr(masks, "_fill", lambda out, *args: counts.append(out.numel()) or fill(out, *args))
    return counts


@pytest.mark.parametrize("shape", [(4096,), (3, 32768), (7, 11, 13, 17), (5, 32768 + 1)])
@pytest.mark.parametrize("p", [0.9, 0.5, 1 / 3, 1e-9, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_the_same_as_torch(shape: tuple[int, ...], p: float, dtype: torch.dtype, drawn_here: list[int]) -> None:
    x = torch.empty(shape, dtype=dtype)
    torch.manual_seed(1)
    expected, state = torch.bernoulli(x, p), torch.get_rng_state()
    torch.manual_seed(1)
    drawn = masks.bernoulli(x, p)
    assert drawn_here == [x.numel()]
    assert drawn.dtype == expected.dtype
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "x",
    [torch.empty(100), torch.empty(0), torch.empty(64, 100).t(), torch.empty(8, 16, 10, 10).permute(0, 3, 1, 2)],
    ids=["few", "none", "transposed", "permuted"],
)
def test_left_to_torch(x: torch.Tensor, drawn_here: list[int]) -> None:
    torch.manual_seed(1)
    expected = torch.bernoulli(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(masks.bernoulli(x, 0.5), expected)
    assert drawn_here == []


def test_another_way_of_drawing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = masks._fill
    monkeypatch.setattr(masks, "_fill", lambda out, p, generator: fill(out, 1 - p, generator))
    assert not masks.matches_torch.__wrapped__()


def test_dropout_of_a_compiled_function(drawn_here: list[int]) -> None:
    w = torch.randn(64, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x @ w, 0.1).relu() @ w, 0.5) + torch.rand(64)

    x = torch.randn(100, 64)
    torch.manual_seed(3)
    expected = function(x), torch.rand(5)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    compiled = torch.compile(function, backend=backend)
    for _ in range(2):
        torch.manual_seed(3)
        torch.testing.assert_close((compiled(x), torch.rand(5)), expected)
    assert backend.report.ort_runs > 0
    assert drawn_here == [6400, 6400] * 2


def test_masks_among_other_random_numbers_are_drawn_in_their_order(drawn_here: list[int]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1) @ torch.rand(512, 512) @ F.dropout(x, 0.3).t()

    x = torch.randn(512, 512)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    compiled = torch.compile(function, backend=backend)
    for _ in range(3):
        torch.manual_seed(5)
        expected = function(x), torch.rand(3)
        torch.manual_seed(5)
        torch.testing.assert_close((compiled(x), torch.rand(3)), expected, rtol=1e-4, atol=1e-3)
    assert backend.report.ort_runs > 0
    assert drawn_here == [512 * 512] * 6
