"""``optim=`` of a strategy and the callback :class:`ORTOptimizer`, in whole runs of the Trainer."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity_models
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, LearningRateMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from small_modules import Small
from torch import Tensor, nn

from lightning_ort import ORTOptimizer, ORTStrategy
from lightning_ort.strategies.capture.capture import obstacle

bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

ALWAYS = {"placement": "always"}
OFF = {"engine": "torch"}  # where the optimizer alone is tested: nothing to compile


class Adam(Small):
    """Has AdamW and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 3))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.mine = optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 100, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(module: Small, make_trainer: Callable[..., Any], ckpt_path: Any = None, **kwargs: Any) -> Any:
    trainer = make_trainer(**{"max_epochs": 2, "limit_val_batches": 0, **kwargs})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def test_fused_by_default_and_reported(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    plain, module = Adam(), Adam()
    fit(plain, make_trainer)
    with caplog.at_level("INFO"):
        trainer = fit(module, make_trainer, strategy=ORTStrategy(config=ALWAYS))
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    report = trainer.strategy.report
    assert report.ort_runs > 0 or obstacle()
    assert [(entry.configured, entry.runs_as) for entry in report.optimizers] == [
        ("torch.AdamW", "torch.AdamW (fused)")
    ]
    assert "optimizer 0: torch.AdamW runs as torch.AdamW (fused)" in report.to_text()
    assert report.to_dict()["optimizers"][0]["runs_as"] == "torch.AdamW (fused)"
    assert sum("torch.AdamW (fused)" in record.message for record in caplog.records) == 1
    assert trainer.optimizers[0] is module.mine
    assert module.mine.param_groups[0]["fused"] is True


@pytest.mark.parametrize("name", ["auto", "adamw_torch_foreach"])
@pytest.mark.parametrize("model", [parity_models.GPT, parity_models.CNN])
def test_fifty_steps_end_at_the_same_parameters(model: Any, name: str, make_trainer: Callable[..., Any]) -> None:
    ends = []
    for strategy in ("auto", ORTStrategy(config=OFF, optim=name)):
        module = model()
        make_trainer(strategy=strategy, max_steps=parity_models.STEPS).fit(module)
        ends.append(dict(module.named_parameters()))
    for key, value in ends[0].items():
        got, expected = (without_noise(key, tensor.detach()) for tensor in (ends[1][key], value))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def without_noise(key: str, tensor: Tensor) -> Tensor:
    """Leave out what does not influence the loss: its gradient is rounding noise, of which Adam makes full steps."""
    if key.endswith("qkv.bias"):  # softmax takes no notice of the keys' bias
        query, _, value = tensor.chunk(3)
        return torch.cat([query, value])
    return tensor[:0] if key in ("features.0.bias", "features.4.bias") else tensor  # before BatchNorm


@pytest.mark.parametrize("name", ["keep", "adamw_torch_foreach", "adamw_anyprecision", "adafactor"])
def test_names(name: str, make_trainer: Callable[..., Any]) -> None:
    module = Adam()
    trainer = fit(module, make_trainer, strategy=ORTStrategy(config=OFF, optim=name), max_epochs=4)
    assert module.losses[-1] < module.losses[0]
    assert isinstance(trainer.optimizers[0], type(module.optimizers().optimizer))
    assert trainer.optimizers[0] is module.mine
    changed = trainer.strategy.report.optimizers[0].runs_as != "torch.AdamW"
    assert changed is (name != "keep")


@bitsandbytes
@pytest.mark.parametrize("form", ["strategy", "callback", "strategy with settings"])
def test_8bit(form: str, make_trainer: Callable[..., Any]) -> None:
    module = Adam()
    settings = ORTOptimizer("adamw_bnb_8bit", bits={"net.2": 8})
    kwargs: dict[str, Any] = {
        "strategy": {"strategy": ORTStrategy(config=OFF, optim="adamw_bnb_8bit")},
        "callback": {"callbacks": settings},
        "strategy with settings": {"strategy": ORTStrategy(config=OFF, optim=settings)},
    }[form]
    trainer = fit(module, make_trainer, max_epochs=4, **kwargs)
    state = module.mine.state[module.net[2].weight]
    assert state["state1"].dtype is torch.uint8
    assert module.losses[-1] < 0.8 * module.losses[0]
    # the schedule reached it
    assert trainer.optimizers[0].param_groups[0]["lr"] != pytest.approx(1e-2)


def test_callback_and_strategy_that_disagree(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="'adafactor'.*'adamw_anyprecision'"):
        fit(
            Adam(),
            make_trainer,
            strategy=ORTStrategy(config=OFF, optim="adafactor"),
            callbacks=ORTOptimizer("adamw_anyprecision"),
        )


@pytest.mark.parametrize(("saving", "loading"), [("ort", "auto"), ("auto", "ort"), ("ort", "ort")])
def test_resume_equals_the_uninterrupted_run(
    saving: str, loading: str, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    strategies = {"ort": lambda: ORTStrategy(config=OFF), "auto": lambda: "auto"}
    whole, first, second = Adam(), Adam(), Adam()
    fit(whole, make_trainer, max_epochs=4, strategy=strategies[loading]())
    trainer = fit(first, make_trainer, strategy=strategies[saving]())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"][0]
    assert saved["param_groups"][0]["fused"] is None
    resumed = fit(second, make_trainer, max_epochs=4, ckpt_path=tmp_path / "half.ckpt", strategy=strategies[loading]())
    assert resumed.optimizers[0].param_groups[0]["fused"] is (True if loading == "ort" else None)
    if saving == loading:
        assert second.losses == whole.losses[8:]
    assert second.losses == pytest.approx(whole.losses[8:], rel=1e-5)
    assert second.mine.param_groups[0]["lr"] == whole.mine.param_groups[0]["lr"]


@bitsandbytes
def test_8bit_resumes_from_fp32_and_back(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    plain = Adam()
    fit(plain, make_trainer).save_checkpoint(tmp_path / "fp32.ckpt")
    eight = Adam()
    strategy = ORTStrategy(config=OFF, optim="adamw_bnb_8bit")
    trainer = fit(eight, make_trainer, max_epochs=3, ckpt_path=tmp_path / "fp32.ckpt", strategy=strategy)
    assert eight.mine.state[eight.net[2].weight]["state1"].dtype is torch.uint8
    trainer.save_checkpoint(tmp_path / "8bit.ckpt")
    back = Adam()
    fit(back, make_trainer, max_epochs=4, ckpt_path=tmp_path / "8bit.ckpt", strategy=ORTStrategy(config=OFF))
    assert back.mine.state[back.net[2].weight]["exp_avg"].dtype is torch.float32
    assert back.losses[-1] < plain.losses[0]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("optim", ["auto", "adamw_torch_foreach"])
def test_clipping_and_accumulation(algorithm: str, optim: str, make_trainer: Callable[..., Any]) -> None:
    plain, module = Adam(), Adam()
    kwargs = {"gradient_clip_val": 1e-2, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 2}
    fit(plain, make_trainer, **kwargs)
    fit(module, make_trainer, strategy=ORTStrategy(config=OFF, optim=optim), **kwargs)
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize("clip", [None, 1e-2])
def test_grad_scaler(clip: float | None, make_trainer: Callable[..., Any]) -> None:
    """Real float16 with a GradScaler: Lightning refuses clipping with an optimizer that says it is fused."""
    losses = []
    for strategy in ("auto", ORTStrategy(config=OFF)):
        module = Adam()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        trainer = fit(module, make_trainer, strategy=strategy, plugins=precision, gradient_clip_val=clip)
        losses.append(module.losses)
        assert scaler.get_scale() > 0
    assert trainer.optimizers[0].param_groups[0]["fused"] is True
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


class Alternating(Adam):
    """Two optimizers under manual optimization, of classes that are fused and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[:2].parameters(), lr=0.1, momentum=0.9),
            torch.optim.RMSprop(self.net[2:].parameters(), lr=1e-3),
        ]


def test_several_optimizers(make_trainer: Callable[..., Any]) -> None:
    plain, module = Alternating(), Alternating()
    fit(plain, make_trainer)
    trainer = fit(module, make_trainer, strategy=ORTStrategy(config=ALWAYS))
    assert trainer.strategy.report.ort_runs > 0 or obstacle()
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert [entry.runs_as for entry in trainer.strategy.report.optimizers] == ["torch.SGD (fused)", "torch.RMSprop"]


class Finetuned(Small):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_backbone_finetuning_adds_its_group(make_trainer: Callable[..., Any]) -> None:
    losses = []
    for strategy in ("auto", ORTStrategy(config=OFF)):
        module = Finetuned()
        callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False, verbose=False)]
        trainer = fit(module, make_trainer, strategy=strategy, callbacks=callbacks, max_epochs=3)
        losses.append(module.losses)
    assert [group["fused"] for group in trainer.optimizers[0].param_groups] == [True, True]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_learning_rate_monitor_keeps_its_names(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    monitors = []
    for strategy in ("auto", ORTStrategy(config=OFF, optim="adamw_anyprecision")):
        monitors.append(LearningRateMonitor())
        fit(
            Adam(),
            make_trainer,
            strategy=strategy,
            callbacks=monitors[-1],
            logger=CSVLogger(tmp_path),
            log_every_n_steps=1,
        )
    assert monitors[0].lrs == monitors[1].lrs
    assert len(monitors[0].lrs["lr-AdamW"]) > 0


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        """
        trainer:
          accelerator: cpu
          logger: false
          strategy:
            class_path: lightning_ort.ORTStrategy
            init_args:
              optim: adamw_anyprecision
          callbacks:
            - class_path: lightning_ort.ORTOptimizer
              init_args: {name: adamw_bnb_8bit, bits: {net: 32}}
        """
    )
    cli = LightningCLI(Small, run=False, args=[f"--config={tmp_path / 'config.yaml'}"], save_config_callback=None)
    assert cli.trainer.strategy._swap.name == "adamw_anyprecision"
    (callback,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, ORTOptimizer)]
    assert callback.swap.bits == {"net": 32}


class Swapping(Callback):
    """Somebody else's, with an attribute of a name that ours has too."""

    swap = "everything"


class RaisesOnLook(Callback):
    @property
    def swap(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize("other", [Swapping, RaisesOnLook])
@pytest.mark.parametrize("ours", [True, False])
def test_callbacks_with_an_attribute_of_our_name(other: Any, ours: bool, make_trainer: Callable[..., Any]) -> None:
    module = Adam()
    callbacks = [other(), *([ORTOptimizer("adamw_torch_foreach")] if ours else [])]
    fit(module, make_trainer, strategy=ORTStrategy(config=OFF), callbacks=callbacks)
    assert module.mine.param_groups[0]["foreach" if ours else "fused"] is True


def test_a_precision_plugin_and_a_strategy_with_attributes_of_our_names(make_trainer: Callable[..., Any]) -> None:
    class Plugin(Precision):
        optim = "everything"

    class Strategy(SingleDeviceStrategy):
        def report(self) -> None:
            raise RuntimeError("not now")

    module = Adam()
    fit(module, make_trainer, strategy=ORTStrategy(config=OFF), plugins=Plugin())
    assert module.mine.param_groups[0]["fused"] is True
    module = Adam()
    fit(module, make_trainer, strategy=Strategy("cpu"), callbacks=ORTOptimizer("adamw_torch_foreach"))
    assert module.mine.param_groups[0]["foreach"] is True


def test_two_callbacks(make_trainer: Callable[..., Any]) -> None:
    callbacks = [ORTOptimizer("adamw_torch_foreach"), ORTOptimizer("adamw_torch_fused")]
    with pytest.raises(ValueError, match="2 ORTOptimizer callbacks. Pass only one"):
        fit(Adam(), make_trainer, strategy=ORTStrategy(config=OFF), callbacks=callbacks)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'adamw_torch_fused'"):
        ORTStrategy(optim="adamw_fused")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'adamw_torch_fused'"):
        ORTStrategy(optim="adamw_torch_fuse")


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer without a call of torch's constructor, as that of several packages."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.steps = inner, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                parameter.data.copy_(slow.lerp_(parameter.data, 0.5))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class LooksAhead(Small):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.AdamW(self.parameters(), lr=1e-2))


@pytest.mark.parametrize(("scales", "optim"), [(False, "auto"), (False, "keep"), (True, "auto")])
def test_an_optimizer_without_torchs_constructor(scales: bool, optim: str, make_trainer: Callable[..., Any]) -> None:
    losses = []
    for strategy in ("auto", ORTStrategy(config=ALWAYS, optim=optim)):
        module = LooksAhead()
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))] if scales else None
        trainer = fit(module, make_trainer, strategy=strategy, plugins=plugins)
        losses.append(module.losses)
        assert trainer.optimizers[0].steps == trainer.global_step == 8
    assert trainer.strategy.report.ort_runs > 0 or obstacle()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
