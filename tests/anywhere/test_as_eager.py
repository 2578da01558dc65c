"""Steps that do more than a forward and a backward pass: they train as in eager, or a reason is given."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ort import export_training
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training import runner


class Case(LightningModule):
    """A module of pieces; ``make`` registers them, ``step`` uses them."""

    def __init__(self, make: Callable[[Any], None] | None, step: Callable[[Any, Any], Tensor], **rest: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        if make is not None:
            make(self)
        self._step, self._make = step, make
        self.rate = rest.get("rate", 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.rate, momentum=0.9)


def batch_of(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 4, generator=generator),
        "y": torch.randint(0, 3, (rows,), generator=generator),
        "t": torch.rand(rows, 3, generator=generator),
    }


def assert_trains_alike(module: Any, folder: Path, sizes: Any = (6, 6, 4, 7, 6), **settings: Any) -> runner.Training:
    """Train with and without torch: the losses, and what the state has, are the same."""
    batches = [batch_of(rows, seed) for seed, rows in enumerate(sizes)]
    export_training(module, batches[0], folder, **settings)
    training = runner.Training.load(folder)
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(batches):
        loss = module.training_step(batch, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        got = training.step({name: value.numpy() for name, value in batch.items()})["loss"]
        assert got == pytest.approx(loss.item(), rel=1e-4, abs=1e-5), number
    known = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in training.state.items():
        if "/" not in name:
            np.testing.assert_allclose(value, known[name].detach().numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
    return training


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


def loss_of(self: Any, batch: Any, hidden: Tensor | None = None) -> Tensor:
    return F.cross_entropy(self.layer(batch["x"]) if hidden is None else hidden, batch["y"])


def assigned(self: Any, batch: Any) -> Tensor:
    hidden = self.layer(batch["x"])
    self.count = self.count + 1
    self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
    return loss_of(self, batch, hidden - self.mean) * self.count


def teacher(self: Any) -> None:
    self.teacher = copy.deepcopy(self.layer).requires_grad_(False)


def following(self: Any, batch: Any, how: Callable[[Tensor, Tensor], Any]) -> Tensor:
    with torch.no_grad():
        for own, other in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            how(own, other)
    return F.mse_loss(self.layer(batch["x"]), self.teacher(batch["x"]) + 1)


def by_data(own: Tensor, other: Tensor) -> None:
    own.data = own.data * 0.9 + other.data * 0.1


def penalized(self: Any, batch: Any) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    out = torch.tanh(self.layer(x)).sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    return loss_of(self, batch) + (gradient.norm(dim=1) - 1).square().mean()


def second_derivative(self: Any, batch: Any) -> Tensor:
    x = batch["x"][:, :1].clone().requires_grad_()
    u = torch.sin(self.layer(torch.cat([x, batch["x"][:, 1:]], 1))).sum(1, keepdim=True)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second + u).square().mean()


def hooked(self: Any) -> None:
    self.layer.weight.register_hook(lambda gradient: gradient * 0.5 + 0.01 * self.layer.weight)


def hooked_after(self: Any) -> None:
    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    self.layer.bias.register_post_accumulate_grad_hook(halve)


def hooked_module(self: Any) -> None:
    self.layer.register_full_backward_pre_hook(lambda module, gradients: tuple(g * 0.5 for g in gradients))
    self.layer.register_full_backward_hook(lambda module, inputs, outputs: None)


def hooked_inside(self: Any, batch: Any) -> Tensor:
    hidden = self.layer(batch["x"])
    hidden.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return loss_of(self, batch, hidden)


def embedded(self: Any) -> None:
    self.table = nn.Embedding(3, 4, max_norm=0.7)
    with torch.no_grad():
        self.table.weight.mul_(3)


def cell(self: Any) -> None:
    self.cell = nn.GRUCell(2, 3)


def unrolled(self: Any, batch: Any) -> Tensor:
    hidden = self.layer(batch["x"])
    for words in batch["x"].reshape(-1, 2, 2).unbind(1):
        hidden = self.cell(words, hidden)
    return loss_of(self, batch, hidden)


def pairs(self: Any, batch: Any) -> Tensor:
    scores = self.layer(batch["x"]) @ batch["t"].T
    return F.cross_entropy(scores.double(), torch.arange(len(scores)))


EAGER: dict[str, tuple[Any, Any]] = {
    "buffers assigned": (
        lambda self: (self.register_buffer("count", torch.tensor(0.0)), self.register_buffer("mean", torch.zeros(3))),
        assigned,
    ),
    "halves of a batch": (
        None,
        lambda self, batch: sum(
            (1 + place) * F.cross_entropy(self.layer(x), y)
            for place, (x, y) in enumerate(zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True))
        ),
    ),
    "gradient reversal": (None, lambda self, batch: loss_of(self, batch, Reversed.apply(self.layer(batch["x"]), 0.3))),
    "straight through": (None, lambda self, batch: loss_of(self, batch, Rounded.apply(self.layer(batch["x"])))),
    "hook of a parameter": (hooked, loss_of),
    "hook after accumulation": (hooked_after, loss_of),
    "hooks of a module": (hooked_module, loss_of),
    "hook of a result": (None, hooked_inside),
    "teacher by lerp_": (teacher, lambda self, batch: following(self, batch, lambda p, q: p.lerp_(q, 0.1))),
    "teacher by copy_": (teacher, lambda self, batch: following(self, batch, lambda p, q: p.copy_(0.9 * p + 0.1 * q))),
    "teacher by data": (teacher, lambda self, batch: following(self, batch, by_data)),
    "teacher by data in place": (
        teacher,
        lambda self, batch: following(self, batch, lambda p, q: p.data.mul_(0.9).add_(q.data, alpha=0.1)),
    ),
    "checkpoint without gradient": (
        None,
        lambda self, batch: (
            checkpoint(lambda x: self.layer(x).exp().mean(), batch["x"], use_reentrant=True) + loss_of(self, batch)
        ),
    ),
    "weights clipped": (
        None,
        lambda self, batch: [p.data.clamp_(-0.2, 0.2) for p in self.parameters()] and loss_of(self, batch),
    ),
    "max_norm": (embedded, lambda self, batch: loss_of(self, batch, self.layer(self.table(batch["y"]) + batch["x"]))),
    "gradient penalty": (None, penalized),
    "second derivative": (None, second_derivative),
    "size logged": (None, lambda self, batch: self.log("n", batch["x"].shape[0]) or loss_of(self, batch)),
    "gaussian_nll_loss": (
        None,
        lambda self, batch: F.gaussian_nll_loss(self.layer(batch["x"]), batch["t"], batch["t"] + 0.1),
    ),
    "cells over time": (cell, unrolled),
    "each row against all": (None, pairs),
}


@pytest.mark.parametrize("case", EAGER)
def test_it_trains_as_in_eager(case: str, tmp_path: Path) -> None:
    assert_trains_alike(Case(*EAGER[case]), tmp_path / "exported")


def checked(self: Any, batch: Any) -> Tensor:
    if (batch["t"] > 1).any():
        raise ValueError("no shares")
    assert batch["t"].min() >= 0
    if not (batch["x"] < 100).all().item():
        raise ValueError("too large")
    return loss_of(self, batch)


def test_what_raises_in_eager_raises_in_the_runner(tmp_path: Path) -> None:
    training = assert_trains_alike(Case(None, checked), tmp_path / "exported")
    batch = {name: value.numpy() for name, value in batch_of(6, 9).items()}
    before = training.state
    for name, value in (("t", 1.5), ("t", -0.5), ("x", 200)):
        wrong = {**batch, name: np.full_like(batch[name], value)}
        with pytest.raises(ValueError, match=r"raises an error for this batch, at test_as_eager\.py:\d+"):
            training.step(wrong)
    for name, value in training.state.items():
        np.testing.assert_array_equal(value, before[name])
    training.step(batch)


def diffused(self: Any, batch: Any) -> Tensor:
    x, noise = batch["t"], torch.randn_like(batch["t"])
    time = torch.randint(0, 10, (x.shape[0],))
    share = (time.float() / 10).unsqueeze(1)
    mixed = x * (1 - share) + noise * share
    return F.mse_loss(self.layer(F.pad(mixed, (0, 1))), noise)


def sampled(self: Any, batch: Any) -> Tensor:
    hidden = self.layer(batch["x"])
    z = torch.distributions.Normal(hidden, hidden.exp()).rsample()
    return (z - batch["t"]).square().mean() + torch.empty(3).uniform_(-1, 1).sum() + torch.rand(3).exp().mean()


def permuted(self: Any, batch: Any) -> Tensor:
    order = torch.randperm(batch["x"].shape[0])
    mix = torch.empty(()).exponential_(2.0)
    picked = torch.multinomial(self.layer(batch["x"]).detach().softmax(1), 2)
    hidden = self.layer(batch["x"] + mix * batch["x"][order])
    return hidden.gather(1, picked).square().mean() + F.dropout(hidden, 0.3).mean()


def two_layers(self: Any) -> None:
    self.rnn = nn.GRU(2, 3, 2, batch_first=True, dropout=0.5)


def dropped(self: Any, batch: Any) -> Tensor:
    return self.rnn(batch["x"].reshape(-1, 2, 2))[0].sum(0).square().mean()


@pytest.mark.parametrize(("make", "step"), [(None, diffused), (None, sampled), (None, permuted), (two_layers, dropped)])
def test_random_numbers_are_drawn_by_the_runner(make: Any, step: Any, tmp_path: Path) -> None:
    """The export compares with the same numbers; in the runner they are others each time, of the same distribution."""
    module = Case(make, step, rate=0.0)
    export_training(module, batch_of(8, 0), tmp_path / "exported")
    batch = batch_of(50, 1)
    arrays = {name: value.numpy() for name, value in batch.items()}

    def losses(seed: int, count: int) -> list[float]:
        training = runner.Training.load(tmp_path / "exported", seed=seed)
        return [training.step(arrays)["loss"] for _ in range(count)]

    found = losses(0, 300)
    assert len(set(found)) > 290
    assert found[:3] == losses(0, 3) != losses(1, 3)
    with torch.no_grad():
        expected = [step(module, batch).item() for _ in range(300)]
    spread = np.std(expected)
    for share in (0.25, 0.5, 0.75):
        assert np.quantile(found, share) == pytest.approx(np.quantile(expected, share), abs=0.4 * spread)


def seeded(self: Any, batch: Any) -> Tensor:
    return loss_of(self, batch) + torch.randn(3, generator=torch.Generator().manual_seed(1)).sum()


def by_numpy(self: Any, batch: Any) -> Tensor:
    return loss_of(self, batch) * float(np.random.rand())


def remembered(self: Any, batch: Any) -> Tensor:
    hidden = self.layer(batch["x"])
    before = getattr(self, "before", None)
    self.before = hidden.detach().mean()
    return loss_of(self, batch, hidden if before is None else hidden * before)


def written_elsewhere(self: Any, batch: Any) -> Tensor:
    self.plain[0].add_(1)
    return loss_of(self, batch) * self.plain[0]


def hold(self: Any) -> None:
    self.plain = [torch.zeros(())]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "generator": (None, seeded, "a generator of its own"),
    "NumPy": (None, by_numpy, "would be constants"),
    "attribute of tensors": (None, remembered, "on state that is in no buffer"),
    "tensor in a list": (hold, written_elsewhere, "neither a parameter nor a buffer, which a model cannot hold"),
    "values of a parameter": (
        None,
        lambda self, batch: loss_of(self, batch) * float(self.layer.bias[0]),
        "depends on the values|reads the values of layer.bias",
    ),
    "poisson": (None, lambda self, batch: loss_of(self, batch) + torch.poisson(batch["t"]).sum(), "cannot draw from"),
    "rows of a mask": (
        None,
        lambda self, batch: loss_of(self, batch) + self.layer(batch["x"]).masked_select(batch["t"] > 0.5).sum(),
        r"masked_select.*the size of its result depends on the values[^\n]*\n  at .*test_as_eager",
    ),
    "least squares": (
        None,
        lambda self, batch: torch.linalg.lstsq(batch["x"], batch["t"])[0].sum() + loss_of(self, batch),
        "lstsq.* depends on the values of tensors: compute it outside",
    ),
    "packed sequences": (
        lambda self: setattr(self, "rnn", nn.GRU(2, 3)),
        lambda self, batch: self.rnn(
            nn.utils.rnn.pack_padded_sequence(batch["x"].reshape(2, -1, 2), torch.full((batch["x"].shape[0],), 2))
        )[1].sum(),
        "cannot be exported",
    ),
    "one of the buffers": (
        lambda self: self.register_buffer("last", torch.zeros(2)),
        lambda self, batch: [setattr(self, "last", batch["x"])] and loss_of(self, batch),
        r"assigns .* to the buffer last, which is torch\.float32\[2\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_cannot_hold_is_refused(case: str, tmp_path: Path) -> None:
    make, step, message = REFUSED[case]
    module = Case(make, step)
    with pytest.raises(ExportFailed, match=message):
        export_training(module, batch_of(6, 0), tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


BRANCHES: dict[str, tuple[Any, list[int]]] = {
    "multiples of five": (lambda n: n % 5 == 0, [5, 10, 40]),
    "one size": (lambda n: n == 32, [32]),
    "more than twenty": (lambda n: n > 20, [21, 50]),
    "odd": (lambda n: n % 2 == 1, [1, 7]),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_a_branch_on_a_size_is_right_or_refused(case: str, tmp_path: Path) -> None:
    is_other, refused = BRANCHES[case]
    module = Case(None, lambda self, batch: loss_of(self, batch) * (10 if is_other(batch["x"].shape[0]) else 1))
    export_training(module, batch_of(6, 0), tmp_path / "exported")
    training = runner.Training.load(tmp_path / "exported")
    for rows in (*range(1, 13), *refused):
        batch = batch_of(rows, rows)
        arrays = {name: value.numpy() for name, value in batch.items()}
        if is_other(rows):
            with pytest.raises(ValueError, match=rf"has batch {rows}; (it must be at|the model is right where)"):
                training.step(arrays)
        else:
            assert training.step(arrays, lr=0.0)["loss"] == pytest.approx(
                module.training_step(batch, 0).item(), rel=1e-4
            )


def test_parts_of_a_size_that_is_none_for_some_rows(tmp_path: Path) -> None:
    def step(self: Any, batch: Any) -> Tensor:
        half = batch["x"].shape[0] // 2  # 0 of one row
        parts = zip(batch["x"].split(half), batch["y"].split(half), strict=True)
        return sum((F.cross_entropy(self.layer(x), y) for x, y in parts), start=torch.zeros(()))

    training = assert_trains_alike(Case(None, step), tmp_path / "exported", sizes=(6, 8, 4))
    for rows in (1, 7):
        with pytest.raises(ValueError, match="has batch"):
            training.step({name: value.numpy() for name, value in batch_of(rows, 0).items()})


class Hooked(Case):
    """With Lightning's hooks around the step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.average.lerp_(self.layer.weight, 0.1)

    def on_after_backward(self) -> None:
        self.layer.bias.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.layer.weight.grad.norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs["loss"].item()


