"""What a LightningModule is made of and does: under ``ort`` each gives what it gives under the stock strategy."""

import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from features import FEATURES, QUIET, Trainers, assert_same, feature, features_of, fit, how_it_ran, run_feature
from lightning.pytorch import Trainer
from small_modules import Small, loader
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy


def batches(*shapes: tuple[int, ...]) -> DataLoader:
    """Batches of these shapes."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randn(shape, generator=generator) for shape in shapes], batch_size=None)


# --- what gradients go through


def _checkpointed(reentrant: bool) -> None:
    @feature("Gradients", f"`torch.utils.checkpoint`, `use_reentrant={reentrant}`")
    def checkpointed(trainers: Trainers) -> Any:
        class Checkpointed(Small):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(self.net, self.first(x), use_reentrant=reentrant)

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


# --- hooks, parametrizations, state


@feature("Modules", "hooks on modules")
def module_hooks(trainers: Trainers) -> Any:
    class Hooked(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
            self.net[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
            self.net[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))

    return fit(Hooked(), trainers())


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


@feature("Modules", "hooks on tensors and parameters")
def tensor_hooks(trainers: Trainers) -> Any:
    class Hooked(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
            self.net[2].weight.register_post_accumulate_grad_hook(double)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.net[:2](x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            return self.net[2](hidden)

    return fit(Hooked(), trainers())


def _parametrized(name: str, apply: Any) -> None:
    @feature("Modules", name)
    def parametrized(trainers: Trainers) -> Any:
        class Parametrized(Small):
            def __init__(self) -> None:
                super().__init__()
                apply(self.net[0])

        return fit(Parametrized(), trainers(limit_val_batches=1.0))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


for _name, _apply in {
    "`parametrizations.weight_norm`": parametrizations.weight_norm,
    "`parametrizations.spectral_norm`": parametrizations.spectral_norm,
    "`nn.utils.weight_norm`": nn.utils.weight_norm,
    "`nn.utils.spectral_norm`": nn.utils.spectral_norm,
    "a parametrization of one's own": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
}.items():
    _parametrized(_name, _apply)


@feature("Modules", "tied weights")
def tied(trainers: Trainers) -> Any:
    class Tied(Small):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Linear(8, 8)
            self.forth = nn.Linear(8, 8)
            self.forth.weight = self.back.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.forth(self.back(x).tanh()))

    module = Tied()
    fitted = fit(module, trainers())
    assert module.forth.weight is module.back.weight
    return fitted


@feature("Modules", "buffers updated in `forward`")
def buffers(trainers: Trainers) -> Any:
    class Buffered(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("average", torch.zeros(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(self.norm(x))
            if self.training:
                self.average.mul_(0.9).add_(0.1 * out.detach().mean(0))
                self.count += 1
            else:
                out = out - self.average
            return out

    return fit(Buffered(), trainers(limit_val_batches=1.0))


@feature("Modules", "a buffer that is assigned anew")
def assigned_buffer(trainers: Trainers) -> Any:
    class Assigned(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self(batch[0])
            self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
            return (out - self.average).square().mean()

    return fit(Assigned(), trainers())


@feature("Modules", "freezing and unfreezing between epochs")
def freezing(trainers: Trainers) -> Any:
    class Freezes(Small):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch % 2 == 1)

    return fit(Freezes(), trainers(max_epochs=4))


@feature("Modules", "a parameter replaced between epochs")
def replaced(trainers: Trainers) -> Any:
    class Replaces(Small):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].weight = nn.Parameter(self.net[0].weight.detach() * 0.5)
                self.trainer.strategy.optimizers[0].param_groups[0]["params"] = list(self.parameters())
            if self.current_epoch == 2:
                self.load_state_dict({k: v * 0.9 for k, v in self.state_dict().items()}, assign=True)
                self.trainer.strategy.optimizers[0].param_groups[0]["params"] = list(self.parameters())

    return fit(Replaces(), trainers(max_epochs=3))


@feature("Modules", "`parameter.data` replaced between epochs")
def replaced_data(trainers: Trainers) -> Any:
    class Replaces(Small):
        def on_train_epoch_start(self) -> None:
            for parameter in self.parameters():
                parameter.data = parameter.data * 0.9

    return fit(Replaces(), trainers(max_epochs=3, limit_val_batches=1.0))


@feature("Modules", "a teacher that follows by moving average")
def teacher(trainers: Trainers) -> Any:
    class Teacher(Small):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                target = self.teacher(batch[0])
            return self.loss(batch) + F.mse_loss(self(batch[0]), target)

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            with torch.no_grad():
                for mine, its in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                    its.lerp_(mine, 0.1)

    return fit(Teacher(), trainers())


@feature("Modules", "`nn.Linear` made by `nn.LazyLinear`")
def lazy(trainers: Trainers) -> Any:
    class Lazy(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))
            self.net(torch.zeros(1, 8))

    return fit(Lazy(), trainers())


@feature("Modules", "`torch.jit.script` of a child")
def scripted(trainers: Trainers) -> Any:
    class Scripted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.other(x))

    return fit(Scripted(), trainers())


@feature("Modules", "a LightningModule within another")
def nested(trainers: Trainers) -> Any:
    class Outer(Small):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + self.inner.loss(batch)

    return fit(Outer(), trainers())


@feature("Modules", "LSTM over packed sequences")
def packed(trainers: Trainers) -> Any:
    class Recurrent(Small):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            lengths = torch.tensor([batch.shape[1], batch.shape[1] - 1])
            out, _ = self.lstm(pack_padded_sequence(batch, lengths, batch_first=True))
            out, _ = pad_packed_sequence(out, batch_first=True)
            return self.net(out).square().mean()

    return fit(Recurrent(), trainers(max_epochs=1), train_dataloaders=batches(*[(2, 5, 8)] * 4))


@feature("Modules", "`nn.Embedding(sparse=True)`")
def sparse(trainers: Trainers) -> Any:
    class Sparse(Small):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 8, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss((x + self.embedding(y), y))

    return fit(Sparse(), trainers())


# --- the code of a step


@feature("Steps", "control flow by data")
def control_flow(trainers: Trainers) -> Any:
    class Branches(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if batch[0].sum() > 0:
                loss = loss * 2
            return loss if loss > 0.3 else loss + self.net[0].weight.square().sum() * 1e-2

    return fit(Branches(), trainers())


@feature("Steps", "selection by a mask")
def mask(trainers: Trainers) -> Any:
    class Selects(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss((x[y > 0], y[y > 0]))

    return fit(Selects(), trainers())


@feature("Steps", "inputs that are NaN")
def nan(trainers: Trainers) -> Any:
    class Guarded(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            if batch_idx == 1:
                x = torch.full_like(x, torch.nan)
            return torch.nan_to_num(self.loss((x, y)), nan=1.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", self.loss((x * torch.nan, y)))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad.nan_to_num_()

    return fit(Guarded(), trainers(limit_val_batches=1.0))


@feature("Steps", "a loss that becomes NaN")
def nan_loss(trainers: Trainers) -> Any:
    class Explodes(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * (torch.nan if self.current_epoch else 1.0)

    return fit(Explodes(), trainers())


@feature("Steps", "an empty last batch")
def empty_batch(trainers: Trainers) -> Any:
    class Sums(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch).square().sum()

    return fit(Sums(), trainers(), train_dataloaders=batches((8, 8), (8, 8), (0, 8)))


@feature("Steps", "dimensions of size zero")
def zero_size(trainers: Trainers) -> Any:
    class Empty(Small):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Linear(0, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch) + self.none(batch[:, :0])).square().mean()

    return fit(Empty(), trainers(), train_dataloaders=batches(*[(8, 8)] * 4))


@feature("Steps", "autocast in the step")
def autocast(trainers: Trainers) -> Any:
    class Casts(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.net[0](x)
            return F.mse_loss(self.net[1:](hidden.float()), F.one_hot(y, 3).float())

    return fit(Casts(), trainers())


@feature("Steps", "a batch changed in place")
def inplace(trainers: Trainers) -> Any:
    class Changes(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch[0].mul_(0.5).clamp_(-1, 1)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.losses.append(batch[0].sum().item())

    return fit(Changes(), trainers())


@feature("Steps", "outputs that are kept")
def kept(trainers: Trainers) -> Any:
    class Keeps(Small):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            out = self(batch[0])
            return {"loss": out.square().mean(), "out": out}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.kept.append(outputs["out"])

    module = Keeps()
    return fit(module, trainers()), module.kept


@feature("Steps", "one step that calls another")
def calls_validation(trainers: Trainers) -> Any:
    class Calls(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.shared(batch, "train")

        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.shared(batch, "val")

        def test_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.validation_step(batch, batch_idx)

        def shared(self, batch: Any, stage: str) -> Tensor:
            loss = self.loss(batch)
            self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True)
            return loss

    module, trainer = Calls(), trainers(limit_val_batches=1.0)
    return fit(module, trainer), trainer.test(module, verbose=False)


@feature("Steps", "random numbers of torch, NumPy and Python", how="modules", slow=True)
def random_numbers(trainers: Trainers) -> Any:
    class Draws(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = F.dropout(x + 0.1 * torch.randn_like(x), 0.2)
            order = torch.randperm(len(x))
            scale = random.random() + float(np.random.rand())
            return self.loss((x[order], y[order])) * scale

    return fit(Draws(), trainers())


Pair = namedtuple("Pair", ["x", "y"])


@feature("Steps", "batches that are named tuples")
def named_tuples(trainers: Trainers) -> Any:
    class Named(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss((batch.x, batch.y))

        def train_dataloader(self) -> DataLoader:
            return DataLoader([Pair(x, y) for x, y in loader().dataset], batch_size=8)

    return fit(Named(), trainers())


@feature("Steps", "complex numbers and FFT")
def fft(trainers: Trainers) -> Any:
    class Fourier(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss((torch.fft.fft(x).abs() + x, y))

    return fit(Fourier(), trainers())


@feature("Steps", "`torch.func`")
def func(trainers: Trainers) -> Any:
    class Functional(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            half = {name: p * 0.5 for name, p in self.net.named_parameters()}
            other = torch.func.functional_call(self.net, half, (x,))
            norms = torch.func.vmap(lambda row: row.square().sum())(other)
            return self.loss(batch) + norms.mean()

    return fit(Functional(), trainers())


# --- shapes that vary: each over ten sizes


class Lengths(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def val_dataloader(self) -> Any:
        return self.trainer.train_dataloader


SIZES = (7, 3, 11, 5, 8, 2, 9, 1, 6, 10)


@feature("Shapes", "ten batch sizes")
def batch_sizes(trainers: Trainers) -> Any:
    shapes = [(size, 8) for size in SIZES]
    return fit(Lengths(), trainers(limit_val_batches=1.0), train_dataloaders=batches(*shapes))


@feature("Shapes", "ten sequence lengths", slow=True)
def sequence_lengths(trainers: Trainers) -> Any:
    class Attends(Lengths):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.net = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 3))

    shapes = [(4, size + 1, 8) for size in SIZES]
    return fit(Attends(), trainers(limit_val_batches=1.0), train_dataloaders=batches(*shapes))


@feature("Shapes", "ten image sizes")
def image_sizes(trainers: Trainers) -> Any:
    class Convolves(Lengths):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )

    shapes = [(2, 1, 2 * size + 2, 2 * size + 4) for size in SIZES]
    return fit(Convolves(), trainers(limit_val_batches=1.0), train_dataloaders=batches(*shapes))


@pytest.mark.parametrize("name", features_of(__name__))
def test_feature(name: str, tmp_path: Path) -> None:
    stock, _ = run_feature(name, False, tmp_path / "stock")
    ours, reports = run_feature(name, True, tmp_path / "ort")
    assert_same(ours, stock)
    assert how_it_ran(reports) == FEATURES[name].how
    if FEATURES[name].group == "Shapes":
        graphs = [graph.name for report in reports for graph in report.graphs]
        for kind in ("training_step/forward", "training_step/backward", "validation_step/inference"):
            assert 0 < sum(name.startswith(kind) for name in graphs) <= 3


def test_gradient_of_a_gradient_in_module_mode_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    class Penalty(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return gradient.square().sum()

    strategy = ORTStrategy(config={"placement": "always", "capture": "modules"})
    trainer = Trainer(**{**QUIET, "strategy": strategy, "default_root_dir": tmp_path})
    with pytest.raises(RuntimeError, match=r"gradient of a gradient.*capture='off'"):
        trainer.fit(Penalty())
    assert strategy.report.ort_runs > 0
