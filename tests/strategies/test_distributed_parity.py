"""Fifty steps in two processes lose what they lose under Lightning's ``ddp``, and four processes split the states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from parity_models import CNN, GPT, STEPS, Base
from processes import START, Recorded, Records, fit
from torch import nn

from lightning_ort import ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTZeRO1Strategy

pytestmark = pytest.mark.slow
ALWAYS = {"placement": "always"}


def run(model: type[Base], folder: Path, strategy: Any, make_trainer: Callable[..., Any], **kwargs: Any) -> Any:
    module = type(model.__name__, (Records, model), {"folder": folder, "name": type(strategy).__name__})()
    return fit(module, strategy, make_trainer, max_epochs=-1, max_steps=STEPS, limit_val_batches=0, **kwargs)


@pytest.mark.parametrize("model", [GPT, CNN])
def test_losses_agree(model: type[Base], make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    stock = run(model, tmp_path, DDPStrategy(start_method=START), make_trainer)
    assert len(stock[0]["losses"]) == STEPS
    for strategy in (ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTZeRO1Strategy):
        if strategy is ORTZeRO1Strategy:
            pytest.importorskip("deepspeed")
        ours = run(model, tmp_path, strategy(config=ALWAYS, start_method=START), make_trainer)
        for facts, expected in zip(ours, stock, strict=True):
            assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-4), strategy
            assert facts["report"]["ort_runs"] > 0
            assert facts["report"]["ort_node_fraction"] > 0.3


# DeepSpeed leaves buffers in float32, and torch's batch norm on CPUs takes none beside bfloat16 weights
BF16 = [(ORTDDPStrategy, CNN), (ORTNativeZeRO1Strategy, CNN), (ORTZeRO1Strategy, GPT)]


@pytest.mark.parametrize(("strategy", "model"), BF16)
def test_bf16(strategy: Any, model: type[Base], make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    # stock autocasts, DeepSpeed has the whole module in bfloat16: 8 bits of mantissa either way
    stock = run(model, tmp_path, DDPStrategy(start_method=START), make_trainer, precision="bf16-mixed")
    ours = run(model, tmp_path, strategy(config=ALWAYS, start_method=START), make_trainer, precision="bf16-mixed")
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], abs=0.1)


class Even(Recorded):
    """Layers of one size, so that shares of whole parameters can be equal."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        layers = [nn.Linear(64, 64, bias=False) for _ in range(16)]
        self.net = nn.Sequential(nn.Linear(8, 64, bias=False), *layers, nn.Linear(64, 3, bias=False))


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("strategy", [ORTNativeZeRO1Strategy, ORTZeRO1Strategy])
def test_each_rank_has_its_share(strategy: Any, devices: int, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"max_epochs": -1, "max_steps": 2}
    whole = fit(Even(tmp_path, "whole"), DDPStrategy(start_method=START), make_trainer, **arguments)
    ours = fit(
        Even(tmp_path, "ours"),
        strategy(config={"engine": "torch"}, start_method=START),
        make_trainer,
        devices=devices,
        **arguments,
    )
    for facts in ours:
        assert facts["state_bytes"] == pytest.approx(whole[0]["state_bytes"] / devices, rel=0.05)
