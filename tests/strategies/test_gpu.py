"""One GPU: the same losses as the stock strategy's, with ONNX Runtime on torch's memory and stream."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import MODELS, STEPS, Base
from small_modules import Small, loader
from torch import nn
from torch.utils.data import DataLoader

from lightning_ort import ORTDDPStrategy, ORTMatmulPrecision, ORTStrategy, ORTZeRO1Strategy

pytestmark = pytest.mark.gpu
ALWAYS = {"placement": "always"}


def train(module: Any, strategy: Any, make_trainer: Callable[..., Any], **settings: Any) -> tuple[list[float], Any]:
    trainer = make_trainer(strategy=strategy, accelerator="gpu", **settings)
    trainer.fit(module)
    return module.losses, trainer


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_losses_agree(model: type[Base], make_trainer: Callable[..., Any]) -> None:
    if model.__name__ == "BERT":
        pytest.importorskip("transformers")
    stock, _ = train(model(), "auto", make_trainer, max_steps=STEPS)
    ours, trainer = train(model(), ORTStrategy(config=ALWAYS), make_trainer, max_steps=STEPS)
    assert ours == pytest.approx(stock, rel=1e-3)
    assert trainer.strategy.report.ort_runs > 0
    assert not trainer.strategy.report.fallbacks


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 3e-2), ("16-mixed", 1e-2)])
def test_mixed_precision(precision: Any, tolerance: float, make_trainer: Callable[..., Any]) -> None:
    (gpt,) = (model for model in MODELS if model.__name__ == "GPT")
    settings = {"precision": precision, "max_steps": STEPS}
    stock, _ = train(gpt(), "auto", make_trainer, **settings)
    ours, trainer = train(gpt(), ORTStrategy(config=ALWAYS), make_trainer, **settings)
    assert ours == pytest.approx(stock, rel=tolerance)
    assert trainer.strategy.report.ort_runs > 0


def test_accumulated_gradients(make_trainer: Callable[..., Any]) -> None:
    settings = {"max_epochs": 3, "accumulate_grad_batches": 2}
    stock, _ = train(Small(), "auto", make_trainer, **settings)
    ours, trainer = train(Small(), ORTStrategy(config=ALWAYS), make_trainer, **settings)
    assert ours == pytest.approx(stock, rel=1e-3)
    assert trainer.strategy.report.ort_runs > 0


def test_by_name_it_takes_the_gpu(make_trainer: Callable[..., Any]) -> None:
    module = Small()
    _, trainer = train(module, "ort", make_trainer, max_epochs=1)
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert trainer.strategy.report.host_memory == "default"


class Growing(Small):
    """Batches of several sizes: they reach a session as numbers in host memory."""

    def train_dataloader(self) -> Any:
        return DataLoader([batch for size in (3, 5, 7, 11, 4) for batch in loader(size, size)], batch_size=None)


def test_sizes_that_vary(make_trainer: Callable[..., Any]) -> None:
    stock, _ = train(Growing(), "auto", make_trainer, max_epochs=3)
    ours, trainer = train(Growing(), ORTStrategy(config=ALWAYS), make_trainer, max_epochs=3)
    assert ours == pytest.approx(stock, rel=1e-3)
    assert trainer.strategy.report.ort_runs > 0
    assert trainer.strategy.report.recompiles <= 2


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_optimizers_of_the_gpu(optim: Any, make_trainer: Callable[..., Any]) -> None:
    pytest.importorskip("bitsandbytes")

    class Adam(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    losses, trainer = train(Adam(), ORTStrategy(config=ALWAYS, optim=optim), make_trainer, max_epochs=5)
    assert losses[-1] < losses[0]
    assert trainer.strategy.report.ort_runs > 0


class Wide(Small):
    """Products large enough for tensor cores."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))
        self.net = nn.Sequential(*layers)


def test_tf32_reaches_both_engines_and_is_restored(make_trainer: Callable[..., Any]) -> None:
    before = torch.get_float32_matmul_precision()
    exact, _ = train(Wide(), ORTStrategy(config=ALWAYS), make_trainer, max_epochs=1)
    strategy = ORTStrategy(config=ALWAYS)
    fast, trainer = train(Wide(), strategy, make_trainer, max_epochs=1, plugins=[ORTMatmulPrecision("high")])
    assert trainer.strategy.report.ort_runs > 0
    assert fast == pytest.approx(exact, rel=1e-2)
    assert fast != exact
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("strategy", [ORTDDPStrategy, ORTZeRO1Strategy])
def test_one_process_with_nccl(strategy: Any, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    if strategy is ORTZeRO1Strategy:
        pytest.importorskip("deepspeed")
    stock, _ = train(Small(), "ddp", make_trainer, max_epochs=2)  # whose sampler has an order of its own
    ours, trainer = train(Small(), strategy(config=ALWAYS), make_trainer, max_epochs=2)
    assert ours == pytest.approx(stock, rel=1e-3)
    assert trainer.strategy.report.ort_runs > 0
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    plain = Small()
    plain.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
