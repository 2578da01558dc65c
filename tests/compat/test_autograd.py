"""What a step as one graph needs of torch's private names means what it did in the torch that it was read in."""

from typing import Any

import pytest
import torch
from torch import fx

from lightning_ort.compat import aot_autograd, autograd
from tests.compat.test_torch_graphs import trace


def test_joint_facts() -> None:
    assert aot_autograd.joint_facts(1) is None
    facts: list[aot_autograd.JointFacts | None] = []

    def counted(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count.add_(1)
        return x.argmax(), x * count, x.sin(), x.detach() + 1

    def look(kind: str, gm: fx.GraphModule) -> None:
        facts.append(aot_autograd.joint_facts(2))

    x = torch.randn(3, requires_grad=True)
    trace(counted, x, torch.zeros(()), compiler=look)
    for other in (lambda x, y: x.view(-1), lambda x, y: ((z := x * y), z.view(3, 1)), lambda x, y: x.detach().add_(y)):
        torch._dynamo.reset()
        trace(other, x, torch.zeros(3), compiler=look)
    torch._dynamo.reset()
    trace(lambda x: x.sin(), x, compiler=look)  # one input
    plain, *others = [fact for fact in facts if fact is None or fact.differentiable]
    assert plain == aot_autograd.JointFacts([0], [1, 2])  # dynamo's order of inputs
    assert others == [None] * 4


@pytest.mark.parametrize("keep", [False, True])
def test_keeps_graph(keep: bool) -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(autograd.keeps_graph())
            return gradient

    Look.apply(torch.ones((), requires_grad=True)).backward(retain_graph=keep)
    assert seen == [keep]


def test_operations_that_take_functions() -> None:
    graph = fx.Graph()
    assert aot_autograd.is_higher_order(graph.call_function(torch.ops.higher_order.cond, ()))
    assert not aot_autograd.is_higher_order(graph.call_function(torch.ops.aten.tan.default, ()))


def test_have_gradient_hooks() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[1].register_hook(lambda gradient: gradient)
    parameters[2].register_post_accumulate_grad_hook(lambda parameter: None)
    assert [autograd.have_gradient_hooks([parameter]) for parameter in parameters] == [False, True, True]


def test_version_of() -> None:
    x = torch.zeros(3)
    before = autograd.version_of(x)
    x.add_(1)
    x.view(-1)[0] = 2
    assert autograd.version_of(x) == before + 2