def test_hooks_around_the_step(tmp_path: Path) -> None:
    def average(self: Any) -> None:
        self.register_buffer("average", torch.zeros(3, 4))

    from tests.anywhere.test_training_export import fit

    module = Hooked(average, loss_of)
    batches = [batch_of(6, seed) for seed in range(4)]
    export_training(module, batches[0], tmp_path / "exported")
    training = runner.Training.load(tmp_path / "exported")
    for batch in batches:
        assert training.step({name: value.numpy() for name, value in batch.items()})["norm"] > 0
    fit(module, batches)
    for name in ("layer.weight", "layer.bias", "average"):
        np.testing.assert_allclose(training.state[name], module.state_dict()[name], rtol=1e-4, atol=1e-6)


class Doubled(Hooked):
    """Writes to a buffer after the update, by what its step returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "factor": loss * 0 + 2}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs["loss"] > 0 and "factor" in outputs:
            self.average.mul_(float(outputs["factor"].numpy()))


def test_what_is_written_after_the_update_is_refused(tmp_path: Path) -> None:
    module = Doubled(lambda self: self.register_buffer("average", torch.zeros(3, 4)), loss_of)
    with pytest.raises(ExportFailed, match="on_train_batch_end writes to average after the update"):
        export_training(module, batch_of(6, 0), tmp_path / "exported")


def test_indices_of_rows_leave_the_batches_that_are_tried_valid(tmp_path: Path) -> None:
    """A graph's edges: with fewer rows they would lead nowhere."""

    def graph_of(rows: int, seed: int) -> dict[str, Tensor]:
        edges = torch.randint(0, rows, (2, 2 * rows), generator=torch.Generator().manual_seed(seed))
        return {**batch_of(rows, seed), "edges": edges.index_fill(1, torch.tensor([0]), rows - 1)}

    def step(self: Any, batch: Any) -> Tensor:
        hidden = self.layer(batch["x"])
        return loss_of(self, batch, hidden.index_add(0, batch["edges"][1], hidden[batch["edges"][0]]))

    module = Case(None, step)
    export_training(module, graph_of(6, 0), tmp_path / "exported")
    training = runner.Training.load(tmp_path / "exported")
    for rows in (6, 4, 9):
        batch = graph_of(rows, rows)
        got = training.step({name: value.numpy() for name, value in batch.items()}, lr=0.0)["loss"]
        assert got == pytest.approx(module.training_step(batch, 0).item(), rel=1e-4)


