"""Masks of dropout are drawn by a function in C while a run lasts, with torch's values."""

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_modules import Small
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy
from lightning_ort.compiler.executors import mask_kernel
from lightning_ort.compiler.executors.mask_kernel import MaskKernel, matches_torch
from lightning_ort.strategies import dropout_masks

needs_kernel = pytest.mark.skipif(
    bool(mask_kernel.unsupported_reason()) or not matches_torch(),
    reason=mask_kernel.unsupported_reason() or "torch draws otherwise on this processor",
)


class Dropping(Small):
    """Draws several large masks in a step, also in C++, as in attention."""

    width = 128

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, self.width), nn.Dropout(0.2), nn.Linear(self.width, 16))
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.after: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net(batch)
        return F.dropout(self.attention(x, x, x, need_weights=False)[0], 0.3).square().mean()

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item())
        self.after.append(torch.get_rng_state())

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        return DataLoader([torch.randn(16, 32, 16, generator=generator) for _ in range(6)], batch_size=None)


class Tiny(Dropping):
    """Draws small masks alone."""

    width = 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader([torch.randn(2, 3, 16) for _ in range(100)], batch_size=None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> MaskKernel:
    """A new one, compiled at once when it is first needed."""

    class Now(MaskKernel):
        def draw(self, *args: Any) -> bool:
            drawn = super().draw(*args)
            if self._thread is not None:
                self._thread.join()
            return drawn

    monkeypatch.setattr(mask_kernel, "_COMPILE_AFTER", 1)
    new = functools.cache(Now)
    monkeypatch.setattr(dropout_masks, "mask_kernel", new)
    return new()


def fit(make_trainer: Callable[..., Any], strategy: Any, kind: type[Dropping] = Dropping) -> tuple[Dropping, Any]:
    module = kind()
    torch.manual_seed(3)
    trainer = make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0)
    trainer.fit(module)
    return module, trainer


def is_replaced() -> bool:
    return bool(dropout_masks._replaced.runs)


@needs_kernel
@pytest.mark.parametrize("engine", ["torch", "ort"])
def test_a_run_draws_what_stock_draws(engine: str, kernel: MaskKernel, make_trainer: Callable[..., Any]) -> None:
    stock, _ = fit(make_trainer, "auto")
    config = {"engine": engine, **({"placement": "always"} if engine == "ort" else {})}
    ours, trainer = fit(make_trainer, ORTStrategy(config=config))
    assert kernel.is_ready
    assert kernel.drawn >= 6 * 16 * 32 * 128
    assert ours.losses == pytest.approx(stock.losses, rel=0 if engine == "torch" else 1e-5)
    assert all(map(torch.equal, ours.after, stock.after))
    report = trainer.strategy.report
    assert report.dropout_masks == "drawn by a compiled function"
    assert "faster dropout masks" in report.to_text()
    assert (report.ort_runs > 0) == (engine == "ort")
    assert not is_replaced()


