"""``ORTMatmulPrecision``: set for a run, restored, and honest about having an effect."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTMatmulPrecision, ORTStrategy
from lightning_ort.precision import matmul

HAS_BF16 = torch.cpu._is_avx512_bf16_supported()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


class Wide(LightningModule):
    """Keeps what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(256, 256)
        self.outputs: list[torch.Tensor] = []
        self.levels: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.outputs.append(self.layer(batch[0]))
        self.levels.append(torch.get_float32_matmul_precision())
        return self.outputs[-1].square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            TensorDataset(torch.randn(256, 256, generator=torch.Generator().manual_seed(1))), batch_size=256
        )


def train(level: Any, make_trainer: Callable[..., Any]) -> Wide:
    module = Wide()
    # the torch kernels are in question, not those of ONNX Runtime
    strategy = ORTStrategy(config={"engine": "torch"})
    make_trainer(strategy=strategy, plugins=[ORTMatmulPrecision(level)], max_epochs=1).fit(module)
    assert torch.get_float32_matmul_precision() == "highest"
    assert module.levels == [level]
    return module


def test_medium_changes_bits_where_the_cpu_can(make_trainer: Callable[..., Any]) -> None:
    exact = train("highest", make_trainer).outputs[0]
    if HAS_BF16:
        fast = train("medium", make_trainer).outputs[0]
        assert not torch.equal(fast, exact)
        torch.testing.assert_close(fast, exact, rtol=0, atol=2e-2)
    else:
        with pytest.warns(UserWarning, match="no effect"):
            train("medium", make_trainer)


def test_no_effect_is_said(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_product", lambda device: torch.ones(1))
    with pytest.warns(UserWarning, match="'high' has no effect on this cpu.*'medium'"):
        train("high", make_trainer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no effect.*")
        train("highest", make_trainer)


def test_restored_after_an_error(make_trainer: Callable[..., Any]) -> None:
    class Broken(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("broken")

    trainer = make_trainer(strategy="ort", plugins=[ORTMatmulPrecision("medium")], max_epochs=1)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken())
    assert torch.get_float32_matmul_precision() == "highest"


def test_refused() -> None:
    with pytest.raises(ValueError, match="'highest', 'high', 'medium'"):
        ORTMatmulPrecision("low")  # type: ignore[arg-type]
