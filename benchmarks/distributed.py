"""What data parallel training costs each process: bytes on the wire, memory, and where a step's time goes.

Real processes on this machine, connected over the loopback device, whose counters say how many bytes went through it:
what gloo sent, whoever called it. The strategies take turns, in rounds. ``python benchmarks/distributed.py [--processes
N] [--rounds N] [--steps N] [--width N]``

With ``--captured`` the training step is captured and runs on ONNX Runtime: in graphs that end where DDP's buckets do,
as two whole graphs, and as one graph. Under DDP, the all-reduce of a bucket overlaps with the backward pass that
remains.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from harness import console, table_of
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTZeRO1Strategy

OFF = {"engine": "torch"}  # the communication is the same, and compiling is timed elsewhere
STRATEGIES = {
    "ddp (stock)": lambda: DDPStrategy(start_method="fork"),
    "ort_ddp": lambda: ORTDDPStrategy(config=OFF, start_method="fork"),
    "ort_zero1_native": lambda: ORTNativeZeRO1Strategy(config=OFF, start_method="fork"),
    "ort_zero1": lambda: ORTZeRO1Strategy(config=OFF, start_method="fork"),
}
WARM_UP = 4


def captured(step_graph: str, at_buckets: bool) -> Strategy:
    """The strategy whose step is on ONNX Runtime; processes that are forked later inherit dynamo's setting."""
    torch._dynamo.config.optimize_ddp = at_buckets
    config = {"placement": "always", "cache_dir": None, "debug": {"step_graph": step_graph}}
    return ORTDDPStrategy(config=config, start_method="fork")


CAPTURED = {
    "ddp (stock)": STRATEGIES["ddp (stock)"],
    "graphs end at buckets": lambda: captured("split", at_buckets=True),
    "two graphs": lambda: captured("split", at_buckets=False),
    "one graph": lambda: captured("joint", at_buckets=False),
}


def sent_bytes() -> int:
    """Bytes that the loopback device has sent since it is up."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def private_bytes() -> int:
    """Memory that this process shares with none: what it wrote since it was forked."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


class Network(LightningModule):
    """Linear layers of one size, on random data."""

    def __init__(self, width: int, steps: int, output: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())))
        self.width, self.steps, self.output = width, steps, output
        self.marks: dict[str, float] = {}
        self.seconds: dict[str, list[float]] = {"step": [], "forward and backward": [], "optimizer": []}
        self.memory = 0
        self.sent = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return self.net(batch[0]).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock, and after the first steps the count."""
        if batch_idx == WARM_UP:
            self.trainer.strategy.barrier()
            self.sent = -sent_bytes()
        self.marks["start"] = time.perf_counter()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The gradients are there; under DeepSpeed they are not averaged yet."""
        self.marks["stepping"] = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock."""
        end = time.perf_counter()
        if batch_idx >= WARM_UP:
            self.seconds["step"].append(end - self.marks["start"])
            self.seconds["forward and backward"].append(self.marks["stepping"] - self.marks["start"])
            self.seconds["optimizer"].append(end - self.marks["stepping"])
        self.memory = max(self.memory, private_bytes())

    def on_train_end(self) -> None:
        """Write what this rank saw."""
        self.trainer.strategy.barrier()
        self.sent += sent_bytes()
        optimizer: Any = self.trainer.optimizers[0]
        for inner in ("optim", "optimizer"):  # what ZeroRedundancyOptimizer and DeepSpeed call the local one
            optimizer = getattr(optimizer, inner, optimizer)
        tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        states = sum(tensor.nbytes for tensor in tensors)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        facts = {"sent": self.sent / self.steps, "memory": self.memory, "peak": peak, "states": states, **medians}
        self.output.with_suffix(f".{self.global_rank}").write_text(json.dumps(facts))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def run(strategy: Strategy, processes: int, width: int, steps: int) -> list[dict[str, float]]:
    """Train by one strategy, and return what each rank saw."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "facts.json"
        data = DataLoader(TensorDataset(torch.randn(4 * (WARM_UP + steps), width)), batch_size=4)
        Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=processes,
            max_epochs=1,
            use_distributed_sampler=False,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Network(width, steps, output), data)
        return [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(processes)]


def main() -> None:
    """Run all strategies in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--captured", action="store_true")
    arguments = parser.parse_args()
    strategies: dict[str, Callable[[], Strategy]] = CAPTURED if arguments.captured else STRATEGIES
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in strategies}
    for _ in range(arguments.rounds):
        for name, strategy in strategies.items():
            rounds[name] += run(strategy(), arguments.processes, arguments.width, arguments.steps)
    count = arguments.processes
    parameters = 8 * (arguments.width**2 + arguments.width)
    # a ring all-reduce is a reduce-scatter and an all-gather, in which each process sends (N-1)/N of the bytes
    theory = 2 * (count - 1) * 4 * parameters
    numbers = ["sent a step, all processes", "of theory", "states a process", "of 8 B/parameter"]
    numbers += ["private memory", "peak RSS", "step", "forward+backward", "optimizer"]
    title = f"{parameters:,} float32 parameters, AdamW, {count} processes on one machine, one thread each, medians"
    table = table_of(title, ["strategy"], numbers)
    for name, facts in rounds.items():
        median = {key: statistics.median(fact[key] for fact in facts) for key in facts[0]}
        table.add_row(
            name,
            f"{median['sent'] / 1e6:.2f} MB",
            f"{median['sent'] / theory:.3f}",
            f"{median['states'] / 1e6:.2f} MB",
            f"{median['states'] / (8 * parameters):.3f}",
            f"{median['memory'] / 1e6:.0f} MB",
            f"{median['peak'] / 1e6:.0f} MB",
            *(f"{median[key] * 1e3:.1f} ms" for key in ("step", "forward and backward", "optimizer")),
        )
    shown = console(180)
    shown.print(table)
    shown.print(
        "theory: 2(N-1) x 4 B x parameters for all processes together. DDP averages gradients within forward+backward,"
        " DeepSpeed within the optimizer's part, which also gathers the parameters under both ZeRO strategies."
    )


if __name__ == "__main__":
    main()
