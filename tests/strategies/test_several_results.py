"""Steps that return more than their loss with gradients: Lightning differentiates the loss alone, hooks may do more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_modules import Small
from torch import Tensor, nn

from lightning_ort import ORTStrategy
from lightning_ort.compiler.reason import ReasonType


class Several(Small):
    """Has a second head, whose result is returned, or differentiated in a hook, or neither."""

    hook = ""
    shared = False  # whether the heads have a trunk
    scalar = True

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.without: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.net[0](batch[0])
        loss = self.net[1:](features).square().mean()
        other = self.second(features[:, :8] if self.shared else batch[0]).exp()
        self.other = other.mean() if self.scalar else other
        return {"loss": loss, "other": self.other}

    def differentiate(self, hook: str) -> None:
        if hook == self.hook:
            self.other.mean().backward()

    def on_before_backward(self, loss: Tensor) -> None:
        self.differentiate("on_before_backward")

    def on_after_backward(self) -> None:
        self.without.append(self.second[0].weight.grad is None)
        self.differentiate("on_after_backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.differentiate("on_train_batch_end")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()
        if self.hook == "on_before_backward":
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.5)


def check(make_trainer: Callable[..., Any], kind: type[Several] = Several, **attributes: Any) -> tuple[Several, Any]:
    """Train as stock Lightning does; return the module and the report."""
    modules = [type("Several", (kind,), attributes)() for _ in range(2)]
    strategy = ORTStrategy(
        config={"placement": "always", "debug": {"step_graph": attributes.get("step_graph", "auto")}}
    )
    for module, used in zip(modules, ("auto", strategy), strict=True):
        torch.manual_seed(0)
        make_trainer(strategy=used, max_epochs=3, limit_val_batches=0).fit(module)
    stock, module = modules
    assert module.losses == pytest.approx(stock.losses, rel=1e-5)
    assert module.without == stock.without
    torch.testing.assert_close(module.state_dict(), stock.state_dict(), rtol=1e-4, atol=1e-6)
    assert strategy.report.ort_runs > 0
    assert not strategy.report.fallbacks
    return module, strategy.report


@pytest.mark.parametrize("step_graph", ["auto", "split"])
@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_parameters_of_what_is_not_differentiated_have_no_gradient(
    shared: bool, scalar: bool, step_graph: str, make_trainer: Callable[..., Any]
) -> None:
    """Zeros would be a difference: AdamW's weight decay changes parameters that have them."""
    module, report = check(make_trainer, shared=shared, scalar=scalar, step_graph=step_graph)
    assert all(module.without)
    assert ReasonType.SEPARATE_GRADIENTS not in {note.reason.type for note in report.notes}
    advised = [note.reason.text for note in report.notes if "`detach()` it" in note.reason.text]
    assert bool(advised) == (not shared and step_graph == "auto")


class Rounded(Several):
    """Has parameters whose gradients are zero, whatever the loss's is."""

    rounding = staticmethod(torch.round)
    alone = True  # whether the loss is all that it returns with gradients

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.Parameter(3 * torch.randn(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch[0]) + self.rounding(self.levels)).square().mean()
        return loss if self.alone else {"loss": loss, "other": self.second(batch[0]).mean()}

    def on_after_backward(self) -> None:
        self.without.append(self.levels.grad is None)


@pytest.mark.parametrize("step_graph", ["auto", "split"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("rounding", [torch.round, torch.sgn, lambda x: torch.copysign(torch.ones_like(x), x)])
def test_parameters_whose_gradients_are_zero_have_them(
    rounding: Any, alone: bool, step_graph: str, make_trainer: Callable[..., Any]
) -> None:
    module, _ = check(make_trainer, Rounded, rounding=staticmethod(rounding), alone=alone, step_graph=step_graph)
    assert not any(module.without)


@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward", "on_train_batch_end"])
def test_a_result_beside_the_loss_that_a_hook_differentiates(
    hook: str, scalar: bool, make_trainer: Callable[..., Any]
) -> None:
    """The last one is differentiated after the optimizer's step, which has changed the parameters."""
    _, report = check(make_trainer, hook=hook, scalar=scalar)
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.SEPARATE_GRADIENTS]
    assert note.where == "training_step"
    assert "`detach()`" in note.reason.text
    assert "the step stays uncompiled" in note.reason.text
