"""What eager does as a graph: the backward pass, hooks and writes; the module's own tensors stay as they are."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_ort.compat import step_trace


def traced(function: Any, dims: Any = (0,)) -> tuple[Any, fx.GraphModule]:
    mode, fakes = step_trace.fake_fields({"x": torch.randn(5, 3)}, {"x": dims})
    return mode, step_trace.recorded(function, mode, fakes, lambda file: file == __file__)


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_backward_passes_and_hooks_are_recorded() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.register_hook(lambda gradient: gradient.neg())

    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().mean()
        step_trace.note_forward(loss)
        loss.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    _, graph = traced(step)
    layer.weight.grad = None
    assert "aten.neg.default" in targets(graph)
    assert any(getattr(graph, str(node.target)) is layer.weight for node in graph.graph.find_nodes(op="get_attr"))
    (product,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert "loss = layer(x)" in product.meta["stack_trace"]  # what it is the gradient of


def test_nothing_is_written_to_real_tensors() -> None:
    count, table = torch.zeros(()), torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        count.add_(1)
        table.mul_(2).add_(x.sum(0))
        return x * count

    mode, graph = traced(step)
    assert (count.item(), table.tolist()) == (0, [0, 0, 0])
    for node in graph.graph.find_nodes(op="get_attr"):
        assert any(getattr(graph, str(node.target)) is each for each in (count, table))
    mode, graph = traced(lambda x: x.clone().mul_(2).add_(1))
    made = step_trace.functional(graph, mode, [torch.randn(5, 3)], {})
    assert not [target for target in targets(made) if target.rpartition(".")[0].endswith("_")]


def test_sizes_numbers_and_other_data() -> None:
    table, asked = torch.ones(3), []

    def number_of(tensor: Tensor) -> Any:
        asked.append(step_trace.is_fake(tensor))
        return True

    def step(x: Tensor) -> Tensor:
        assert (x.sum() > 0).item()
        step_trace.stand_for(table, (x * 2).sum(0))
        step_trace.note_module("layer")
        return table + x

    mode, fakes = step_trace.fake_fields({"x": torch.randn(5, 3)}, {"x": [0]})
    graph = step_trace.recorded(step, mode, fakes, lambda file: True, number_of)
    assert asked == [True]
    assert not graph.graph.find_nodes(op="get_attr")
    (added,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert list(added.meta["nn_module_stack"]) == ["layer"]
    (bounds,) = step_trace.symbols_of(fakes[0]).values()
    assert bounds == (2, None)
    assert [type(table) for table in step_trace.tables_of(nn.BatchNorm1d(2))] == [dict, dict]
