"""One GPU: settled steps that wait for nothing, and what inductor is known to compute wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_modules import Small, loader
from torch import Tensor, nn

from lightning_ort import ORTStrategy
from lightning_ort.strategies.lean import bars

pytestmark = pytest.mark.gpu
STEPS = 80  # more than its duels take


class Watched(Small):
    """From a step on, torch raises an error for whatever waits for the GPU."""

    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if STEPS - 4 <= batch_idx < STEPS - 1 else "default")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        """Look at no loss, which would wait."""


@pytest.mark.parametrize("bar", [False, True])
def test_a_settled_step_waits_for_nothing(
    bar: bool, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "PICTURES", 0.0)
    strategy = ORTStrategy(config={"start": "now"})
    settings: Any = {"accelerator": "gpu", "max_epochs": 1, "limit_val_batches": 0, "enable_progress_bar": bar}
    try:
        make_trainer(strategy=strategy, **settings).fit(Watched())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strategy.report.steps


class Modulated(Small):
    """Two layer norms in a chain, modulated by parts of one parameter, large enough to be reduced in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1024)
        self.norm = nn.LayerNorm(1024, elementwise_affine=False)
        self.table = nn.Parameter(torch.randn(1, 4, 1024) / 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x).unsqueeze(1).expand(-1, 1024, -1)
        shift, scale, more_shift, more_scale = self.table.chunk(4, dim=1)
        x = self.norm(x) * (1 + scale) + shift
        return (self.norm(x) * (1 + more_scale) + more_shift)[:, 0, :3]

    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)


def test_gradients_of_chained_layer_norms(make_trainer: Callable[..., Any]) -> None:
    settings: Any = {"accelerator": "gpu", "max_epochs": 1, "limit_val_batches": 0}
    stock, ours = Modulated(), Modulated()
    make_trainer(**settings).fit(stock)
    strategy = ORTStrategy(config={"start": "now"})
    make_trainer(strategy=strategy, **settings).fit(ours)
    assert strategy.report.run.audits > 0
    assert not strategy.report.fallbacks
    assert ours.losses == pytest.approx(stock.losses, rel=1e-2)
