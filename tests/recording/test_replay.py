"""A recorded step, replayed on other batches, has the bits of eager: results, gradients, buffers and random numbers."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ort.recording.calls import Recorder
from lightning_ort.recording.program import Program
from lightning_ort.recording.replay import Replay


class Sequence(nn.Module):
    def __init__(self, kind: type, **kwargs: Any) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 16), kind(16, 16, batch_first=True, **kwargs)
        self.head = nn.Linear(16 * (2 if kwargs.get("bidirectional") else 1), 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids))[0]).mean(1)


class Buffers(nn.Module):
    """Writes a buffer in place, sorts, gathers, and reads what `.data` shares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 10))
        self.register_buffer("average", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        order = torch.where(y > 0, y, y * 0.1).argsort(-1)
        pairs = y.cumsum(-1)[:, ::2].repeat_interleave(2, -1)
        return (
            y.gather(-1, order)
            - self.average
            + pairs
            + y.masked_fill(y > 1, 0.0).logsumexp(-1, keepdim=True)
            + y.data.mean()
        )


class Numbers(nn.Module):
    """Makes tensors of Python's numbers and writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.tensor([0.5] * 10)
        shift += 1.5
        shift[2:4] *= 3
        hidden = torch.full((x.shape[0], 10), float("-inf")).triu(3)
        return (self.net(x) * 2 + shift + x.mean() * 2.0).masked_fill(hidden.isinf(), 0.0)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x).float()


class Metadata(nn.Module):
    """Changes the sizes of tensors in place, splits, and indexes with a mask of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 20)
        self.register_buffer("keep", torch.arange(20) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.net(x)[:, self.keep].unsqueeze(0).split(5, -1)
        one = one * 1.0
        one.squeeze_(0).t_()
        return torch.cat([one.t(), two.squeeze(0)], -1)


def numbers(*sizes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*sizes), torch.randint(0, 10, sizes[:1])


def ids(*sizes: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, sizes), torch.randint(0, 10, sizes[:1])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), lambda: numbers(4, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 10)), lambda: numbers(4, 8)),
    "convolutions": (
        lambda: nn.Sequential(
            *(
                nn.Conv2d(1, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ELU(),
                nn.AvgPool2d(2),
                nn.ConvTranspose2d(4, 2, 2, 2),
            ),
            *(nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(8, 10)),
        ),
        lambda: numbers(4, 1, 8, 8),
    ),
    "LSTM": (lambda: Sequence(nn.LSTM), lambda: ids(4, 7)),
    "LSTM, both ways": (lambda: Sequence(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2), lambda: ids(4, 7)),
    "GRU": (lambda: Sequence(nn.GRU), lambda: ids(4, 7)),
    "norms": (
        lambda: nn.Sequential(
            nn.GroupNorm(2, 8), nn.Softplus(), nn.BatchNorm1d(8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 10)
        ),
        lambda: numbers(16, 8),
    ),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), nn.Flatten(), nn.Linear(40, 10)
        ),
        lambda: numbers(4, 5, 8),
    ),
    "buffers": (Buffers, lambda: numbers(4, 8)),
    "numbers": (Numbers, lambda: numbers(4, 8)),
    "autocast": (Half, lambda: numbers(4, 8)),
    "metadata": (Metadata, lambda: numbers(4, 8)),
}


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def recorded(
    net: nn.Module, batch: Any, step: Callable[[nn.Module, Any], Tensor] = loss_of
) -> tuple[Replay | None, Recorder]:
    """Run a step and its backward pass, and return what replays it, unless it was refused."""
    for parameter in net.parameters():
        parameter.grad = None
    recorder = Recorder(batch)
    with recorder:
        loss = step(net, batch)
        loss.backward()
    if recorder.refusal:
        return None, recorder
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    program = Program.of(recorder, [recorder.value(one) for one in (loss, *gradients)])
    return Replay(program, recorder), recorder


