"""Settled steps leave out what Lightning and dynamo have around them: nobody who looks or changes things may notice."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from small_modules import Small
from torch import Tensor, nn

from lightning_ort import ORTStrategy
from lightning_ort.strategies.capture.settled import SettledCall

EPOCHS = 25  # of four steps


class Step(Small):
    """Trains with AdamW, in one session."""

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each settled step."""
    calls: list[int] = []
    run = SettledCall.__call__

    def count(*args: Any) -> Any:
        found = run(*args)
        calls.extend([1] * (found is not None))
        return found

    monkeypatch.setattr(SettledCall, "__call__", count)
    return calls


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each step whose gradients were handed over at once."""
    calls: list[int] = []
    take = ORTStrategy.take_gradients

    def count(*args: Any) -> Any:
        found = take(*args)
        calls.extend([1] * (found is not None))
        return found

    monkeypatch.setattr(ORTStrategy, "take_gradients", count)
    return calls


@pytest.fixture
def pair(make_trainer: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Trains a module twice, and returns the callback of each, that of stock Lightning first."""

    def train(callback: Callable[[], Any], module: Callable[[], LightningModule] = Step, **kwargs: Any) -> Any:
        found = []
        for strategy in ("auto", ORTStrategy(config={"placement": "always", "audit": "off"})):
            one, looks = module(), callback()
            trainer = make_trainer(
                strategy=strategy, max_epochs=EPOCHS, callbacks=[looks], limit_val_batches=0, **kwargs
            )
            with contextlib.suppress(ArithmeticError):
                trainer.fit(one)
            looks.parameters, looks.states = [*one.parameters()], trainer.optimizers[0].state_dict()["state"]
            looks.progress = trainer.fit_loop.state_dict()
            found.append(looks)
        stock, own = found
        torch.testing.assert_close(own.parameters, stock.parameters, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.states, stock.states, atol=1e-5, rtol=1e-5)
        assert own.progress == stock.progress
        return stock, own

    return train


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


KEEP: list[Callable[[Tensor], Any]] = [
    lambda gradient: gradient,
    lambda gradient: gradient.view(-1),
    lambda gradient: gradient.untyped_storage(),
    lambda gradient: gradient.numpy(),
    np.from_dlpack,
    lambda gradient: gradient.data,
]


