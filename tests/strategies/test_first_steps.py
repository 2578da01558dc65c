"""The first step runs unchanged: errors come early, and a step that takes gradients itself is not compiled in vain."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_modules import Small
from torch import Tensor, autograd, nn

from lightning_ort import ORTStrategy
from lightning_ort.compat.autograd import WatchedCalls
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.strategies.capture import first_steps
from lightning_ort.strategies.capture.first_steps import FirstSteps
from lightning_ort.strategies.capture.module import CapturedModule


class Penalty(Small):
    """Penalizes gradients; in some ways a graph may hold that, or leaves it out."""

    way = "grad"

    def penalty(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        if self.way == "func":
            gradient = torch.func.grad(lambda one: self.net(one).sum())(x)
        elif self.way == "backward":
            self.net(x).sum().backward(inputs=[x], create_graph=True)
            gradient, x.grad = x.grad, None
        else:
            (gradient,) = autograd.grad(self.net(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    @torch.compiler.disable
    def left_out(self, x: Tensor) -> Tensor:
        return self.penalty(x)

    def loss(self, batch: Any) -> Tensor:
        penalty = self.left_out(batch[0]) if self.way == "disabled" else self.penalty(batch[0])
        return super().loss(batch) + 0.1 * penalty

    @torch.enable_grad()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What dynamo was started for."""
    names = []
    compile_ = CapturedModule.compile

    def compile_function(self: CapturedModule, function: Any, engine: Any = "ort") -> Any:
        names.append(getattr(function, "__name__", str(function)))
        return compile_(self, function, engine)

    monkeypatch.setattr(CapturedModule, "compile", compile_function)
    return names


@pytest.mark.parametrize("way", ["grad", "backward"])
def test_a_step_that_takes_gradients_itself_is_never_compiled(
    way: str, make_trainer: Callable[..., Any], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = list[int]()
    monkeypatch.setattr(first_steps, "WatchedCalls", lambda: watched.append(1) or WatchedCalls())
    modules = [Penalty(), Penalty()]
    strategy = ORTStrategy(config={"placement": "always"})
    for module, chosen in zip(modules, ("auto", strategy), strict=True):
        module.way = way
        make_trainer(strategy=chosen, max_epochs=2, inference_mode=False).fit(module)
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=1e-5)
    assert compiled == []
    assert len(watched) == 2  # steps: the first one of each kind has told it
    notes = [note for note in strategy.report.notes if note.reason.type is ReasonType.SECOND_GRADIENT]
    assert {note.where for note in notes} == {"training_step", "validation_step"}
    assert all("the step stays uncompiled" in note.reason.text for note in notes)
    assert not strategy.report.fallbacks


