"""The twin for ``pytorch_lightning``, whose classes are not those of ``lightning.pytorch``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small_modules import Small

pl = pytest.importorskip("pytorch_lightning")


def make_module() -> Any:
    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch).square().mean()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(1)
            return torch.utils.data.DataLoader(torch.randn(32, 8, generator=generator), batch_size=8)

    return Small()


def make_trainer(strategy: Any, **kwargs: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, enable_model_summary=False, **quiet, **kwargs)


def test_trains_like_the_stock_strategy() -> None:
    from lightning_ort.pytorch_lightning import ORTStrategy

    losses = []
    for strategy in ("auto", ORTStrategy(config={"placement": "always"})):
        trainer = make_trainer(strategy)
        trainer.fit(make_module())
        losses.append(trainer.callback_metrics["loss_epoch"].item())
    assert isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert trainer.strategy.report.ort_runs > 0
    assert trainer.strategy.report.graph_breaks == 0


def test_optimizer_callback() -> None:
    from lightning_ort.pytorch_lightning import ORTOptimizer

    module = make_module()
    trainer = make_trainer("auto", callbacks=ORTOptimizer("auto"))
    trainer.fit(module)
    assert isinstance(trainer.callbacks[0], pl.Callback)
    assert trainer.optimizers[0].param_groups[0]["fused"] is True


def test_name_and_devices() -> None:
    from lightning_ort.pytorch_lightning import ORTStrategy

    assert type(make_trainer("ort").strategy) is ORTStrategy
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="ort_ddp"):
        make_trainer("ort", devices=2)


def test_the_other_lightning_is_refused(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    from lightning_ort import ORTMixedPrecision, ORTStrategy
    from lightning_ort.pytorch_lightning import ORTMixedPrecision as OtherPrecision
    from lightning_ort.pytorch_lightning import ORTStrategy as OtherStrategy

    with pytest.raises(ValueError, match=r"of pytorch_lightning.* import ORTStrategy from lightning_ort\.lightning"):
        lightning.Trainer(strategy=OtherStrategy(), accelerator="cpu")
    with pytest.raises(
        ValueError, match=r"of lightning\.pytorch.* import ORTStrategy from lightning_ort\.pytorch_lightning"
    ):
        make_trainer(ORTStrategy())
    errors = MisconfigurationException, pl.utilities.exceptions.MisconfigurationException
    for trainer, plugin in ((pl.Trainer, ORTMixedPrecision), (lightning.Trainer, OtherPrecision)):
        with pytest.raises(errors, match="invalid type"):
            trainer(strategy="ort", accelerator="cpu", plugins=plugin("bf16-mixed", "cpu"))
    with pytest.raises(TypeError, match="`model` must be a `LightningModule`"):
        make_trainer("ort", default_root_dir=tmp_path).fit(Small())
    with pytest.raises(TypeError, match="`model` must be a `LightningModule`"):
        lightning.Trainer(strategy="ort", accelerator="cpu", default_root_dir=tmp_path, logger=False).fit(make_module())
