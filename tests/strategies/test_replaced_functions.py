"""Functions of Lightning's that people replace before a fit or while it lasts are called as under stock Lightning."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from small_modules import Small
from torch import nn

from lightning_ort import ORTStrategy
from lightning_ort._imports import NAMESPACES
from lightning_ort.compat.lightning_sources import KNOWN, owner_of

FABRIC = "plugins.precision.precision.Precision.forward_context"
TRIED = (
    "loops.training_epoch_loop._TrainingEpochLoop.advance",
    "loops.training_epoch_loop._TrainingEpochLoop.on_advance_end",
    "loops.optimization.automatic.Closure.closure",
    "loops.optimization.automatic.ClosureResult.asdict",
    "loops.optimization.automatic._AutomaticOptimization._optimizer_step",
    "loops.evaluation_loop._EvaluationLoop._evaluation_step",
    "loops.fetchers._PrefetchDataFetcher.__next__",
    "loops.progress._Progress.increment_ready",
    "utilities.combined_loader._MaxSizeCycle.__next__",
    "trainer.call._call_callback_hooks",
    "trainer.connectors.logger_connector.logger_connector._LoggerConnector.on_batch_end",
    "trainer.connectors.logger_connector.result._ResultCollection.log",
    "core.module.LightningModule.log",
    "core.optimizer.LightningOptimizer.step",
    "core.hooks.ModelHooks.on_before_zero_grad",
    "plugins.precision.precision.Precision.pre_backward",
    "plugins.precision.precision.Precision.train_step_context",
    "plugins.precision.precision.Precision.optimizer_step",
    FABRIC,
    "strategies.strategy.Strategy.pre_backward",
    "strategies.strategy.Strategy.post_backward",
    "strategies.strategy.Strategy.training_step",
    "strategies.strategy.Strategy.post_training_step",
    "core.module.LightningModule._call_batch_hook",
    "core.module.LightningModule._apply_batch_transfer_handler",
)
# where these are replaced, the run stays lean, and calls what is new
CALLED = ("core", "strategies", "callbacks.callback")
BARS = "callbacks.progress"


class Replaces(Callback):
    """Puts something in the place of a function that counts its calls in each batch, from a batch on."""

    def __init__(self, name: str, batch: int) -> None:
        self._owner, self._name = owner_of(NAMESPACES[0], name)
        self._at = batch
        self.batches = 0
        self.calls: dict[int, int] = {}
        self._before: Any = None
        if batch < 0:
            self.replace()

    def replace(self) -> None:
        self._before = vars(self._owner).get(self._name)
        kind: Any = inspect.getattr_static(self._owner, self._name)
        if isinstance(kind, property):
            new: Any = property(self._counted(kind.fget), kind.fset)
        elif isinstance(kind, staticmethod | classmethod):
            new = type(kind)(self._counted(kind.__func__))
        else:
            new = self._counted(kind)
        setattr(self._owner, self._name, new)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[self.batches] = self.calls.get(self.batches, 0) + 1
            return function(*args, **kwargs)

        return counted

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1
        if self.batches == self._at:
            self.replace()

    def restore(self) -> None:
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


def check(name: str, batch: int, make_trainer: Any, **config: Any) -> None:
    found = []
    for strategy in ("auto", ORTStrategy(config=config)):
        replaces, module = Replaces(name, batch), Small()
        try:
            owner, own_name = owner_of(NAMESPACES[0], name)
            callbacks = [replaces, owner()] if name.startswith(BARS) else [replaces]
            bars = {"callbacks": callbacks, "enable_progress_bar": name.startswith(BARS)}
            trainer = make_trainer(strategy=strategy, max_epochs=4, log_every_n_steps=1, **bars)
            trainer.fit(module)
        finally:
            replaces.restore()
        # in this batch, or this loop, the old one may be called
        calls = {number: count for number, count in replaces.calls.items() if batch < 0 or number > 9}
        found.append((calls, trainer.fit_loop.state_dict()))
        losses = module.losses if strategy == "auto" else losses  # noqa: F821
        assert module.losses == pytest.approx(losses, rel=1e-4)
    (expected, progress), (calls, own_progress) = found
    assert own_progress == progress
    if isinstance(inspect.getattr_static(owner, own_name), property):  # which may be read by others as well
        calls = {number: min(count, expected.get(number, 0)) for number, count in calls.items()}
    assert calls == expected
    assert calls or name not in TRIED
    assert "Lightning's own" in strategy.report.run.trainer_loop or name.startswith(CALLED)


@pytest.mark.parametrize("batch", [-1, 6])
@pytest.mark.parametrize("name", TRIED)
def test_a_function_is_replaced(name: str, batch: int, make_trainer: Any) -> None:
    check(name, batch, make_trainer, engine="torch")


@pytest.mark.parametrize(
    "name", ["core.optimizer.LightningOptimizer.step", "plugins.precision.precision.Precision.optimizer_step"]
)
def test_under_a_captured_step(name: str, make_trainer: Any) -> None:
    check(name, 6, make_trainer, start="now", placement="always")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in TRIED])
def test_any_other_function_is_replaced(name: str, make_trainer: Any) -> None:
    check(name, 6, make_trainer, engine="torch")


class Wraps(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        return self.module(*args)


class Changes(Small):
    """Changes something in the middle of its third training step."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self._change = change
        self.seen: list[Any] = []
        self.rate = self.trained = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.trained += 1
        if self.trained == 3:
            self._change(self)
        self.log("loss", loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append((self.global_step, torch.is_grad_enabled(), outputs["loss"].item()))


def wrap_model(module: Any) -> None:
    module.trainer.strategy.model = module.__dict__["wrapper"] = Wraps(module)


def wrap_step(module: Any) -> None:
    optimizer = module.trainer.optimizers[0]
    step = optimizer.step

    def counted(closure: Any = None) -> Any:
        module.seen.append(closure is None)
        return step(closure)

    optimizer.step = counted


def accumulate(module: Any) -> None:
    module.trainer.accumulate_grad_batches = 2


def switch_gradients_off(module: Any) -> None:
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("config", [{"engine": "torch"}, {"start": "now"}], ids=["unchanged", "captured"])
@pytest.mark.parametrize("change", [wrap_model, wrap_step, accumulate, switch_gradients_off])
def test_a_step_changes_what_comes_after_it(change: Any, config: Any, make_trainer: Any) -> None:
    found = []
    for strategy in ("auto", ORTStrategy(config=config)):
        module, error = Changes(change), ""
        trainer = make_trainer(strategy=strategy, max_epochs=2, limit_val_batches=0)
        try:
            trainer.fit(module)
        except RuntimeError as raised:
            error = str(raised)
        finally:
            torch.set_grad_enabled(True)
        calls = vars(module)["wrapper"].calls if change is wrap_model else 0
        found.append((error, calls, len(module.seen), trainer.global_step))
        plain = [value for each in module.seen if isinstance(each, tuple) for value in each]
        values = plain if strategy == "auto" else values  # noqa: F821
        assert plain == pytest.approx(values, rel=1e-4)
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        first = weights if strategy == "auto" else first  # noqa: F821
        torch.testing.assert_close(weights, first, rtol=1e-4, atol=1e-5)
    assert found[0] == found[1]
    assert bool(found[0][0]) == (change is switch_gradients_off)


def test_validation_after_no_batches_is_refused(make_trainer: Any) -> None:
    for strategy in ("auto", ORTStrategy()):
        trainer = make_trainer(strategy=strategy, max_epochs=1, val_check_interval=0)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(Small())
        assert trainer.global_step == 1


BAD_CALLS: tuple[Callable[[Any], Any], ...] = (
    lambda log: log(),
    lambda log: log("a"),
    lambda log: log("a", 1, name="b"),
    lambda log: log("a", 1, unknown=True),
    lambda log: log("a", 1, *[None] * 13),
    lambda log: log("a", torch.ones(2)),
    lambda log: log("a", "text"),
    lambda log: log("a", {"b": {"c": "text"}}),
    lambda log: log("a", 1, reduce_fx="median"),
    lambda log: log("a", 1, on_step=False, on_epoch=False),
    lambda log: log(3, 1),
    lambda log: (log("a", 1), log("a", 1, on_step=True, prog_bar=True)),
)


@pytest.mark.parametrize("call", BAD_CALLS)
def test_errors_of_log(call: Any, make_trainer: Any) -> None:
    texts = []
    for strategy in ("auto", ORTStrategy()):

        class Logs(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.log("fine", 1.0)
                if self.global_step == 2:
                    call(self.log)
                return self.loss(batch)

        with pytest.raises(Exception, match=r".") as raised:
            make_trainer(strategy=strategy, max_epochs=1).fit(Logs())
        texts.append((raised.type, str(raised.value)))
    assert texts[0] == texts[1]