class Adversarial(Small):
    """Takes one gradient itself, which is not differentiated."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        (gradient,) = autograd.grad(self.loss((x, y)), x)
        return self.loss((x.detach() + 0.1 * gradient.sign(), y))


def test_the_children_of_a_step_that_takes_a_first_gradient_are_compiled(make_trainer: Callable[..., Any]) -> None:
    modules = [Adversarial(), Adversarial()]
    strategy = ORTStrategy(config={"placement": "always", "debug": {"capture": "modules"}})
    for module, chosen in zip(modules, ("auto", strategy), strict=True):
        make_trainer(strategy=chosen, max_epochs=2, limit_val_batches=0).fit(module)
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=1e-4)
    assert strategy.report.ort_runs > 0


@pytest.mark.parametrize("way", ["func", "disabled"])
def test_gradients_that_graphs_hold_or_leave_out_do_not_count(
    way: str, make_trainer: Callable[..., Any], compiled: list[str]
) -> None:
    module = Penalty()
    module.way = way
    strategy = ORTStrategy(config={"placement": "always"})
    make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module)
    assert compiled
    assert strategy.report.ort_runs > 0
    assert not [note for note in strategy.report.notes if note.reason.type is ReasonType.SECOND_GRADIENT]


def test_gradients_that_a_backward_pass_takes_do_not_count() -> None:
    class Twice(autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return autograd.grad(x.square().sum(), x)[0] * gradient

    engine = autograd._engine_run_backward
    x = torch.randn(3, requires_grad=True)
    with WatchedCalls() as calls:
        Twice.apply(x).sum().backward()
    assert (calls.own, calls.second) == (False, False)
    torch.testing.assert_close(x.grad, 2 * x.detach())
    with WatchedCalls() as outer, WatchedCalls() as calls:
        autograd.grad(x.square().sum(), x)
    assert (calls.own, calls.second, outer.own) == (True, False, False)
    assert autograd._engine_run_backward is engine


def test_what_a_watched_step_returns_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()  # what is left in a cycle, and its graph's small blocks all over the heap, stays until an epoch ends
    try:
        output = FirstSteps(lambda x: x.exp().sum())(torch.ones(2, requires_grad=True))
        kept = weakref.ref(output)
        del output
        assert kept() is None
    finally:
        gc.enable()


def test_what_one_step_was_seen_to_do_is_told_to_a_step_that_runs_once(
    make_trainer: Callable[..., Any], compiled: list[str]
) -> None:
    strategy = ORTStrategy(config={"placement": "always"})
    settings = {"max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0, "inference_mode": False}
    make_trainer(strategy=strategy, **settings).fit(Penalty())
    assert compiled == []
    assert {note.where for note in strategy.report.notes} == {"training_step", "validation_step"}


class Wrong(Small):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + batch[0][100, 0] if self.trainer.training else loss


@pytest.mark.parametrize("config", [{"start": "now"}, {"placement": "always"}], ids=["now", "always"])
def test_an_error_in_the_first_step_comes_before_anything_is_compiled(
    config: dict[str, Any], make_trainer: Callable[..., Any], compiled: list[str]
) -> None:
    with pytest.raises(IndexError):
        make_trainer(strategy=ORTStrategy(config=config), max_epochs=1, limit_val_batches=0).fit(Wrong())
    assert compiled == []


class MadeLate(Small):
    """Its first step makes its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))


@pytest.mark.parametrize("steps", [1, 4])
def test_lazy_parameters_take_their_random_numbers(steps: int, make_trainer: Callable[..., Any]) -> None:
    after = []
    for strategy in ("auto", ORTStrategy(config={"start": "now"})):
        torch.manual_seed(0)
        trainer = make_trainer(strategy=strategy, max_steps=steps, limit_val_batches=0)
        trainer.fit(module := MadeLate())
        after.append((torch.rand(3), *module.state_dict().values()))
    torch.testing.assert_close(*after)
    assert (trainer.strategy.report.ort_runs > 0) == (steps > 1)


def test_the_only_step_of_a_run_is_compiled_at_once(make_trainer: Callable[..., Any]) -> None:
    strategy = ORTStrategy(config={"placement": "always"})
    make_trainer(strategy=strategy, max_steps=1, limit_val_batches=0).fit(Small())
    assert strategy.report.ort_runs == 1


class KeepsGradients(Small):
    """Adds up losses with their gradients, which shows once it is compiled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean = 0.9 * getattr(self, "mean", 0.0) + 0.1 * loss
        return loss


def test_what_is_for_eager_alone_is_remembered(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str], paces: Any
) -> None:
    paces(torch=2.0, ort=1.0, compiling=2.1)

    def notes() -> dict[ReasonType, str]:
        config = {"start": "amortized", "engine": "ort", "cache_dir": str(tmp_path / "cache")}
        strategy = ORTStrategy(config=config)
        make_trainer(strategy=strategy, max_epochs=4, limit_val_batches=0).fit(KeepsGradients())
        return {note.reason.type: note.reason.text for note in strategy.report.notes}

    assert ReasonType.EARLIER_STEP in notes()
    assert compiled
    compiled.clear()
    text = notes()[ReasonType.NOT_COMPILED]
    assert "in an earlier run: a value with gradients was kept from an earlier step" in text
    assert "start='now'" in text
    assert compiled == []
    monkeypatch.setattr("lightning_ort.strategies.race.ways.program", lambda loaded: "changed")
    assert ReasonType.EARLIER_STEP in notes()  # the program may have been mended
    assert compiled
