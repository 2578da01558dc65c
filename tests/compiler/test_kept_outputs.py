"""Small results of a step as one graph stay where they are, and are never written while somebody refers to them."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compat.torch import storage_address
from lightning_ort.compat.torch_graphs import storage_use_count
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort import binding
from lightning_ort.compiler.executors.ort.binding import MAX_BYTES, KeptOutputs
from lightning_ort.compiler.request import CompileRequest


class Bound:
    """Counts what is bound."""

    def __init__(self, inner: Any, counts: dict[str, int]) -> None:
        self.inner, self.counts = inner, counts

    def bind_input(self, *args: Any) -> None:
        """Bind, and count."""
        self.counts["inputs"] += 1
        self.inner.bind_input(*args)

    def bind_output(self, *args: Any) -> None:
        """Bind, and count."""
        self.counts["outputs"] += 1
        self.inner.bind_output(*args)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often sessions bound inputs and outputs."""
    counts = {"inputs": 0, "outputs": 0}
    new_binding, run_function = binding.new_binding, binding.run_function
    monkeypatch.setattr(binding, "new_binding", lambda session: Bound(new_binding(session), counts))

    def unwrapped(session: Any) -> Callable[[Bound, Any], None]:
        run = run_function(session)
        return lambda one, options: run(one.inner, options)

    monkeypatch.setattr(binding, "run_function", unwrapped)
    return counts


class Training:
    """A module that trains as the Trainer does it, beside its copy in eager: the step, then the old gradients go."""

    def __init__(self, width: int = 8, accumulate: int = 1) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.eager = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6), nn.LayerNorm(6))
        self.module = copy.deepcopy(self.eager)
        config = ORTConfig(placement="always", cache_dir=None, debug={"step_graph": "joint"})
        self.backend = ORTBackend(config, lambda: CompileRequest(writes_gradients=lambda: True))
        self.accumulate = accumulate
        self._compiled = torch.compile(lambda x: F.mse_loss(self.module(x), x), backend=self.backend)
        self._optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.eager, self.module)]

    def step(self, number: int) -> Tensor:
        """Train both for a step, compare parameters and gradients, and return the loss."""
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
        losses = [F.mse_loss(self.eager(x), x), self._compiled(x)]
        for loss, optimizer in zip(losses, self._optimizers, strict=True):
            if number % self.accumulate == 0:
                optimizer.zero_grad()
            loss.backward()
            if number % self.accumulate == self.accumulate - 1:
                optimizer.step()
        torch.testing.assert_close(self.gradients(self.module), self.gradients(self.eager))
        torch.testing.assert_close([*self.module.parameters()], [*self.eager.parameters()])
        assert self.backend.report.ort_runs > number
        assert [graph.name for graph in self.backend.report.graphs] == ["step_0"]
        return losses[1].detach()

    def gradients(self, module: nn.Module) -> list[Tensor]:
        """Return the gradients of a module."""
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_memory_stays_in_a_plain_loop(accumulate: int, bound: dict[str, int]) -> None:
    training = Training(accumulate=accumulate)
    for number in range(9):
        training.step(number)
    before = bound["outputs"]
    for number in range(9, 18):
        training.step(number)
    num_outputs = 1 + len(training.gradients(training.module))
    # in a window the first gradients stay in use, so half of the others move
    limit = 0 if accumulate == 1 else 9 * num_outputs // 2
    assert bound["outputs"] - before <= limit


def test_large_gradients_do_not_stay() -> None:
    width = MAX_BYTES // 4 // 6 + 1  # of a weight of 6 columns
    training = Training(width)
    for number in range(4):
        training.step(number)
    plain = torch.ones(3)
    weight, bias = training.gradients(training.module)[0], training.gradients(training.module)[3]
    assert weight.numel() * weight.element_size() > MAX_BYTES
    # its storage is nobody else's: when the gradient goes, the memory goes
    assert holders(weight) == holders(plain)
    assert holders(bias) == holders(plain) + 1


def holders(tensor: Tensor) -> int:
    """How many tensors, and others, hold the memory of one."""
    assert storage_use_count is not None
    return storage_use_count(storage_address(tensor.untyped_storage()))


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda grad: grad,
    "view": lambda grad: grad.view(-1),
    "data": lambda grad: grad.data,
    "detached": lambda grad: grad.detach(),
    "numpy": lambda grad: grad.numpy(),
    "dlpack": lambda grad: torch.from_dlpack(grad),
    "storage": lambda grad: grad.untyped_storage(),
    "parameter": lambda grad: nn.Parameter(grad),
    "memoryview": lambda grad: memoryview(grad.numpy()),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_a_user_keeps_is_not_written_to(hold: Callable[[Tensor], Any]) -> None:
    training = Training()
    kept: list[tuple[Any, list[float]]] = []

    def values(held: Any) -> list[float]:
        if isinstance(held, torch.UntypedStorage):
            return torch.empty(0).set_(held).tolist()
        if isinstance(held, memoryview):
            return np.asarray(held).flatten().tolist()
        return torch.as_tensor(held).flatten().tolist()

    for number in range(6):
        for grad in [training.step(number), *training.gradients(training.module)]:
            held = hold(grad)
            kept.append((held, values(held)))
            del grad
    assert all(values(held) == before for held, before in kept)
    assert len({tuple(before) for _, before in kept}) > len(kept) // 2  # they differ from step to step


def resize(grad: Tensor) -> None:
    """Make it larger, and move it."""
    grad.resize_(10_000).fill_(1.0)


def transpose(grad: Tensor) -> None:
    """Change its sizes in place."""
    grad.unsqueeze_(0)


def require(grad: Tensor) -> None:
    """Let autograd follow it."""
    grad.requires_grad_()
    grad.register_hook(lambda gradient: gradient * 0)


def share(grad: Tensor) -> None:
    """Move it to memory that other processes may read."""
    grad.share_memory_()


def replace(grad: Tensor) -> None:
    """Give it the memory of another tensor."""
    grad.data = torch.ones(3)


@pytest.mark.parametrize("change", [resize, transpose, require, share, replace])
def test_what_a_user_does_to_a_gradient_has_no_effect_later(change: Callable[[Tensor], None]) -> None:
    training = Training()
    for number in range(6):
        change(training.step(number))
        for module in (training.eager, training.module):
            for grad in training.gradients(module):
                change(grad)
            module.zero_grad()
    training.step(6)


def test_shared_memory_is_not_written_to_again() -> None:
    outputs = KeptOutputs([((4,), (1,), torch.float32)], frozenset([0]))
    first = outputs.allocate()[0].fill_(1)
    shared = first.share_memory_().untyped_storage().data_ptr()
    del first
    assert outputs.allocate()[0].data_ptr() != shared


def test_memory_is_used_again() -> None:
    outputs = KeptOutputs([((4,), (1,), torch.float32), ((4,), (1,), torch.float32)], frozenset([1]))
    _, first = outputs.allocate()
    address = first.data_ptr()
    del first
    _, second = outputs.allocate()
    assert second.data_ptr() == address
    _, third = outputs.allocate()
    assert third.data_ptr() != address
