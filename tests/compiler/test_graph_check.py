"""Which differences between tensors count, and the names that people read."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ort.compat.dynamo import input_name
from lightning_ort.compiler.running.eager_runs import RunState
from lightning_ort.compiler.running.graph_check import (
    GraphCheck,
    GraphDiffers,
    distances_of,
    least_exact,
    rounded,
    unexplained,
)


def distance(one: Any, two: Any) -> float:
    (found,) = distances_of({"x": one}, {"x": two}).values()
    return found


def test_distances() -> None:
    x = torch.tensor([3.0, 4.0])
    assert distance(x, x) == 0
    assert distance(torch.zeros(2), torch.zeros(2)) == 0
    assert distance(x, -x) == 2
    assert distance(x, x * 2) == 0.5
    assert distance(None, x) == distance(x, None) == 1
    assert distance(None, torch.zeros(2)) == 0
    assert distance(x, x.double()) == distance(x, torch.zeros(3)) == math.inf
    assert distance(x, torch.tensor([3.0, math.nan])) == distance(x, torch.tensor([3.0, math.inf])) == math.inf
    assert distance(torch.tensor([math.nan]), torch.tensor([math.inf])) == 0  # a step that overflows
    assert distance(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5
    assert distance(torch.tensor([1j]), torch.tensor([-1j])) == 2
    assert distance(torch.full((4,), 60000.0, dtype=torch.half), torch.full((4,), 60000.0, dtype=torch.half)) == 0
    assert distances_of({"x": None, "y": 3}, {"x": None, "y": 4}) == {}


def ill_conditioned(seed: int) -> dict[str, Any]:
    """A large sum from which its rounded value is taken."""
    (x,) = rounded([torch.ones(1000)], seed, torch.float32)
    return {"difference": x.double().sum() - 1000 + 1e-9, "sum": x.sum()}


def test_what_roundings_explain_is_no_difference() -> None:
    own = {"difference": torch.tensor(5e-6, dtype=torch.float64), "sum": torch.tensor(1000.0)}
    assert unexplained(own, ill_conditioned, 1e-3)[0] == {}
    own["sum"] = torch.tensor(1010.0)
    found, largest = unexplained(own, ill_conditioned, 1e-3)
    assert found.keys() == {"sum"}
    assert largest > 0.5


def test_a_sum_in_another_order_each_time_is_no_difference() -> None:
    values = iter(torch.randn(10, 3))
    assert unexplained({"x": torch.randn(3)}, lambda seed: {"x": next(values)}, 1e-3)[0] == {}


def test_roundings_change_no_indices_and_keep_parameters() -> None:
    args = [nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True), torch.arange(3), 2.0]
    assert rounded(args, 0, torch.float32) == args
    one, two = rounded(args, 1, torch.float32), rounded(args, 2, torch.float32)
    assert isinstance(one[0], nn.Parameter)
    assert one[1].requires_grad
    assert one[2] is args[2]
    assert one[3] == 2.0
    assert not torch.equal(one[0], two[0])
    assert torch.equal(one[0], rounded(args, 1, torch.float32)[0])
    torch.testing.assert_close(one[1], args[1])


def test_the_least_exact_dtype_decides() -> None:
    assert least_exact([torch.ones(1), 3, torch.ones(1, dtype=torch.double)], []) is torch.float32
    assert least_exact([torch.ones(1)], [torch.bfloat16]) is torch.bfloat16
    assert least_exact([torch.ones(1, dtype=torch.int)], []) is torch.float32
    assert least_exact([torch.ones(1, dtype=torch.double)], []) is torch.float64


def test_inputs_are_named_as_in_the_program() -> None:
    names: list[str] = []

    def backend(gm: Any, inputs: Any) -> Any:
        names.extend(map(input_name, gm.graph.find_nodes(op="placeholder")))
        return gm.forward

    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    torch.compile(lambda batch: net(batch["x"]).sum(), backend=backend)({"x": torch.ones(4, 2)})
    assert {"batch.x", "net.0.weight", "net.1.bias", "net.1.running_mean"} <= set(names)


def test_the_largest_differences_are_shown() -> None:
    told: list[float] = []
    check = GraphCheck(lambda seconds, largest: told.append(largest), lambda why: None, [*"abcde"])
    args = [torch.tensor(1.0, requires_grad=True) for _ in range(5)]
    own = [torch.tensor(1 / (2 + index)) for index in range(5)]
    with pytest.raises(GraphDiffers, match=r"^the gradient of e differs .* by 83% .*; and 2 more|of c .*, and 2 more$"):
        check.gradients(lambda *inner: [sum(inner)], args, {}, RunState(args), [torch.ones(())], own)
    assert told == [pytest.approx(5 / 6)]
    check.gradients(lambda *inner: [sum(inner)], args, {}, RunState(args), [torch.ones(())], [torch.ones(())] * 5)
    assert told[1] == 0
