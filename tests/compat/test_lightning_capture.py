"""Private names of Lightning and of ``nn.Module`` behind captured steps mean what they did when they were read."""

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn

from lightning_ort.compat.lightning import is_compiled_by_lightning, lightning_optimizers
from lightning_ort.compat.torch import COMPILED_CALL, forward_hooks_without, has_compiled_call, uncompiled_call
from lightning_ort.compat.torch_graphs import is_double_backward_error


def test_lightning_optimizers() -> None:
    strategy = SingleDeviceStrategy(device="cpu")
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    strategy.optimizers = [optimizer]
    first = lightning_optimizers(strategy)
    assert lightning_optimizers(strategy) is first
    assert [wrapper.optimizer for wrapper in first] == [optimizer]
    strategy.optimizers = [optimizer]
    assert lightning_optimizers(strategy) is not first


def test_is_compiled_by_lightning() -> None:
    module = LightningModule()
    assert not is_compiled_by_lightning(module)
    assert not is_compiled_by_lightning(nn.Linear(1, 1))
    assert is_compiled_by_lightning(from_compiled(torch.compile(module, backend="eager")))


def test_compiled_call() -> None:
    module = nn.Linear(1, 1)
    assert not has_compiled_call(module)
    module.compile(backend="eager")
    assert has_compiled_call(module)
    module = nn.Linear(1, 1)
    vars(module)[COMPILED_CALL] = lambda x: "compiled"
    assert module(torch.ones(1)) == "compiled"
    assert has_compiled_call(module)
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not has_compiled_call(clone)
    vars(module).pop(COMPILED_CALL)
    assert not has_compiled_call(module)


def test_uncompiled_call_has_the_hooks() -> None:
    module = nn.Identity()
    module.register_forward_hook(lambda *args: "hooked")
    vars(module)[COMPILED_CALL] = lambda x: "compiled"
    assert uncompiled_call(module)(torch.ones(1)) == "hooked"


def test_forward_hooks_without() -> None:
    module = nn.Identity()
    calls: list[str] = []

    def hook(name: str) -> Any:
        return lambda *args: calls.append(name)

    removed = [module.register_forward_pre_hook(hook("pre")), module.register_forward_hook(hook("post"))]
    module.register_forward_hook(hook("stays"))
    assert not list(forward_hooks_without(module, set()))
    attributes = dict(forward_hooks_without(module, {handle.id for handle in removed}))
    assert len(attributes) == 2
    vars(module).update(attributes)
    module(torch.ones(1))
    assert calls == ["stays"]


def test_double_backward_error() -> None:
    assert not is_double_backward_error(RuntimeError("other"))
    x = torch.ones(2, requires_grad=True)
    loss = torch.compile(lambda x: (x**3).sum(), backend="aot_eager")(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        gradient.sum().backward()
    assert is_double_backward_error(caught.value)
