"""What a compiled step costs beyond its kernels, against the number of parameters and of regions.

Modules of tensors so small that their kernels cost next to nothing, forward and backward; eager and compiled steps
alternate in rounds in one process. Slopes are least-squares lines through the medians.
``python benchmarks/overhead.py [--rounds N] [--parameters N ...] [--regions N ...]``
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend

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


def measure(module: nn.Module, x: Tensor) -> tuple[float, float, int]:
    """Return the medians of eager and of compiled steps in microseconds, and the number of regions per step."""
    torch._dynamo.reset()
    backend = ORTBackend(ORTConfig(placement="always", min_region_nodes=1, cache_dir=None))
    compiled = torch.compile(module.forward, backend=backend)
    times: dict[Callable[[Tensor], Tensor], list[float]] = {module.forward: [], compiled: []}
    for number in range(WARM_UP + rounds):
        for call, values in times.items():
            start = time.perf_counter()
            call(x).sum().backward()
            if number >= WARM_UP:
                values.append((time.perf_counter() - start) * 1e6)
    regions = [region for graph in backend.report.graphs for region in graph.regions if region.executor == "ort"]
    assert all(region.runs == WARM_UP + rounds for region in regions)
    eager, ort = (statistics.median(values) for values in times.values())
    return eager, ort, len(regions)


def table_of(title: str, column: str, counts: list[int], make: Callable[[int], nn.Module], x: Tensor) -> Table:
    """Measure for each count."""
    table = Table(title=title)
    for name in (column, "regions a step", "eager us", "ort us", "ort - eager us", "ort / eager"):
        table.add_column(name, justify="right")
    found = []
    for count in counts:
        eager, ort, regions = measure(make(count), x)
        found.append((count, regions, eager, ort))
        table.add_row(
            f"{count:,}", f"{regions}", f"{eager:.0f}", f"{ort:.0f}", f"{ort - eager:+.0f}", f"{ort / eager:.2f}"
        )
    by = np.array([row[0] for row in found], dtype=float)
    eager_slope, ort_slope = (np.polyfit(by, np.array([row[index] for row in found]), 1)[0] for index in (2, 3))
    ort_line = np.polyfit(by, np.array([row[3] for row in found]), 1)
    fit = np.corrcoef(np.polyval(ort_line, by), np.array([row[3] for row in found]))[0, 1] ** 2
    table.caption = f"per {column[:-1]}: eager {eager_slope:.2f} us, ort {ort_slope:.2f} us (R2 of the line {fit:.4f})"
    return table


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=200)
parser.add_argument("--parameters", type=int, nargs="+", default=[10, 50, 200, 500, 1000, 2000])
parser.add_argument("--regions", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50])
args = parser.parse_args()
rounds = args.rounds
torch.manual_seed(0)
console = Console(width=110)
console.print(
    f"{time.strftime('%Y-%m-%d')}  torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, "
    f"Python {platform.python_version()}, {torch.get_num_threads()} threads, {platform.machine()}"
)
console.print(
    table_of("parameters, one region forward and one backward", "parameters", args.parameters, Products, torch.ones(8))
)
console.print(table_of("layers, each a region", "layers", args.regions, Islands, torch.ones(1, 8)))