def test_gradients_that_somebody_keeps_stay_as_they_are(pair: Any, settled: list[int]) -> None:
    class Keeps(Callback):
        def __init__(self) -> None:
            self.kept: list[Any] = []
            self.then: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step % 3:
                gradient = module.net[0].weight.grad
                self.kept.append(KEEP[trainer.global_step // 3 % len(KEEP)](gradient))
                self.then.append(gradient.clone())

    stock, own = pair(Keeps)
    assert len(settled) > EPOCHS * 4 * 0.5
    for kept, then, expected in zip(own.kept, own.then, stock.then, strict=True):
        if isinstance(kept, torch.UntypedStorage):
            kept = torch.empty(0).set_(kept)
        value = torch.from_numpy(kept) if isinstance(kept, np.ndarray) else kept
        assert torch.equal(value.reshape(then.shape), then)
        torch.testing.assert_close(then, expected, atol=1e-5, rtol=1e-4)


def test_a_gradient_has_nothing_of_the_last_one(pair: Any, settled: list[int]) -> None:
    class Changes(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            one, other = module.net[0].weight.grad, module.net[2].weight.grad
            self.seen.append((hasattr(one, "mark"), one.requires_grad, one.shape, other.shape, other._backward_hooks))

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            one, other = module.net[0].weight.grad, module.net[2].weight.grad
            if trainer.global_step < 40:  # dynamo takes no such gradients
                return
            if trainer.global_step % 4 == 1:
                one.mark = True
                other.unsqueeze_(0)
            elif trainer.global_step % 4 == 2:
                one.requires_grad_()
            elif trainer.global_step % 4 == 3:
                module.net[0].bias.grad = None
                module.zero_grad(set_to_none=False)

    stock, own = pair(Changes)
    assert len(settled) > EPOCHS * 4 * 0.5
    assert own.seen == stock.seen


def test_hooks_that_come_while_it_trains_see_what_eager_shows(pair: Any, settled: list[int]) -> None:
    class Comes(Callback):
        """Hooks before the backward pass are assigned to the module for some steps."""

        def __init__(self) -> None:
            self.seen: list[Any] = []
            self.norms: list[float] = []

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 50:
                module.on_before_zero_grad = lambda optimizer: self.seen.append(module.net[0].bias.grad.norm().item())
            elif trainer.global_step == 60:
                del module.on_before_zero_grad
                self.on_before_backward = self.look
            elif trainer.global_step == 70:
                del self.on_before_backward
                self.handle = module.net[0].bias.register_post_accumulate_grad_hook(double)
            elif trainer.global_step == 80:
                self.handle.remove()

        def look(self, trainer: Any, module: Any, loss: Tensor) -> None:
            (gradient,) = torch.autograd.grad(loss, module.net[0].bias, retain_graph=True)
            self.seen.append(gradient.norm().item())

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            self.norms.append(sum(float(p.grad.norm()) for p in module.parameters()))
            (optimizer,) = trainer.optimizers
            if trainer.global_step == 85:  # within a step: the hook before it counts from the next one
                self.handles = [
                    optimizer.register_step_pre_hook(lambda *args: self.seen.append(1.0)),
                    optimizer.register_step_post_hook(lambda *args: self.seen.append(2.0)),
                ]
            elif trainer.global_step == 88:
                while self.handles:
                    self.handles.pop().remove()

    stock, own = pair(Comes)
    assert len(settled) > EPOCHS * 4 * 0.2
    assert own.seen[20:] == stock.seen[20:]
    torch.testing.assert_close(torch.tensor(own.seen), torch.tensor(stock.seen), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(own.norms), torch.tensor(stock.norms), atol=1e-5, rtol=1e-4)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError


def test_what_comes_between_a_step_and_its_update_runs_from_then_on(
    pair: Any, settled: list[int], taken: list[int]
) -> None:
    class Comes(Callback):
        """Each of these is replaced for two steps; what belongs to the strategy is the last."""

        def __init__(self) -> None:
            self.seen: list[float] = []
            self.norms: list[float] = []
            self.before: Any = None

        def wrapper(self, optimizer: Any, strategy: Any) -> Any:
            made: Any = LightningOptimizer(optimizer)
            step, made._strategy = made.step, strategy
            made.step = lambda *args, **kwargs: (self.seen.append(3.0), step(*args, **kwargs))[1]
            return made

        def places(self, trainer: Any, module: Any) -> list[tuple[Any, str, Any]]:
            (optimizer,), strategy, (bias, other) = (
                trainer.optimizers,
                trainer.strategy,
                (m.bias for m in module.net[::2]),
            )
            zero_grad, backward = optimizer.zero_grad, strategy.backward
            return [
                (module, "on_before_zero_grad", lambda optimizer: self.seen.append(float(bias.grad.norm()))),
                (self, "on_before_backward", lambda trainer, module, loss: self.seen.append(loss.item())),
                (module, "on_after_backward", lambda: double(bias)),
                (self, "on_before_optimizer_step", lambda trainer, module, optimizer: double(bias)),
                (module, "configure_gradient_clipping", lambda optimizer, *args, **kwargs: double(bias)),
                (module, "clip_gradients", lambda optimizer, *args, **kwargs: double(bias)),
                (module, "backward", lambda loss: (2 * loss).backward()),
                (module, "optimizer_zero_grad", lambda *args: bias.grad.zero_()),
                (optimizer, "zero_grad", lambda: (zero_grad(), setattr(other, "grad", torch.ones_like(other)))),
                (trainer, "gradient_clip_val", 0.05),
                (strategy, "_lightning_optimizers", [self.wrapper(optimizer, strategy)]),
                (strategy, "post_backward", lambda loss: double(bias)),
                (strategy, "backward", lambda loss, optimizer: backward(3 * loss, optimizer)),
            ]

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            number, since = divmod(trainer.global_step - 40, 4)
            places = self.places(trainer, module)
            if 0 <= number < len(places) and since in (1, 3):
                owner, name, value = places[number]
                if since == 1:
                    self.before = vars(owner).get(name, self)
                    setattr(owner, name, value)
                elif self.before is self:
                    delattr(owner, name)
                else:
                    setattr(owner, name, self.before)
            if trainer.global_step == EPOCHS * 4 - 1:
                module.net[0].weight.register_hook(fail)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.norms += [float(outputs["loss"]), *(float(p.grad.norm()) for p in module.parameters())]

    stock, own = pair(Comes)
    assert len(settled) > EPOCHS * 4 * 0.2
    assert len(taken) > EPOCHS
    torch.testing.assert_close(torch.tensor(own.seen), torch.tensor(stock.seen), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(own.norms), torch.tensor(stock.norms), atol=1e-5, rtol=1e-4)


def test_gradients_of_others_than_the_optimizers_and_losses_that_are_kept(pair: Any, taken: list[int]) -> None:
    class Kept(Step):
        """The optimizer lacks one of its parameters, and has one that is not used."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.last = loss = self.loss(batch) * self.scale
            return {"twice": 2 * loss.detach(), "loss": loss}

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([*self.net.parameters(), self.unused], lr=0.01)

    class Looks(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []
            self.refused = 0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            assert [*outputs] == ["loss", "twice"]
            self.seen += [float(outputs["loss"]), float(outputs["twice"]), float(module.last), float(module.scale.grad)]
            self.seen.append(float(module.unused.grad is None))
            if trainer.global_step % 4 == 1:
                module.unused.grad = torch.ones(2)
            elif trainer.global_step % 4 == 2:
                with pytest.raises(RuntimeError, match="a second time"):
                    module.last.backward()
                self.refused += 1

    stock, own = pair(Looks, Kept)
    assert len(taken) > EPOCHS
    assert own.refused == stock.refused == EPOCHS
    torch.testing.assert_close(torch.tensor(own.seen), torch.tensor(stock.seen), atol=1e-5, rtol=1e-4)


def test_hooks_of_parameters_and_modules_count_from_the_step_in_which_they_come(pair: Any, settled: list[int]) -> None:
    class Comes(Callback):
        def __init__(self) -> None:
            self.calls = 0

        def halve(self, gradient: Tensor) -> Tensor:
            self.calls += 1
            return gradient / 2

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 45:
                module.net[0].weight.register_hook(self.halve)
            elif trainer.global_step == 60:
                torch.set_grad_enabled(False)  # Lightning's closure enables them
            elif trainer.global_step == 75:
                module.net[0].register_forward_hook(lambda module, inputs, output: output / 2)

        def on_train_batch_end(self, *args: Any) -> None:
            torch.set_grad_enabled(True)

    stock, own = pair(Comes)
    assert settled
    assert own.calls == stock.calls == EPOCHS * 4 - 45


def test_parameters_and_states_that_are_replaced_are_used(pair: Any, settled: list[int]) -> None:
    class Replaces(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            (optimizer,), weight = trainer.optimizers, module.net[0].weight
            if trainer.global_step == 45:
                weight.data = weight.data * 0.5
            elif trainer.global_step == 50:
                optimizer.state[weight]["exp_avg"] = torch.ones_like(weight)
            elif trainer.global_step == 60:
                optimizer.state[weight] = {key: value.clone() * 2 for key, value in optimizer.state[weight].items()}
            elif trainer.global_step == 70:
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.param_groups[0]["lr"] = 0.003
            elif trainer.global_step == 80:
                module.net[2].weight = nn.Parameter(module.net[2].weight.detach() * 0.9)
                optimizer.state[module.net[2].weight] = optimizer.state.pop(optimizer.param_groups[0]["params"][2])
                optimizer.param_groups[0]["params"] = [*module.parameters()]
            elif trainer.global_step == 85:
                module.net[2].bias.requires_grad_(False)
            elif trainer.global_step == 90:
                optimizer.zero_grad(set_to_none=False)

    pair(Replaces)
    assert len(settled) > EPOCHS * 4 * 0.5


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}])
def test_clipping_and_accumulation_go_on(clip: dict[str, Any], pair: Any, settled: list[int]) -> None:
    class Dict(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return {"loss": loss, "twice": 2 * loss.detach()}

    class Looks(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.seen += [float(outputs["loss"]), float(outputs["twice"]), float(module.net[0].weight.grad.norm())]

    stock, own = pair(Looks, Dict, **clip)
    assert len(settled) > EPOCHS * 4 * 0.5
    torch.testing.assert_close(torch.tensor(own.seen), torch.tensor(stock.seen), atol=1e-5, rtol=1e-4)


def test_an_error_of_the_data_is_the_users(make_trainer: Callable[..., Any], settled: list[int]) -> None:
    class Labels(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 30:
                batch[1].add_(7)

    strategy = ORTStrategy(config={"placement": "always", "audit": "off"})
    trainer = make_trainer(strategy=strategy, max_epochs=EPOCHS)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds|out of range"):
        trainer.fit(Labels())
    assert settled
    assert trainer.global_step == 30


def test_unchanged_steps_whose_backward_pass_is_called_directly(
    make_trainer: Callable[..., Any], taken: list[int]
) -> None:
    class Looks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            if batch_idx == 1:
                loss.retain_grad()
            self.kept = loss
            return {"loss": loss.reshape(1) if batch_idx == 2 else loss, "number": batch_idx}

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

        def on_fit_start(self) -> None:
            self.seen: list[Any] = []
            next(self.parameters()).register_hook(self.see)

        def see(self, gradient: Tensor) -> None:
            self.seen.append(self._current_fx_name)
            self.log("gradient", gradient.norm())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            gradient = self.kept.grad.item() if batch_idx == 1 else None
            self.seen.append((outputs["loss"].tolist(), outputs["loss"].grad_fn, outputs["number"], gradient))

    found = []
    for strategy in ("auto", ORTStrategy(config={"compile_budget": 1e-9})):
        module = Looks()
        trainer = make_trainer(strategy=strategy, max_epochs=EPOCHS, limit_val_batches=0, gradient_clip_val=0.1)
        trainer.fit(module)
        gradient = trainer.callback_metrics["gradient"].item()
        found.append((module.seen, [p.tolist() for p in module.parameters()], gradient, trainer.fit_loop.state_dict()))
    assert found[0] == found[1]
    assert len(taken) > 2 * EPOCHS
