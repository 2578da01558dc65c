"""A captured step whose gradients need nothing of autograd's engine is the step that eager makes, for whoever looks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from small_modules import Small
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort._imports import LIGHTNING
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.strategies.capture.direct_gradients import are_gradients_unseen

Fit = Callable[..., Small]


class Step(Small):
    """Batches of 8 and at last of 5; logs its loss, and remembers gradients."""

    make: Any = staticmethod(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("largest", self.net[0].weight.detach().abs().max())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(77, 8, generator=generator)
        return DataLoader(TensorDataset(x, torch.randint(0, 3, (77,), generator=generator)), batch_size=8)

    def val_dataloader(self) -> list[Any]:
        return []


class Looks(Callback):
    """Keeps the gradients as they are after each batch."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.seen.append([parameter.grad.clone() for parameter in module.parameters()])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each call of autograd's engine: a ``backward`` in another's place is called in each step."""
    calls: list[int] = []
    run = torch.autograd._engine_run_backward
    monkeypatch.setattr(
        torch.autograd, "_engine_run_backward", lambda *args, **kwargs: calls.append(1) or run(*args, **kwargs)
    )
    return calls


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each run of a session."""
    calls: list[int] = []
    run = BoundSession.__call__
    monkeypatch.setattr(BoundSession, "__call__", lambda *args: calls.append(1) or run(*args))
    return calls


@pytest.fixture
def fit(make_trainer: Callable[..., Any]) -> Fit:
    def train(module: Small, strategy: Any = None, callbacks: Any = (), **kwargs: Any) -> Small:
        if strategy is None:
            strategy = ORTStrategy(config={"placement": "always"})
        trainer = make_trainer(**{"strategy": strategy, "max_epochs": 2, "callbacks": [*callbacks], **kwargs})
        trainer.fit(module)
        return module

    return train


def assert_close(own: LightningModule, other: LightningModule) -> None:
    for (name, value), expected in zip(own.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5, msg=name)
    (one,), (two,) = own.trainer.optimizers, other.trainer.optimizers
    for value, expected in zip(one.state.values(), two.state.values(), strict=True):
        assert value.keys() == expected.keys()
        for key, tensor in value.items():
            torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (Step.make, {"max_epochs": 20}),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), {"gradient_clip_val": 0.05}),
        (lambda p: torch.optim.RMSprop(p), {"accumulate_grad_batches": 3}),
    ],
    ids=["adamw, 200 steps", "sgd, clipping", "rmsprop, accumulation"],
)
def test_losses_gradients_parameters_and_states_are_those_of_eager(
    make: Any, kwargs: Any, fit: Fit, engine: list[int], runs: list[int]
) -> None:
    found = []
    for strategy in ("auto", None):
        module, looks = Step(), Looks()
        module.make = make
        engine.clear()
        found.append((fit(module, strategy, [looks], **kwargs), looks))
    (expected, eager), (module, looks) = found
    steps = 10 * kwargs.get("max_epochs", 2)
    assert len(looks.losses) == steps
    assert len(runs) >= steps - 4
    # the first ones, and where something was compiled, which a comparison with eager repeats
    assert len(engine) < steps / 2, "steps that needed the engine"
    torch.testing.assert_close(torch.tensor(looks.losses), torch.tensor(eager.losses), atol=1e-5, rtol=1e-5)
    for one, other in zip(looks.seen, eager.seen, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert_close(module, expected)
    assert module.trainer.callback_metrics.keys() == expected.trainer.callback_metrics.keys()
    torch.testing.assert_close(
        module.trainer.callback_metrics["loss"], expected.trainer.callback_metrics["loss"], atol=1e-5, rtol=1e-5
    )


class Before(Callback):
    """Looks at the loss before its backward pass."""

    def on_before_backward(self, trainer: Any, module: LightningModule, loss: Tensor) -> None:
        assert loss.requires_grad
        assert loss.grad_fn is not None


class Doubles(Step):
    """Has a backward pass of its own."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class DoublesBefore(ORTStrategy):
    """Trains on twice the loss."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().training_step(*args, **kwargs)


class Thrice(ORTStrategy):
    """Has three backward passes of each loss, which are two in sum."""

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for _ in range(2):
            (closure_loss / 2).backward(retain_graph=True)
        return super().backward(closure_loss, *args, **kwargs)


def test_who_takes_part_in_the_backward_pass_is_called(fit: Fit, engine: list[int]) -> None:
    settings = {"placement": "always"}
    fit(Step(), callbacks=[Before()])
    assert len(engine) >= 20
    doubled = fit(Doubles())
    expected = Doubles()
    assert_close(doubled, fit(expected, "auto"))
    assert_close(fit(Step(), DoublesBefore(config=settings)), expected)
    assert_close(fit(Step(), Thrice(config=settings)), expected)

    class Hooked(Step):
        def on_train_start(self) -> None:
            self.handle = self.net[0].weight.register_hook(lambda gradient: gradient.sign())

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                self.handle.remove()

    engine.clear()
    hooked = fit(Hooked(), max_epochs=3)
    assert_close(hooked, fit(Hooked(), "auto", max_epochs=3))


def test_gradients_that_are_changed_before_the_update_are_used(fit: Fit, engine: list[int]) -> None:
    class Changes(Callback):
        def on_after_backward(self, trainer: Any, module: LightningModule) -> None:
            module.net[0].weight.grad.mul_(0.5)

        def on_before_optimizer_step(self, trainer: Any, module: LightningModule, optimizer: Any) -> None:
            module.net[2].bias.grad = torch.ones(3)

    module = fit(Step(), callbacks=[Changes()])
    assert len(engine) < 8
    assert_close(module, fit(Step(), "auto", [Changes()]))


@pytest.mark.parametrize("hook", [None, "configure_gradient_clipping", "optimizer_step", "on_after_backward"])
def test_gradients_are_not_for_the_optimizer_alone_where_a_hook_sees_them(
    hook: str | None, make_trainer: Callable[..., Any]
) -> None:
    class Asks(Step):
        alone: Any = None
        on_train_batch_end = LightningModule.on_train_batch_end

        def on_train_batch_start(self, *args: Any) -> None:
            self.alone = are_gradients_unseen(self.trainer.strategy, LIGHTNING)

    hooks = {} if hook is None else {hook: lambda self, *args, **kwargs: getattr(Step, hook)(self, *args, **kwargs)}
    module = type("Hooked", (Asks,), hooks)()
    make_trainer(strategy=ORTStrategy(config={"placement": "always"}), max_steps=2).fit(module)
    assert module.alone == (hook is None)


def test_a_loss_that_is_kept_has_one_backward_pass(fit: Fit) -> None:
    class Keeps(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.last = loss = super().training_step(batch, batch_idx)
            return loss

    module = fit(Keeps())
    with pytest.raises(RuntimeError, match="second time"):
        module.last.backward()
