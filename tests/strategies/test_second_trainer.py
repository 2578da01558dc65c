"""A strategy object that several Trainers get: packages make each Trainer from the same arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_modules import Small, loader

from lightning_ort import ORTDDPStrategy, ORTStrategy


@pytest.mark.parametrize("kind", [ORTStrategy, ORTDDPStrategy])
@pytest.mark.parametrize("same", [True, False], ids=["same module", "another module"])
def test_fit_in_one_trainer_then_predict_and_fit_in_others(
    kind: Any, same: bool, make_trainer: Callable[..., Any]
) -> None:
    strategy = kind(config={"placement": "always"})
    arguments = {"strategy": strategy, "accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0}
    arguments["use_distributed_sampler"] = False
    module = Small()
    make_trainer(**arguments).fit(module)
    assert strategy.report.ort_runs > 0
    module = module if same else Small()

    runs = strategy.report.ort_runs
    trainer = make_trainer(**arguments)
    assert trainer.strategy is strategy
    expected = torch.cat([module(x) for x, _ in loader(16)])
    torch.testing.assert_close(torch.cat(trainer.predict(module)), expected, rtol=1e-4, atol=1e-5)
    assert strategy.report.ort_runs > runs

    plain = Small()
    plain.load_state_dict(module.state_dict())
    make_trainer(max_epochs=1, limit_val_batches=0).fit(plain)
    runs, module.losses = strategy.report.ort_runs, []
    make_trainer(**arguments).fit(module)
    assert strategy.report.ort_runs > runs
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)


def test_an_accelerator_that_the_strategy_was_given_still_counts(make_trainer: Callable[..., Any]) -> None:
    from lightning.pytorch.accelerators import CPUAccelerator

    accelerator = CPUAccelerator()
    strategy = ORTStrategy(accelerator=accelerator)
    assert strategy.accelerator is accelerator
    with pytest.raises(Exception, match="accelerator set through both"):
        make_trainer(strategy=strategy, accelerator="cpu")
