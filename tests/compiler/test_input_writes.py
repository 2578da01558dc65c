"""Graphs that write to their inputs in ways in which compiled graphs differ from eager."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.reason import ReasonType


class Precision(nn.Module):
    """Adds to a buffer what depends on parameters, as the last layer of a Gaussian process does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(6, 4), nn.Linear(4, 1)
        self.register_buffer("precision", torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        features = self.linear(x).cos()
        self.precision += features.t() @ features
        return self.out(features).square().mean()


class Noise(nn.Module):
    """Draws the noise of each of several samples into the same memory, past autograd; the last one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.noise = nn.Parameter(torch.zeros(6), requires_grad=False)

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        return (x @ (self.mean + noise * self.scale.exp())).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        first = self.loss(x, self.noise.data.normal_())
        return first + self.loss(x, self.noise.data.normal_())


class NoiseInParts(Noise):
    """Uses it in other graphs than those that draw it."""

    def forward(self, x: Tensor) -> Tensor:
        noise = self.noise.data.normal_()
        torch._dynamo.graph_break()
        first = self.loss(x, noise)
        torch._dynamo.graph_break()
        noise = self.noise.data.normal_()
        torch._dynamo.graph_break()
        return first + self.loss(x, noise)


class Momentum(nn.Module):
    """A network that follows another one, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            target = self.teacher(x).tanh()
        return (self.student(x).tanh() - target).square().mean()


class Clamped(nn.Module):
    """Keeps its parameters within bounds, past autograd."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.linear, self.late = nn.Linear(6, 4), late

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.linear.weight.data.clamp_(-0.2, 0.2)
        loss = self.linear(x).exp().square().mean()
        if self.late:
            self.linear.weight.data.clamp_(-0.2, 0.2)
        return loss


class Bank(nn.Module):
    """Keeps features for later, without their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(6, 4), nn.Linear(4, 4)
        self.register_buffer("bank", torch.zeros(8, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        features = self.linear(x).tanh()
        with torch.no_grad():
            self.bank[:] = features
            self.mean.mul_(0.9).add_(features.mean(0), alpha=0.1)
        return (self.out(features) @ self.bank.clone().t() - self.mean.clone().sum()).square().mean()


class InPlace(nn.Module):
    """Writes to a variable that an earlier graph made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 2
        torch._dynamo.graph_break()
        return y.relu_().exp().mean()


def train(module: nn.Module, call: Callable[..., Any]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05)
    for _ in range(6):
        optimizer.zero_grad()
        call(torch.randn(8, 6)).backward()
        optimizer.step()
    return {key: value.detach() for key, value in module.state_dict().items()}


def assert_as_eager(module: nn.Module, step_graph: str) -> ORTBackend:
    eager = copy.deepcopy(module)
    backend = ORTBackend(ORTConfig(cache_dir=None, placement="always", debug={"step_graph": step_graph}))  # type: ignore[arg-type]
    torch.testing.assert_close(train(module, torch.compile(module, backend=backend)), train(eager, eager))
    assert not backend.report.fallbacks
    return backend


@pytest.mark.parametrize("step_graph", ["joint", "split"])
@pytest.mark.parametrize("make", [Precision, Noise, lambda: Clamped(late=True)], ids=["kept", "noise", "late"])
def test_what_only_eager_does_stays_there(make: Callable[[], nn.Module], step_graph: str) -> None:
    torch.manual_seed(0)
    backend = assert_as_eager(make(), step_graph)
    assert ReasonType.WRITES_TO_INPUT in {note.reason.type for note in backend.report.notes}


@pytest.mark.parametrize("step_graph", ["joint", "split"])
@pytest.mark.parametrize("make", [NoiseInParts, Momentum, Clamped, Bank, InPlace])
def test_other_writes_are_captured(make: Callable[[], nn.Module], step_graph: str) -> None:
    torch.manual_seed(0)
    backend = assert_as_eager(make(), step_graph)
    assert backend.report.ort_runs > 0
    assert not backend.report.notes


def test_autograd_does_not_notice_writes_to_data() -> None:
    """The first graph keeps an input for its backward pass, the second one writes to it, as often as it likes."""

    def use(weight: Tensor, buffer: Tensor) -> Tensor:
        return (weight * buffer).exp().sum()

    def write(buffer: Tensor, x: Tensor) -> Tensor:
        buffer.data.mul_(0.5)
        return x.sin().exp()

    backend = ORTBackend(ORTConfig(cache_dir=None, placement="always", debug={"step_graph": "split"}))
    gradients = []
    for ours in (False, True):
        torch.manual_seed(0)
        weight, buffer = torch.randn(5, requires_grad=True), torch.randn(5)
        functions = [use, write]
        if ours:
            functions = [torch.compile(function, backend=backend) for function in functions]
        for _ in range(6):
            loss, version = functions[0](weight, buffer), buffer._version
            functions[1](buffer, buffer)
            assert buffer._version == version
            loss.backward()
        gradients.append((weight.grad, buffer))
    torch.testing.assert_close(gradients[1], gradients[0])
    assert backend.report.ort_runs > 0
