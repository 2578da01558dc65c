"""The gradients of the last step go before a step as one graph computes new ones, and nobody sees a difference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from small_modules import Small
from torch import Tensor

from lightning_ort import ORTStrategy
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.running import step_graph


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small modules do it too."""
    monkeypatch.setattr(step_graph, "LARGE_BYTES", 0)


@pytest.fixture
def at_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Small], list[int]]:
    """Returns a list that gets, at each run of a session, how many parameters of a module have gradients."""

    def watch(module: Small) -> list[int]:
        found: list[int] = []
        run = BoundSession.__call__

        def watched(self: BoundSession, *args: Any) -> Any:
            if module.trainer.training:  # not while it is compiled for the sanity check
                found.append(sum(parameter.grad is not None for parameter in module.parameters()))
            return run(self, *args)

        monkeypatch.setattr(BoundSession, "__call__", watched)
        return found

    return watch


def fit(module: Small, strategy: Any, make_trainer: Callable[..., Any], **kwargs: Any) -> Small:
    """Train for two epochs of four batches."""
    make_trainer(strategy=strategy, max_epochs=2, limit_val_batches=0, **kwargs).fit(module)
    return module


def joint() -> ORTStrategy:
    """The strategy with each step as one graph on ONNX Runtime."""
    return ORTStrategy(config={"placement": "always", "debug": {"step_graph": "joint"}})


@pytest.mark.parametrize(("accumulate", "expected"), [(1, [0] * 7), (2, [0, 4, 0, 4, 0, 4]), (3, [0, 0, 4, 4, 0])])
def test_they_go_before_the_run(
    accumulate: int, expected: list[int], make_trainer: Callable[..., Any], at_run: Callable[[Small], list[int]]
) -> None:
    plain = fit(Small(), "auto", make_trainer, accumulate_grad_batches=accumulate)
    module, strategy = Small(), joint()
    found = at_run(module)
    fit(module, strategy, make_trainer, accumulate_grad_batches=accumulate)
    assert found[-len(expected) :] == expected  # of eight steps; the first window runs unchanged
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    assert [graph.name for graph in strategy.report.graphs] == ["training_step/step_0"]


class Seen(Small):
    """Keeps what it sees of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def look(self) -> None:
        """Keep the sum of each gradient, or that there is none."""
        for parameter in self.parameters():
            self.seen.append(-1.0 if parameter.grad is None else parameter.grad.abs().sum().item())


class BeforeZeroGrad(Seen):
    """Looks in the hook."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look()


class OwnZeroGrad(Seen):
    """Sets gradients to zero, not to nothing."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.look()
        optimizer.zero_grad(set_to_none=False)


class OwnOptimizer(Seen):
    """Has an optimizer that looks."""

    def configure_optimizers(self) -> Any:
        look = self.look

        class Looking(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = True) -> None:
                look()
                super().zero_grad(set_to_none)

        return Looking(self.parameters(), lr=0.1)


class KeepsOne(Seen):
    """The step hands a gradient of the last one on."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.last = self.net[0].weight.grad
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append(-1.0 if self.last is None else self.last.abs().sum().item())


class ReadsOne(Seen):
    """A gradient of the last step is part of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.net[0].weight.grad is not None:
            loss = loss + self.net[0].weight.grad.abs().sum() * self.net[0].bias.square().sum()
        return loss


class NotAllTrained(Seen):
    """The gradients of what no optimizer has are added up."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.look()


class Looks(Callback):
    """Looks as a callback."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look."""
        pl_module.look()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [BeforeZeroGrad, OwnZeroGrad, OwnOptimizer, KeepsOne, ReadsOne, NotAllTrained, Looks])
def test_who_looks_at_them_sees_them(kind: type, accumulate: int, make_trainer: Callable[..., Any]) -> None:
    runs = []
    for strategy in ("auto", joint()):
        module, callbacks = (Seen(), [kind()]) if kind is Looks else (kind(), [])
        runs.append(fit(module, strategy, make_trainer, accumulate_grad_batches=accumulate, callbacks=callbacks))
    plain, ours = runs
    assert ours.seen == pytest.approx(plain.seen, rel=1e-4)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert strategy.report.ort_runs > 0
    if kind is not ReadsOne:
        assert len(plain.seen) > 4
        assert {graph.name for graph in strategy.report.graphs} >= {"training_step/step_0"}
