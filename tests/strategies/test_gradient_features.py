"""What gradients go through: under ``ort`` each gives what it gives under the stock strategy."""

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from features import QUIET, Trainers, check_feature, feature, features_of, fit
from lightning.pytorch import LightningModule, Trainer, seed_everything
from small_modules import Small, loader
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy
from lightning_ort.compiler import compilation
from lightning_ort.compiler.reason import ReasonType


def _checkpointed(reentrant: bool) -> None:
    @feature("Gradients", f"`torch.utils.checkpoint`, `use_reentrant={reentrant}`")
    def checkpointed(trainers: Trainers) -> Any:
        class Checkpointed(Small):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.other = nn.Linear(8, 8), nn.Linear(8, 3)

            def forward(self, x: Tensor) -> Tensor:
                other = checkpoint(self.other, x, use_reentrant=reentrant)  # which gets no gradient then
                return checkpoint(self.net, self.first(x), use_reentrant=reentrant) + other

        return fit(Checkpointed(), trainers())


for _reentrant in (False, True):
    _checkpointed(_reentrant)


@feature("Gradients", "`gradient_checkpointing_enable` of transformers", slow=True)
def transformers_checkpointing(trainers: Trainers) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    class Language(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT2LMHeadModel(
                GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False)
            )
            self.net.train()
            self.net.gradient_checkpointing_enable()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(input_ids=batch, labels=batch).loss

    tokens = torch.arange(32).reshape(4, 8) % 16
    return fit(Language(), trainers(max_epochs=1), train_dataloaders=DataLoader(tokens, batch_size=2))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x.tanh() * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * x.sigmoid(), None  # not the derivative, so that the test can tell


@feature("Gradients", "`torch.autograd.Function`")
def autograd_function(trainers: Trainers) -> Any:
    class Custom(Small):
        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(super().forward(x), 2.0)

    return fit(Custom(), trainers())