class Broken(Dropping):
    """Has a graph break in a loop, so that dynamo leaves the whole frame to Python and looks at those that it calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total: Any = 0
        for _ in range(2):
            gc.isenabled()
            total = total + F.dropout(self.net(batch), 0.3).square().mean()
        return total


@pytest.mark.new_torch
@needs_kernel
def test_no_part_of_it_is_traced(kernel: MaskKernel, make_trainer: Callable[..., Any]) -> None:
    from lightning_ort.compat import dynamo  # not at the top: not every torch has what it needs

    stock, _ = fit(make_trainer, "auto", Broken)
    ours, trainer = fit(make_trainer, ORTStrategy(config={"placement": "always"}), Broken)
    assert kernel.is_ready
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    report = trainer.strategy.report
    assert report.ort_runs > 0
    breaks = [note for note in report.to_text().splitlines() if "graph ends early" in note]
    assert all("gc.isenabled" in note for note in breaks), breaks
    traced = [code.co_filename for code in dynamo._living(dynamo.input_codes)]
    assert __file__ in traced
    assert dropout_masks.__file__ not in traced


def test_left_in_place_after_no_run(make_trainer: Callable[..., Any]) -> None:
    class Fails(Dropping):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert is_replaced() == matches_torch()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit(make_trainer, ORTStrategy(config={"engine": "torch"}), Fails)
    assert not is_replaced()


@needs_kernel
def test_small_masks_are_left_to_torch(kernel: MaskKernel, make_trainer: Callable[..., Any]) -> None:
    seen = []

    class Watched(Tiny):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(is_replaced())

    stock, _ = fit(make_trainer, "auto", Tiny)
    ours, trainer = fit(make_trainer, ORTStrategy(config={"engine": "torch"}), Watched)
    assert ours.losses == stock.losses
    assert seen[0]
    assert not seen[-1]
    assert trainer.strategy.report.dropout_masks == ""
    assert not kernel.is_ready


@needs_kernel
def test_without_a_compiler(
    kernel: MaskKernel, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    stock, _ = fit(make_trainer, "auto")
    ours, trainer = fit(make_trainer, ORTStrategy(config={"engine": "torch"}))
    assert ours.losses == stock.losses
    problem = "no C compiler: no-such-compiler is not on the PATH"
    assert trainer.strategy.report.dropout_masks == f"drawn by PyTorch: {problem}"


@needs_kernel
def test_errors_are_torchs(kernel: MaskKernel) -> None:
    def error(call: Callable[[], Any]) -> str:
        with pytest.raises(RuntimeError) as caught:
            call()
        return str(caught.value)

    calls: list[Callable[[], Any]] = [
        lambda: torch.empty(5000).bernoulli_(1.5),
        lambda: torch.empty(5000).expand(3, 5000).bernoulli_(0.5),
    ]
    expected = list(map(error, calls))
    masks = dropout_masks.DropoutMasks()
    masks.setup(torch.device("cpu"), None)
    try:
        assert is_replaced()
        assert list(map(error, calls)) == expected
        torch.manual_seed(0)
        one = torch.empty(100, 100).t().bernoulli_(0.5)
    finally:
        masks.teardown()
    torch.manual_seed(0)
    assert torch.equal(torch.empty(100, 100).t().bernoulli_(0.5), one)


def test_two_runs_at_once() -> None:
    one, other = dropout_masks.DropoutMasks(), dropout_masks.DropoutMasks()
    one.setup(torch.device("cpu"), None)
    other.setup(torch.device("cpu"), None)
    expected = matches_torch()
    one.teardown()
    one.teardown()
    assert is_replaced() == expected
    other.teardown()
    assert not is_replaced()


def test_not_on_a_gpu() -> None:
    masks = dropout_masks.DropoutMasks()
    masks.setup(torch.device("cuda"), None)
    assert not is_replaced()


@needs_kernel
@pytest.mark.parametrize(
    "draw",
    [lambda: torch.empty(8192).bernoulli_(0.5), lambda: torch.ops.aten.bernoulli.p(torch.empty(8192), 0.5)],
    ids=["eager", "in a graph"],
)
def test_several_threads_draw_from_one_generator(draw: Callable[[], Tensor], kernel: MaskKernel) -> None:
    """No number is drawn twice: together they have drawn what one would have."""
    masks = dropout_masks.DropoutMasks()
    masks.setup(torch.device("cpu"), None)
    drawn: list[Tensor] = []
    try:
        torch.empty(8192).bernoulli_(0.5)
        torch.manual_seed(4)
        threads = [threading.Thread(target=lambda: drawn.extend(draw() for _ in range(20))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        masks.teardown()
    torch.manual_seed(4)
    expected = [torch.empty(8192).bernoulli_(0.5) for _ in range(60)]
    assert sorted(tuple(mask.tolist()) for mask in drawn) == sorted(tuple(mask.tolist()) for mask in expected)
