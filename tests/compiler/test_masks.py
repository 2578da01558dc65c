"""Masks are torch's, to the bit, and leave its generator where torch would."""

import contextlib
import functools
import os
import threading

import pytest
import torch
import torch.nn.functional as F

from lightning_ort.compiler import mask_prefetcher as masks
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.mask_kernel import MaskKernel
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


# --- ahead

KINDS = [((300, 500), torch.bool, 0.9), ((10,), torch.bool, 0.5), ((64, 4096), torch.bool, 0.25)]


@pytest.fixture
def threads(drawn_here: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that drew, call for call."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    names: list[str] = []
    draw = masks.MaskPrefetcher._draw

    def note(self: masks.MaskPrefetcher, generator: torch.Generator) -> list[torch.Tensor]:
        names.append("main" if threading.current_thread() is threading.main_thread() else "ahead")
        return draw(self, generator)

    monkeypatch.setattr(masks.MaskPrefetcher, "_draw", note)
    return names


def drawn_by_torch() -> list[torch.Tensor]:
    return [torch.bernoulli(torch.empty(sizes, dtype=dtype), p) for sizes, dtype, p in KINDS]


def agree(ours: masks.MaskPrefetcher) -> None:
    """Draw with both from the same state, and go on from where torch leaves it."""
    state = torch.get_rng_state()
    drawn, left = ours(), torch.get_rng_state()
    torch.set_rng_state(state)
    assert all(map(torch.equal, drawn, drawn_by_torch()))
    assert torch.equal(torch.get_rng_state(), left)


def after_three_steps() -> masks.MaskPrefetcher:
    """Masks of which the next ones are there."""
    ours = masks.MaskPrefetcher(KINDS)
    torch.manual_seed(2)
    for _ in range(3):
        agree(ours)
    ours._prefetched[1].result()
    return ours


def test_masks_of_the_next_step_are_drawn_while_this_one_computes(threads: list[str]) -> None:
    ours = masks.MaskPrefetcher(KINDS)
    torch.manual_seed(2)
    for _ in range(5):
        agree(ours)
    ours._prefetched[1].result()  # the thread may still be at the last ones
    assert threads == ["main", "main", "ahead", "ahead", "ahead", "ahead"]


def test_what_others_draw_between_is_noticed(threads: list[str]) -> None:
    ours = after_three_steps()
    threads.clear()
    torch.rand(1)
    agree(ours)
    torch.manual_seed(7)
    agree(ours)
    assert threads == ["main", "main"]
    for _ in range(2):
        agree(ours)
    ours._prefetched[1].result()
    assert "ahead" in threads[2:]


def test_what_is_never_used_is_not_drawn(threads: list[str]) -> None:
    """As under activation checkpointing: each forward pass runs twice, from the same state."""
    ours = masks.MaskPrefetcher(KINDS)
    torch.manual_seed(2)
    for _ in range(6):
        state = torch.get_rng_state()
        agree(ours)
        torch.set_rng_state(state)
        agree(ours)
    assert threads.count("ahead") <= 1


def test_few_elements_or_one_thread_are_drawn_now(threads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = masks.MaskPrefetcher(KINDS[1:2])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = masks.MaskPrefetcher(KINDS)
    for ours in (few, alone):
        for _ in range(4):
            ours()
    assert set(threads) == {"main"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_draws_by_itself(threads: list[str]) -> None:
    ours = after_three_steps()
    child = os.fork()
    if child == 0:  # whatever happens, no test goes on here
        status = 1
        with contextlib.suppress(BaseException):
            for _ in range(4):
                agree(ours)
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    agree(ours)


def test_a_training_step_draws_ahead(threads: list[str]) -> None:
    w = torch.randn(64, 64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x @ w, 0.1).relu() @ w, 0.5).sum()

    x = torch.randn(2048, 64)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    compiled = torch.compile(function, backend=backend)
    results = []
    for call in (function, compiled):
        torch.manual_seed(3)
        w.grad = None
        losses = []
        for _ in range(4):
            losses.append(call(x))
            losses[-1].backward()
        results.append([*losses, w.grad, torch.rand(5)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)
    assert torch.equal(results[1][-1], results[0][-1])
    assert backend.report.ort_runs == 8
    assert threads.count("ahead") >= 2


def test_masks_among_other_random_numbers_are_drawn_in_their_order(threads: list[str]) -> None:
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
    assert threads == []
