"""What a LightningModule is made of: under ``ort`` each gives what it gives under the stock strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from features import Trainers, check_feature, feature, features_of, fit
from small_modules import Small, batches
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

# --- hooks and parametrizations


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


# --- parameters and buffers


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


# --- layers of other kinds


@feature("Modules", "`nn.Linear` made by `nn.LazyLinear`")
def lazy(trainers: Trainers) -> Any:
    class Lazy(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))
            self.net(torch.zeros(1, 8))

    return fit(Lazy(), trainers())


@feature("Modules", "`nn.LazyLinear`, made by the first step")
def made_by_first_step(trainers: Trainers) -> Any:
    class Lazy(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3))

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


# --- state that a step keeps


@feature("Modules", "contrastive loss with a queue (MoCo)")
def queue(trainers: Trainers) -> Any:
    class Queue(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", F.normalize(torch.randn(16, 3), dim=1))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            query = F.normalize(self(x), dim=1)
            with torch.no_grad():
                key = F.normalize(self(x + 0.1), dim=1)
            negative = query @ self.queue.clone().T
            positive = (query * key).sum(1, keepdim=True)
            loss = F.cross_entropy(torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(x), dtype=torch.long))
            rows = (self.place + torch.arange(len(x))) % 16
            self.queue[rows] = key
            self.place.copy_((self.place + len(x)) % 16)
            return loss

    return fit(Queue(), trainers())


@feature("Modules", "vector quantisation with moving averages")
def vector_quantisation(trainers: Trainers) -> Any:
    class Quantises(Small):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("counts", torch.ones(5))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            z = self.encode(x)
            nearest = torch.cdist(z, self.codes).argmin(1)
            chosen = F.one_hot(nearest, 5).float()
            with torch.no_grad():
                self.counts.lerp_(chosen.sum(0), 0.1)
                self.codes.lerp_(chosen.T @ z / (self.counts[:, None] + 1e-3), 0.1)
            code = self.codes[nearest]
            straight = z + (code - z).detach()
            return F.mse_loss(self.decode(straight), x) + 0.25 * F.mse_loss(z, code)

    return fit(Quantises(), trainers())


@feature("Modules", "`SparseAdam`", how="modules")
def sparse_adam(trainers: Trainers) -> Any:
    class Sparse(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.embedding = nn.Embedding(3, 8, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = self.loss((x + self.embedding(y), y))
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SparseAdam(self.embedding.parameters(), lr=0.1),
                torch.optim.SGD(self.net.parameters(), lr=0.1),
            ]

    return fit(Sparse(), trainers())


@pytest.mark.parametrize("name", features_of(__name__))
def test_feature(name: str, tmp_path: Path) -> None:
    check_feature(name, tmp_path)
