"""A training step as one graph and as two, beside eager: forward and backward pass alone, without an optimizer.

All ways take turns in one process. The table shows medians in ms, and each way's time in units of eager's.
``python benchmarks/step_graph.py [--rounds N] [--placement measured|always] [--modules NAME ...]``
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import held_out
import small
import torch
import zoo
from harness import console, in_turns, medians, table_of
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.strategies.host_memory import RetainedMemory

WARM_UP = 10


MODULES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (*small.MODULES, *zoo.MODULES, *held_out.MODULES)
}


def measure(make: Callable[[], Any], placement: str, rounds: int) -> tuple[dict[str, float], str]:
    """Return the median of each way in seconds, and who runs the step as one graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = make()
    module.log = lambda *args, **kwargs: None
    batch = next(iter(module.train_dataloader()))
    parameters = list(module.parameters())
    steps: dict[str, Callable[..., Tensor]] = {"eager": lambda: module.training_step(batch, 0)}
    one = ""
    for way, options in (("two graphs", "split"), ("one graph", "joint")):
        backend = ORTBackend(
            ORTConfig(placement=placement, cache_dir=None, debug={"step_graph": options}),  # type: ignore[arg-type]
            lambda: CompileRequest(writes_gradients=lambda: True),  # as for a step of the strategy
        )
        steps[way] = torch.compile(lambda way=way: module.training_step(batch, 0), backend=backend)  # type: ignore[misc]
        run(steps[way], parameters)
        graphs = backend.report.graphs
        one = (
            f"{backend.report.ort_node_fraction:.0%}" if any("step" in graph.name for graph in graphs) else "two graphs"
        )
    turns = {way: functools.partial(run, step, parameters) for way, step in steps.items()}
    return medians(in_turns(turns, rounds, WARM_UP)), one


def run(step: Callable[[], Tensor], parameters: list[nn.Parameter]) -> None:
    """Run a forward and a backward pass."""
    for parameter in parameters:
        parameter.grad = None
    step().backward()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--placement", choices=("measured", "always"), default="measured")
    parser.add_argument("--modules", nargs="*", default=list(MODULES))
    args = parser.parse_args()
    RetainedMemory("retain").setup(torch.device("cpu"))  # as the strategies do
    title = f"forward and backward pass, ms, {args.rounds} rounds in turns, placement={args.placement!r}"
    columns = ("eager", "two graphs", "one graph", "two / eager", "one / eager", "nodes on ORT")
    table = table_of(title, ["module"], columns)
    for name in args.modules:
        ms, share = measure(MODULES[name], args.placement, args.rounds)
        eager, *others = ms.values()
        ratios = [f"{other / eager:.2f}" for other in others]
        table.add_row(name, *(f"{value * 1e3:.3g}" for value in ms.values()), *ratios, share)
    console(110).print(table)


if __name__ == "__main__":
    main()