@feature("Gradients", "gradient penalty (`create_graph=True`)", how="torch")
def gradient_penalty(trainers: Trainers) -> Any:
    class Penalty(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return self.loss(batch) + (gradient.norm(2, dim=1) - 1).square().mean()

    return fit(Penalty(), trainers())


@feature("Gradients", "gradient penalty of a GAN", how="torch")
def gan_penalty(trainers: Trainers) -> Any:
    class GAN(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
            self.generator = nn.Linear(8, 8)

        def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
            part = torch.rand(len(real), 1)
            mixed = (part * real + (1 - part) * fake).requires_grad_(True)
            score = self.critic(mixed)
            gradient = torch.autograd.grad(
                outputs=score,
                inputs=mixed,
                grad_outputs=torch.ones_like(score),
                create_graph=True,
                retain_graph=True,
                only_inputs=True,
            )[0]
            return ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for_generator, for_critic = self.optimizers()
            real = batch[0]
            fake = self.generator(torch.randn_like(real)).detach()
            loss = self.critic(fake).mean() - self.critic(real).mean() + 10 * self.penalty(real, fake)
            for_critic.zero_grad()
            self.manual_backward(loss)
            for_critic.step()
            other = -self.critic(self.generator(torch.randn_like(real))).mean()
            for_generator.zero_grad()
            self.manual_backward(other)
            for_generator.step()
            self.log_dict({"critic": loss, "generator": other}, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]

    return fit(GAN(), trainers())


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


@feature("Gradients", "`loss.backward()` in the step")
def raw_backward(trainers: Trainers) -> Any:
    class Raw(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
            self.net[2].weight.register_post_accumulate_grad_hook(double)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            loss = self.loss(batch)
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

    return fit(Raw(), trainers())


@feature("Gradients", "adversarial example (`torch.autograd.grad` of the input)", how="torch")
def adversarial(trainers: Trainers) -> Any:
    class Adversarial(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss((x, y)), x)
            return self.loss(((x + 0.1 * gradient.sign()).detach(), y))

    return fit(Adversarial(), trainers())


@feature("Gradients", "`backward` twice, `retain_graph=True`")
def backward_twice(trainers: Trainers) -> Any:
    class Twice(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            optimizer.step()
            return loss

    return fit(Twice(), trainers())


@feature("Gradients", "parameters that the loss does not depend on")
def unused(trainers: Trainers) -> Any:
    class Unused(Small):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 8)
            self.without_gradient: list[int] = []

        def on_after_backward(self) -> None:
            self.without_gradient.append(sum(p.grad is None for p in self.parameters()))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Unused()
    fitted = fit(module, trainers())
    assert set(module.without_gradient) == {2}
    return fitted


@feature("Gradients", "parameters that the loss depends on in some steps")
def sometimes_used(trainers: Trainers) -> Any:
    class Sometimes(Small):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 8)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss((self.other(x) if batch_idx % 2 else x, y))

    return fit(Sometimes(), trainers())


@feature("Gradients", "`register_hook` and `retain_grad` of a result that is kept", how="torch")
def kept_result(trainers: Trainers) -> Any:
    class Kept(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.net[1](self.net[0](batch[0]))
            hidden.register_hook(lambda gradient: gradient * 0.5)
            self.hidden = hidden
            return self.net[2](hidden).square().mean()

        def on_before_backward(self, loss: Tensor) -> None:
            self.hidden.retain_grad()

        def on_after_backward(self) -> None:
            self.log("norm", self.hidden.grad.norm())

    return fit(Kept(), trainers())


@pytest.mark.parametrize("name", features_of(__name__))
def test_feature(name: str, tmp_path: Path) -> None:
    check_feature(name, tmp_path)


class HiddenPenalty(Small):
    """Takes a gradient of a gradient where dynamo does not see it: frames with a break in a loop are Python's."""

    first = 0  # step with a penalty

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for _ in range(1):
            gc.isenabled()
            if self.global_step >= self.first:
                x = batch[0].clone().requires_grad_()
                (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
                loss = loss + 0.1 * gradient.square().mean()
        return loss


@pytest.mark.parametrize("capture", ["auto", "modules"])
@pytest.mark.parametrize("first", [0, 3])
def test_hidden_gradient_of_a_gradient(capture: str, first: int, tmp_path: Path) -> None:
    losses = []
    strategy = ORTStrategy(config={"placement": "always", "debug": {"capture": capture}})
    for chosen in ("auto", strategy):
        module = HiddenPenalty()
        module.first = first
        Trainer(**{**QUIET, "strategy": chosen, "default_root_dir": tmp_path, "max_epochs": 2}).fit(module)
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (strategy.report.ort_runs > 0) == (first > 0)  # the first step runs unchanged
    assert not [each for each in strategy.report.fallbacks if each.reason.type is ReasonType.RUN_FAILED]
    notes = [note for note in strategy.report.notes if note.reason.type is ReasonType.SECOND_GRADIENT]
    assert [note.where for note in notes] == ["training_step"]
    assert "the step stays uncompiled" in notes[0].reason.text


def test_another_module_is_not_refused_for_the_last_one(tmp_path: Path) -> None:
    strategy = ORTStrategy(config={"placement": "always", "debug": {"capture": "modules"}})
    settings = {**QUIET, "strategy": strategy, "default_root_dir": tmp_path}
    Trainer(**{**settings, "max_steps": 1}).fit(HiddenPenalty())  # what its step found out is for the next one
    module, stock = Small(), Small()
    before, notes = strategy.report.ort_runs, [*strategy.report.notes]
    Trainer(**settings).fit(module)
    assert strategy.report.ort_runs > before
    assert [note for note in strategy.report.notes if note not in notes] == []
    Trainer(**{**settings, "strategy": "auto"}).fit(stock)
    assert module.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize("where", ["in the step", "in the backward pass"])
def test_a_late_gradient_of_a_gradient_is_an_error_that_says_what_to_do(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if self.global_step >= 3:
                (gradient,) = torch.autograd.grad(loss, self.net[0].weight, create_graph=True)
                loss = loss + gradient.square().sum()
                if where == "in the step":
                    torch.autograd.grad(loss, self.net[0].weight, retain_graph=True)
            return loss

    monkeypatch.setattr(compilation, "PASSES", 1)
    strategy = ORTStrategy(config={"placement": "always", "debug": {"capture": "modules"}})
    trainer = Trainer(**{**QUIET, "strategy": strategy, "default_root_dir": tmp_path, "max_epochs": 2})
    with pytest.raises(RuntimeError, match=r"gradient of a gradient.*engine=.torch."):
        trainer.fit(Late())
    assert strategy.report.ort_runs > 0


class KeepsLoss(Small):
    """Keeps a mean of its losses for the next step, with their gradients, as people forget to detach."""

    where = "a tensor"

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())
        self.parts = {"mean": torch.zeros(())}
        self.register_buffer("features", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.where == "a tensor":
            self.mean = 0.9 * self.mean + 0.1 * loss
        elif self.where == "an item":
            self.parts["mean"] = 0.9 * self.parts["mean"] + 0.1 * loss
        elif self.where == "a buffer":
            self.features = 0.9 * self.features + self.net[0].weight[:8, 0]
        elif self.where == "a buffer in place":
            self.features += self.net[0].weight[:8, 0]
        elif self.where == "before a graph break":
            self.features = 0.9 * self.features + self.net[0].weight[:8, 0]
            torch._dynamo.graph_break()
            with suppress(KeyError):  # dynamo leaves the rest to Python
                loss = loss + self.net[0].bias.square().sum()
                torch._dynamo.graph_break()
        else:
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


@pytest.mark.parametrize("step_graph", ["joint", "split"])
@pytest.mark.parametrize(
    "where", ["a tensor", "an item", "a buffer", "a buffer in place", "before a graph break", "detached"]
)
def test_values_that_are_kept_with_their_gradients(
    where: str, step_graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled backward passes go on to those of the steps before, which are over."""
    monkeypatch.setattr(KeepsLoss, "where", where)
    strategy = ORTStrategy(config={"placement": "always", "debug": {"step_graph": step_graph}})
    modules = []
    for used in ("auto", strategy):
        modules.append(KeepsLoss())
        Trainer(**{**QUIET, "strategy": used, "default_root_dir": tmp_path, "max_epochs": 2}).fit(modules[-1])
    stock, module = modules
    assert module.losses == pytest.approx(stock.losses, rel=1e-5)
    torch.testing.assert_close(module.state_dict(), stock.state_dict(), rtol=1e-4, atol=1e-6)
    kinds = {note.reason.type for note in strategy.report.notes}
    kept = {ReasonType.EARLIER_STEP, ReasonType.WRITES_TO_INPUT, ReasonType.SEPARATE_GRADIENTS}
    assert bool(kinds & kept) == (where != "detached")
    assert strategy.report.ort_runs > 0 or where != "detached"  # the first graph may say it
    assert not any("instead" in note.reason.text for note in strategy.report.notes)  # it is for eager alone
    assert not strategy.report.fallbacks


class ByHand(LightningModule):
    """Takes the gradients of two losses one after the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        seed_everything(0, verbose=False)
        self.automatic_optimization, self.kind, self.losses = False, kind, []
        self.trunk, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        features = self.trunk(batch[0]).tanh()
        kept = features if self.kind == "retained" else features.detach()
        loss, other = self.first(features).square().mean(), self.second(kept).exp().mean()
        if self.kind == "one":
            self.log_dict({"loss": loss, "other": other})
            loss, other = loss + other, features.mean()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss, retain_graph=self.kind == "retained")
        if self.kind != "one":
            self.manual_backward(other)
        first.step()
        second.step()
        self.losses.append((loss.item(), other.item()))

    def train_dataloader(self) -> DataLoader:
        return loader(64)

    def configure_optimizers(self) -> Any:
        heads = [*self.first.parameters(), *self.second.parameters()]
        return [torch.optim.SGD(parameters, 0.05) for parameters in (self.trunk.parameters(), heads)]


@pytest.mark.parametrize(("kind", "captured"), [("separate", False), ("retained", True), ("one", True)])
def test_gradients_of_two_losses_in_turn(kind: str, captured: bool, tmp_path: Path) -> None:
    """Results of a compiled graph have one backward pass; in eager those that share nothing have one each."""
    strategy = ORTStrategy(config={"placement": "always"})
    modules = [ByHand(kind), ByHand(kind)]
    for module, used in zip(modules, ("auto", strategy), strict=True):
        Trainer(**{**QUIET, "strategy": used, "default_root_dir": tmp_path, "max_epochs": 2}).fit(module)
    assert modules[1].losses == [pytest.approx(pair, rel=1e-5) for pair in modules[0].losses]
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-4, atol=1e-6)
    kinds = {note.reason.type for note in strategy.report.notes}
    assert (ReasonType.SEPARATE_GRADIENTS in kinds) != captured
    assert strategy.report.ort_runs > (1 if captured else 0)


class Recomputes(Small):
    """A checkpoint around a part that writes a buffer, which eager does a second time in the backward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        for name in ("mean", "variance"):
            self.register_buffer(name, torch.ones(8))

    def part(self, x: Tensor) -> Tensor:
        if self.kind == "statistics":
            return F.batch_norm(x, self.mean, self.variance, training=True)
        return x.tanh() * self.mean if self.kind == "written later" else self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "from the fifth step on" and self.global_step < 4:
            return self.net(self.part(x))
        x = checkpoint(self.part, x, use_reentrant=self.kind == "reentrant")
        if self.kind == "written later":
            with torch.no_grad():
                self.mean.mul_(0.9)
        return self.net(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.norm.train(self.kind != "only read")


@pytest.mark.parametrize(
    "kind", ["not reentrant", "reentrant", "statistics", "written later", "from the fifth step on", "only read"]
)
def test_what_a_checkpoint_computes_again_from_what_it_has_written_stays_in_eager(kind: str, tmp_path: Path) -> None:
    strategy = ORTStrategy(config={"placement": "always"})
    modules = [Recomputes(kind), Recomputes(kind)]
    for module, used in zip(modules, ("auto", strategy), strict=True):
        Trainer(**{**QUIET, "strategy": used, "default_root_dir": tmp_path}).fit(module)
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=1e-5)
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-4, atol=1e-6)
    notes = [note.where for note in strategy.report.notes if note.reason.type is ReasonType.WRITES_TO_INPUT]
    assert notes == ["training_step"] * (kind != "only read")
    assert (strategy.report.ort_runs > 0) == (kind in ("from the fifth step on", "only read"))
    assert not strategy.report.fallbacks


class Nests(Small):
    """One batch, and another object that the step reads, are nested tensors, which have no strides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2, 3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = nested(torch.ones(2, 3)) if batch_idx == 4 else torch.ones(2, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, scale = (torch.nested.to_padded_tensor(one, 0.0) if one.is_nested else one for one in (batch, self.scale))
        return self(x).square().mean() * scale.mean()

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(
            [nested(one) if index == self.nested else one for index, one in enumerate(x)], batch_size=None
        )


def nested(rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*rows])


@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_in_place_of_plain_ones(first: int, tmp_path: Path) -> None:
    """Dynamo's guards would read their strides, which ends the process (torch 2.13)."""
    modules, strategy = [Nests(), Nests()], ORTStrategy(config={"placement": "always"})
    for module, used in zip(modules, ("auto", strategy), strict=True):
        module.nested = first
        Trainer(**{**QUIET, "strategy": used, "default_root_dir": tmp_path}).fit(module)
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=1e-5)
    assert strategy.report.ort_runs > 0