def eager(net: nn.Module, batch: Any) -> list[Tensor]:
    for parameter in net.parameters():
        parameter.grad = None
    loss = loss_of(net, batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_a_replay_has_the_bits_of_eager(name: str) -> None:
    torch.manual_seed(0)
    make, batch = CASES[name]
    net = make()
    replay, recorder = recorded(net, batch())
    assert replay is not None, recorder.refusal
    twin = copy.deepcopy(net)
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        parameter.data.mul_(1.25), other.data.mul_(1.25)  # as an optimizer writes to them
    for _ in range(3):
        one = batch()
        state = torch.get_rng_state()
        expected = eager(twin, one)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        results = replay(one)
        assert results is not None
        assert len(results) == len(expected)
        for result, other in zip(results, expected, strict=True):
            assert torch.equal(result, other)
            assert result.stride() == other.stride()
            assert not result.requires_grad
        assert torch.equal(torch.get_rng_state(), after)
        for own, other in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.equal(own, other)


def test_what_python_reads_is_checked_and_a_miss_leaves_nothing_behind() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return y if bool(x.sum() > 0) else -y

    net, batch = Reads(), (torch.rand(4, 8), torch.randint(0, 10, (4,)))
    replay, _ = recorded(net, batch)
    assert replay is not None
    assert replay((torch.rand(4, 8), batch[1])) is not None
    negative = -torch.rand(4, 8)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    assert replay((negative, batch[1])) is None
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_sizes_that_depend_on_values_are_checked() -> None:
    net = nn.Linear(8, 10)

    def step(net: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        return net(x[x[:, 0] > 0]).square().sum() / (x[:, 0] > 0).sum()

    x = torch.randn(6, 8).abs()
    x[4:, 0] *= -1
    replay, _ = recorded(net, (x,), step)
    assert replay is not None
    assert replay((2 * x,)) is not None
    assert replay((x.abs(),)) is None


def test_an_error_leaves_nothing_behind() -> None:
    net, batch = Sequence(nn.GRU, num_layers=2, dropout=0.5), ids(4, 7)
    replay, _ = recorded(net, batch)
    assert replay is not None
    state = torch.get_rng_state()
    assert replay((batch[0], batch[1] + 100)) is None  # no such class: the loss, after dropout, raises
    assert torch.equal(torch.get_rng_state(), state)
    assert replay(batch) is not None


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def refusals() -> Iterator[tuple[str, Callable[[nn.Module, Any], Tensor]]]:
    yield "sparse", lambda net, batch: (net(batch[0]).to_sparse() * 2).to_dense().sum()
    generator = torch.Generator().manual_seed(0)
    yield "generator", lambda net, batch: (net(batch[0]) * torch.rand(10, generator=generator)).sum()

    class Sub(Tensor):
        pass

    yield "Sub", lambda net, batch: net(batch[0].as_subclass(Sub)).sum().as_subclass(Tensor)


@pytest.mark.parametrize(("word", "step"), [*refusals()], ids=lambda one: one if isinstance(one, str) else "")
def test_what_cannot_be_replayed_is_refused_and_runs(word: str, step: Callable[[nn.Module, Any], Tensor]) -> None:
    net, batch = nn.Linear(8, 10), numbers(4, 8)
    replay, recorder = recorded(net, batch, step)
    assert replay is None
    assert word in recorder.refusal
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_recording_keeps_no_activation_alive() -> None:
    import weakref

    net, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), numbers(4, 8)
    kept: list[Any] = []
    net[1].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    _, recorder = recorded(net, batch)
    assert kept
    assert kept[0]() is None
    assert len(recorder.found) == 4  # the parameters


def test_the_interpreter_of_others_is_unchanged() -> None:
    before = torch._C._get_graph_executor_optimize(), torch._C._jit_set_profiling_mode(True)
    torch._C._jit_set_profiling_mode(before[1])
    replay, _ = recorded(nn.Linear(8, 10), batch := numbers(4, 8))
    assert replay is not None
    replay(batch)
    after = torch._C._get_graph_executor_optimize(), torch._C._jit_set_profiling_mode(before[1])
    assert after == before
