"""What a compiled step costs beyond its kernels, against the number of parameters and of regions.

Modules of tensors so small that their kernels cost next to nothing, forward and backward; eager steps and those as two
graphs and as one alternate in rounds in one process. Slopes are those of least-squares lines through the medians.
``python benchmarks/overhead.py [--rounds N] [--parameters N ...] [--regions N ...]``
"""

import argparse
import functools
from collections.abc import Callable

import numpy as np
import torch
from harness import console, in_turns, medians, table_of
from rich.table import Table
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.request import CompileRequest

WARM_UP = 20


class Products(nn.Module):
    """As many parameters as asked for, of one region."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(8) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        """Return (8,) for (8,)."""
        for factor in self.factors:
            x = x * factor
        return x


class Islands(nn.Module):
    """As many regions on ONNX Runtime as asked for, with an op between each two that is kept in torch."""

    def __init__(self, regions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(regions))

    def forward(self, x: Tensor) -> Tensor:
        """Return (1, 8) for (1, 8)."""
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else torch.special.i0e(x)).relu()
        return x


def measure(module: nn.Module, x: Tensor) -> tuple[list[float], list[int]]:
    """Return the medians in microseconds of steps by eager, as two graphs and as one, and their regions per step."""
    torch._dynamo.reset()
    parameters = list(module.parameters())

    def loss(x: Tensor) -> Tensor:
        return module(x).sum()

    def step(call: Callable[[Tensor], Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None
        call(x).backward()

    calls: dict[str, Callable[[], None]] = {"eager": lambda: step(loss)}
    backends = []
    for graphs in ("split", "joint"):
        backend = ORTBackend(
            ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1, "step_graph": graphs}),  # type: ignore[arg-type]
            lambda: CompileRequest(writes_gradients=lambda: True),  # as for a step of the strategy
        )
        backends.append(backend)
        compiled = torch.compile(lambda x, way=graphs: loss(x), backend=backend)  # type: ignore[misc]
        calls[graphs] = functools.partial(step, compiled)
    found = medians(in_turns(calls, rounds, WARM_UP))
    regions = []
    for backend in backends:
        ran = [region for graph in backend.report.graphs for region in graph.regions if region.executor == "ort"]
        assert all(region.runs == WARM_UP + rounds for region in ran)
        regions.append(len(ran))
    return [1e6 * median for median in found.values()], regions


def counted(title: str, column: str, counts: list[int], make: Callable[[int], nn.Module], x: Tensor) -> Table:
    """Measure for each count."""
    names = ("regions a step", "eager us", "two graphs us", "one graph us", "two / eager", "one / eager")
    table = table_of(title, [], [column, *names])
    found = []
    for count in counts:
        medians, regions = measure(make(count), x)
        found.append(medians)
        ratios = [f"{median / medians[0]:.2f}" for median in medians[1:]]
        table.add_row(f"{count:,}", "{}, {}".format(*regions), *(f"{median:.0f}" for median in medians), *ratios)
    slopes = [np.polyfit(np.array(counts, dtype=float), np.array(values), 1)[0] for values in zip(*found, strict=True)]
    table.caption = "per {}: eager {:.1f} us, two graphs {:.1f} us, one graph {:.1f} us".format(column[:-1], *slopes)
    return table


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=200)
parser.add_argument("--parameters", type=int, nargs="+", default=[10, 50, 200, 500, 1000, 2000])
parser.add_argument("--regions", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50])
args = parser.parse_args()
rounds = args.rounds
torch.manual_seed(0)
shown = console(110)
shown.print(counted("parameters, one region for each graph", "parameters", args.parameters, Products, torch.ones(8)))
shown.print(counted("layers, each a region", "layers", args.regions, Islands, torch.ones(1, 8)))
