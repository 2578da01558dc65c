"""What a compiled step costs beyond its kernels: ten Linear(64) + ReLU layers at batch 8, forward and backward.

Eager and compiled steps alternate in rounds in one process; the table shows medians and their ratio, then where a
compiled step's time goes: the two sessions alone, and the same through the hot path (binding, allocation); the rest is
what dynamo, AOTAutograd and autograd add.
``python benchmarks/hot_path.py [--rounds N]``
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.runtime import BoundSession, OrtRegion


def microseconds(call: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def record_regions() -> list[tuple[BoundSession, tuple[object, ...]]]:
    """Remember each region's session and the arguments of its latest call."""
    seen: dict[int, tuple[BoundSession, tuple[object, ...]]] = {}
    original = OrtRegion.__call__

    def call(self: OrtRegion, *args: object) -> object:
        assert isinstance(self._run, BoundSession)
        detached = tuple(arg.detach().contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
        seen[id(self)] = (self._run, detached)
        return original(self, *args)

    OrtRegion.__call__ = call  # type: ignore[method-assign]
    try:
        step()
    finally:
        OrtRegion.__call__ = original  # type: ignore[method-assign]
    return list(seen.values())


def step() -> None:
    """Run one compiled forward and backward."""
    compiled(x).sum().backward()


def eager_step() -> None:
    """Run the same in eager."""
    net(x).sum().backward()


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=500)
rounds = parser.parse_args().rounds

torch.manual_seed(0)
net = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())))
x = torch.randn(8, 64)
backend = ORTBackend(ORTConfig(placement="always"))
compiled = torch.compile(net.forward, backend=backend)
for _ in range(50):
    eager_step()
    step()
regions = record_regions()
kept: list[object] = []


def sessions_alone() -> None:
    """Run both sessions as :func:`regions_alone` bound them, which has to come right before."""
    for bound, _ in regions:
        bound.session._sess.run_with_iobinding(bound._binding, bound.run_options)


def regions_alone() -> None:
    """Run both regions: bind, allocate, run."""
    kept[:] = [bound(*args) for bound, args in regions]  # the sessions stay bound to these outputs


candidates = {"eager": eager_step, "ort": step, "  both regions": regions_alone, "    both sessions": sessions_alone}
times: dict[str, list[float]] = {name: [] for name in candidates}
for _ in range(rounds):
    for name, call in candidates.items():
        times[name].append(microseconds(call))

table = Table(title=f"10 x (Linear(64) + ReLU), batch 8, forward + backward, {rounds} interleaved rounds")
for column in ("what", "median us", "10 % us", "90 % us", "ratio to eager"):
    table.add_column(column, justify="left" if column == "what" else "right")
eager = statistics.median(times["eager"])
for name, values in times.items():
    deciles = statistics.quantiles(values, n=10)
    median = statistics.median(values)
    table.add_row(name, f"{median:.0f}", f"{deciles[0]:.0f}", f"{deciles[-1]:.0f}", f"{median / eager:.2f}")
console = Console(width=110)
console.print(
    f"{time.strftime('%Y-%m-%d')}  torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, "
    f"Python {platform.python_version()}, {torch.get_num_threads()} threads, {platform.machine()}"
)
console.print(table)
console.print(backend.report.to_text(width=110), markup=False, highlight=False)