class Validated(Case):
    """Its validation step changes something; a batch is changed before it is moved."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * 2 + 1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.change(self)
        self.log("loss", loss_of(self, batch))


def test_what_validation_changes_must_make_no_difference(tmp_path: Path) -> None:
    def make(self: Any) -> None:
        self.scale, self.seen = 1.0, 0
        self.register_buffer("times", torch.ones(()))

    module = Validated(make, lambda self, batch: loss_of(self, batch) * self.scale * self.times)
    module.change = lambda self: setattr(self, "seen", self.seen + 1)
    export_training(module, batch_of(6, 0), tmp_path / "exported")
    training = runner.Training.load(tmp_path / "exported")
    batch = batch_of(6, 1)
    expected = module.training_step(module.on_before_batch_transfer(batch, 0), 0).item()
    assert training.step({name: value.numpy() for name, value in batch.items()})["loss"] == pytest.approx(
        expected, rel=1e-4
    )
    for change, message in (
        (lambda self: setattr(self, "scale", self.scale * 2), "on state that is in no buffer"),
        (lambda self: self.times.add_(1), "validation_step writes to times, which evaluation.onnx does not"),
    ):
        module.change = change
        with pytest.raises(ExportFailed, match=message):
            export_training(module, batch_of(6, 0), tmp_path / "refused")


def test_hooks_of_an_update_are_refused_in_each_batch(tmp_path: Path) -> None:
    module = Hooked(lambda self: self.register_buffer("average", torch.zeros(3, 4)), loss_of)
    with pytest.raises(ExportFailed, match="overrides `on_before_zero_grad`, which a Trainer calls before an update"):
        export_training(module, batch_of(6, 0), tmp_path / "exported", accumulate_grad_batches=2)


def test_a_schedule_of_the_momentum_is_told(tmp_path: Path) -> None:
    module = Case(None, loss_of)
    optimizer = module.configure_optimizers()
    assert "momentum" not in str(export_training(module, batch_of(6, 0), tmp_path / "exported", optimizer=optimizer))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    told = str(export_training(module, batch_of(6, 0), tmp_path / "exported", optimizer=optimizer))
    assert "the momentum, which a schedule sets too, stays as it is" in told


def test_adam_with_decoupled_weight_decay(tmp_path: Path) -> None:
    module = Case(None, loss_of)
    optimizer = torch.optim.Adam(module.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    export_training(module, batch_of(6, 0), tmp_path / "exported", optimizer=optimizer)


def test_a_number_of_rows_that_cannot_change_is_told(tmp_path: Path) -> None:
    module = Case(None, lambda self, batch: sum(loss_of(self, {**batch, "n": n}) for n in range(batch["x"].shape[0])))
    told = str(export_training(module, batch_of(6, 0), tmp_path / "exported"))
    assert re.search(r"takes batches of 6 rows \(test_as_eager\.py:\d+\) alone", told)


def test_functions_that_operators_call_are_refused(tmp_path: Path) -> None:
    def step(self: Any, batch: Any) -> Tensor:
        return torch.cond(batch["x"].sum() > 0, lambda x: x * 1, lambda x: x * 2, (loss_of(self, batch),))

    with pytest.raises(ExportFailed, match=r"torch\.cond.*use torch\.where\n  at .*test_as_eager\.py:\d+ in step"):
        export_training(Case(None, step), batch_of(6, 0), tmp_path / "exported")
