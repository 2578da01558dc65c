"""What a compiled step costs beyond its kernels: ten Linear(64) + ReLU layers at batch 8, forward and backward.

Eager and compiled steps alternate in rounds in one process; the table shows medians and their ratio, then where a
compiled step's time goes: the two sessions alone, and the same through the hot path (binding, allocation); the rest is
what dynamo, AOTAutograd and autograd add. The floor is a step through these that computes nothing: its two graphs
return tensors that were made once.
``python benchmarks/hot_path.py [--rounds N]``
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from harness import console, in_turns, table_of
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.running.guarded_region import GuardedRegion


def record_regions() -> list[tuple[BoundSession, tuple[object, ...]]]:
    """Remember each region's session and the arguments of its latest call."""
    seen: dict[int, tuple[BoundSession, tuple[object, ...]]] = {}
    original = GuardedRegion.__call__

    def call(self: GuardedRegion, *args: object) -> object:
        assert isinstance(self._run, BoundSession)
        detached = tuple(arg.detach().contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
        seen[id(self)] = (self._run, detached)
        return original(self, *args)

    GuardedRegion.__call__ = call  # type: ignore[method-assign]
    try:
        step()
    finally:
        GuardedRegion.__call__ = original  # type: ignore[method-assign]
    return list(seen.values())


def computes_nothing(gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[[list[object]], list[object]]:
    """Compile a graph to a function that returns inputs, and tensors of zeros that are made once."""
    places = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    (results,) = gm.graph.output_node().args
    with unset_fake_temporarily():
        zeros = [None if node is None else torch.zeros(node.meta["val"].shape) for node in results]

    def run(args: list[object]) -> list[object]:
        made = [
            args[places[node]] if node in places else None if zero is None else zero.detach()
            for node, zero in zip(results, zeros, strict=True)
        ]
        args.clear()
        return made

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def step() -> None:
    """Run one compiled forward and backward."""
    compiled(x).sum().backward()


def floor_step() -> None:
    """Run a compiled forward and backward that compute nothing."""
    floor(x).sum().backward()


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
floor = torch.compile(net.forward, backend=aot_autograd(fw_compiler=computes_nothing, bw_compiler=computes_nothing))
for _ in range(50):
    eager_step()
    step()
    floor_step()
regions = record_regions()
kept: list[object] = []


def sessions_alone() -> None:
    """Run both sessions as :func:`regions_alone` bound them, which has to come right before."""
    for bound, _ in regions:
        bound._run(next(bound._bindings.turns)[0], bound.run_options)


def regions_alone() -> None:
    """Run both regions: bind, allocate, run."""
    kept[:] = [bound(*args) for bound, args in regions]  # the sessions stay bound to these outputs


candidates = {
    "eager": eager_step,
    "floor": floor_step,
    "ort": step,
    "  both regions": regions_alone,
    "    both sessions": sessions_alone,
}
times = {name: [1e6 * value for value in values] for name, values in in_turns(candidates, rounds).items()}
title = f"10 x (Linear(64) + ReLU), batch 8, forward + backward, {rounds} interleaved rounds"
table = table_of(title, ["what"], ["median us", "10 % us", "90 % us", "ratio to eager"])
eager = statistics.median(times["eager"])
for name, values in times.items():
    deciles = statistics.quantiles(values, n=10)
    median = statistics.median(values)
    table.add_row(name, f"{median:.0f}", f"{deciles[0]:.0f}", f"{deciles[-1]:.0f}", f"{median / eager:.2f}")
shown = console(110)
shown.print(table)
shown.print(backend.report.to_text(width=110), markup=False, highlight=False)
