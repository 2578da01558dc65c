"""Where the time of a step goes: ONNX Runtime's kernels, torch's regions, and the floor that matrix products set.

``python benchmarks/where_time_goes.py [--modules NAME ...] [--steps N]``: forward and backward pass of modules of
``benchmarks/zoo.py``, everything that can run on ONNX Runtime there (``placement="always"``), beside eager in turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zoo
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort import session
from lightning_ort.compiler.executors.torch import TorchRegion
from lightning_ort.config import ORTConfig
from lightning_ort.strategies import host_memory
from lightning_ort.tuning.machine import machine

_SHOWN = 12  # kernels


def gemm_rate() -> float:
    """Return the floating-point operations a second of torch's products of 1024 x 1024 matrices."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / statistics.median(times)


def measure(name: str, steps: int, console: Console) -> None:
    """Print one module's tables."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = getattr(zoo, name)()
    module.log = lambda *args, **kwargs: None
    batch = next(iter(module.train_dataloader()))
    sessions: list[Any] = []
    torch_regions: list[float] = []
    options, build, run_in_torch = session.session_options, session.build, TorchRegion.__call__

    def profiled(threads: int) -> Any:
        made = options(threads)
        made.enable_profiling, made.profile_file_prefix = True, f"{folder}/{len(sessions)}"
        return made

    def kept(*args: Any) -> Any:
        sessions.append(build(*args))
        return sessions[-1]

    def timed(region: TorchRegion, *args: Any) -> Any:
        start = time.perf_counter()
        results = run_in_torch(region, *args)
        torch_regions.append(time.perf_counter() - start)
        return results

    def seconds(step: Callable[[], torch.Tensor]) -> float:
        start = time.perf_counter()
        step().backward()
        taken = time.perf_counter() - start
        module.zero_grad()
        return taken

    with tempfile.TemporaryDirectory() as folder:
        session.session_options, session.build, TorchRegion.__call__ = profiled, kept, timed
        config = ORTConfig(placement="always", cache_dir=None, intra_op_threads=torch.get_num_threads())
        ways = {
            "eager": lambda: module.training_step(batch, 0),
            "ort": torch.compile(lambda: module.training_step(batch, 0), backend=ORTBackend(config)),
        }
        with FlopCounterMode(display=False) as flops:
            seconds(ways["eager"])
        seconds(ways["ort"])
        torch_regions.clear()
        times = {way: [] for way in ways}
        for _ in range(steps):
            for way, step in ways.items():
                times[way].append(seconds(step))
        kernels: Counter[str] = Counter()
        for one in sessions:
            events = json.loads(Path(one.end_profiling()).read_text())
            runs = [event for event in events if event["name"].endswith("_kernel_time")]
            for event in runs[len(runs) // (steps + 1) :]:  # without the first run
                kernels[event["args"]["op_name"]] += event["dur"]
        session.session_options, session.build, TorchRegion.__call__ = options, build, run_in_torch
    medians = {way: 1000 * statistics.median(values) for way, values in times.items()}
    rows = [(kernel, micros / 1000 / steps) for kernel, micros in kernels.most_common(_SHOWN)]
    in_ort = kernels.total() / 1000 / steps
    others = in_ort - sum(ms for _, ms in rows)
    in_torch = 1000 * sum(torch_regions) / steps
    floor = 1000 * flops.get_total_flops() / gemm_rate()
    table = Table("what", "ms a step", title=f"{name}: eager {medians['eager']:.3g} ms, ort {medians['ort']:.3g} ms")
    for what, ms in [*rows, ("other kernels", others), ("torch's regions", in_torch)]:
        table.add_row(what, f"{ms:.3g}")
    rest = 1000 * statistics.mean(times["ort"]) - in_ort - in_torch
    table.add_row("the rest: binding, dynamo, autograd, profiler", f"{rest:.3g}", end_section=True)
    table.add_row("floor: matrix products and convolutions at torch's rate", f"{floor:.3g}")
    console.print(table)


def main() -> None:
    """Measure all modules that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--modules", nargs="+", default=["MLP", "GPT", "BERT", "ViT"])
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    console = Console(width=140)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    host_memory.retain()
    for name in args.modules:
        measure(name, args.steps, console)


main()
