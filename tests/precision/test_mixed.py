"""``ORTMixedPrecision``: Lightning's mixed precision, which fused optimizers, clipping and overflows do not break."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTDDPStrategy, ORTMixedPrecision, ORTStrategy, ORTZeRO1Strategy
from lightning_ort.strategies.capture.capture import obstacle

lightning = pytest.importorskip("lightning.pytorch")
ALWAYS = {"placement": "always"}


class Net(lightning.LightningModule):
    """Overflows in the steps that it is told to."""

    def __init__(self, overflows: Callable[[int], bool] = lambda step: False, fused: bool | None = None) -> None:
        super().__init__()
        lightning.seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
        self.overflows, self.fused = overflows, fused
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.states: list[float] = []
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        return loss * (float("inf") if self.overflows(batch_idx) else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad.norm() for parameter in self.parameters()]
        self.norms.append(torch.stack(gradients).norm().item())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        optimizer = self.trainer.optimizers[0]
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.states.append(sum(state["exp_avg"].sum().item() for state in optimizer.state.values()))
        scaler = self.trainer.precision_plugin.scaler
        self.scales.append(scaler.get_scale() if scaler else 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.net(batch[0]).dtype in (torch.float16, torch.bfloat16)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(160, 8, generator=generator), torch.randint(0, 3, (160,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=8)

    val_dataloader = train_dataloader


def train(module: Net, plugin: Any, make_trainer: Callable[..., Any], strategy: Any = None, **kwargs: Any) -> Any:
    trainer = make_trainer(
        strategy=strategy or ORTStrategy(config=ALWAYS),
        plugins=[plugin],
        **{"max_epochs": 1, "limit_val_batches": 1, **kwargs},
    )
    trainer.fit(module, ckpt_path=kwargs.pop("ckpt_path", None))
    return trainer


@pytest.mark.parametrize("precision", [pytest.param("16-mixed", marks=pytest.mark.slow), "bf16-mixed"])
def test_loses_what_stock_loses(precision: Any, make_trainer: Callable[..., Any]) -> None:
    stock, ours = Net(), Net()
    make_trainer(plugins=[MixedPrecision(precision, "cpu")], max_epochs=1, limit_val_batches=1).fit(stock)
    trainer = train(ours, ORTMixedPrecision(precision), make_trainer)
    # one unit in the last place of bfloat16 is 2^-8
    assert ours.losses == pytest.approx(stock.losses, rel=2e-2)
    assert ours.scales == stock.scales
    assert trainer.strategy.report.graphs or obstacle()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_clips_with_fused_optimizers(
    precision: Any, fused: bool | None, algorithm: str, make_trainer: Callable[..., Any]
) -> None:
    arguments = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 4}
    stock, ours = Net(), Net(fused=fused)
    plugin = MixedPrecision(precision, "cpu")
    make_trainer(plugins=[plugin], max_epochs=1, limit_val_batches=0, **arguments).fit(stock)
    off = ORTStrategy(config={"engine": "torch"})
    trainer = train(ours, ORTMixedPrecision(precision), make_trainer, off, limit_val_batches=0, **arguments)
    assert trainer.optimizers[0].param_groups[0]["fused"] is True  # the user's, or the strategy's
    assert ours.norms == pytest.approx(stock.norms, rel=1e-5)  # unscaled once
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_overflow_leaves_out_the_step(make_trainer: Callable[..., Any]) -> None:
    module = Net(overflows=lambda step: step == 3)
    trainer = train(module, ORTMixedPrecision("16-mixed"), make_trainer, ORTStrategy(config={"engine": "torch"}))
    assert trainer.precision_plugin.overflows == 1
    assert module.states[3] == module.states[2]
    assert module.scales[3] == module.scales[2] / 2
    assert module.rates[3] == module.rates[2]  # the schedule rests, too
    assert module.rates[4] == pytest.approx(0.9 * module.rates[3])
    assert all(map(math.isfinite, module.states))
    assert "step" not in vars(trainer.lr_scheduler_configs[0].scheduler)


def test_overflows_are_counted_in_each_fit(make_trainer: Callable[..., Any]) -> None:
    plugin = ORTMixedPrecision("16-mixed", max_overflows=2)
    config = {"engine": "torch"}
    train(Net(overflows=lambda step: step == 19), plugin, make_trainer, ORTStrategy(config=config))
    assert plugin.overflows == 1
    trainer = train(Net(overflows=lambda step: step in (0, 2)), plugin, make_trainer, ORTStrategy(config=config))
    trainer.validate(trainer.lightning_module, verbose=False)
    assert plugin.overflows == 2


def test_endless_overflow_is_an_error(make_trainer: Callable[..., Any]) -> None:
    module = Net(overflows=lambda step: True)
    with pytest.raises(RuntimeError, match="5 optimizer steps in a row"):
        train(
            module,
            ORTMixedPrecision("16-mixed", max_overflows=5),
            make_trainer,
            ORTStrategy(config={"engine": "torch"}),
        )
    assert len(module.losses) == 4


def test_scale_goes_on_from_a_checkpoint(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    strategy = ORTStrategy(config={"engine": "torch"})
    trainer = train(Net(overflows=lambda step: step == 3), ORTMixedPrecision("16-mixed"), make_trainer, strategy)
    trainer.save_checkpoint(tmp_path / "scaled.ckpt")
    scale = trainer.precision_plugin.scaler.get_scale()
    assert scale < torch.amp.GradScaler("cpu").get_scale()
    # also in Lightning's own
    for plugin in (ORTMixedPrecision("16-mixed"), MixedPrecision("16-mixed", "cpu")):
        module = Net()
        trainer = make_trainer(plugins=[plugin], max_epochs=2, limit_train_batches=1, limit_val_batches=0)
        trainer.fit(module, ckpt_path=tmp_path / "scaled.ckpt")
        assert plugin.scaler.get_scale() == scale


def test_chosen_for_the_trainers_precision(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(strategy=ORTStrategy(), precision="bf16-mixed")
    assert type(trainer.precision_plugin) is ORTMixedPrecision
    assert trainer.precision_plugin.device == "cpu"
    trainer = make_trainer(strategy=ORTDDPStrategy(), precision="bf16-mixed")
    assert type(trainer.precision_plugin) is ORTMixedPrecision

    class Own(MixedPrecision):
        pass

    own = Own("bf16-mixed", "cpu")
    assert make_trainer(strategy=ORTStrategy(), plugins=[own]).precision_plugin is own
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    stock = MixedPrecision("16-mixed", "cpu", scaler)
    assert make_trainer(strategy=ORTStrategy(), plugins=[stock]).precision_plugin.scaler is scaler


def test_pickles() -> None:
    plugin = pickle.loads(pickle.dumps(ORTMixedPrecision("bf16-mixed")))
    assert type(plugin) is ORTMixedPrecision
    assert type(plugin).__qualname__ == "MixedPrecision"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "16"}, "16-mixed"),
        ({"precision": "32-true"}, "16-mixed"),
        ({"max_overflows": 0}, "max_overflows=0"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ORTMixedPrecision(**arguments)


def test_deepspeed_takes_its_own_only(make_trainer: Callable[..., Any]) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(Exception, match="DeepSpeedPrecision; got ORTMixedPrecision"):
        make_trainer(strategy=ORTZeRO1Strategy(), plugins=[ORTMixedPrecision("bf16-mixed")])
    plugin = make_trainer(strategy=ORTZeRO1Strategy(), precision="bf16-mixed").precision_plugin
    assert isinstance(plugin, DeepSpeedPrecision)


def test_a_scheduler_is_saved_in_the_middle_of_a_fit() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before, state_dict = scheduler.state_dict(), scheduler.state_dict
    plugin = ORTMixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu"))
    config = SimpleNamespace(interval="step", scheduler=scheduler)
    plugin.connect(nn.Linear(1, 1), [optimizer], [config])
    assert "step" in vars(scheduler)
    assert pickle.loads(pickle.dumps(scheduler.state_dict())) == before
    plugin.teardown()
    assert scheduler.state_dict == state_dict
    assert scheduler.state_dict() == before
