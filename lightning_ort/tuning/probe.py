"""What has to be known of a module and its data before the search: :class:`Facts`, from two steps of a Trainer."""

import importlib
import json
import os
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lightning_ort._imports import LightningNamespace
from lightning_ort.callbacks.loaders import fixed_batches
from lightning_ort.callbacks.training_settings import BATCH_NORMS, repeated_blocks
from lightning_ort.strategies.whole_batches import is_made_of_tensors
from lightning_ort.tuning.candidate import NOT_COMPILED, Candidate
from lightning_ort.tuning.memory import MeasuredStep, MemoryModel
from lightning_ort.tuning.project import GIVEN, Project, train
from lightning_ort.tuning.trainer_process import TrainerProcess, loaders_in, namespace_of_class, size_of

_MEASURED = 2  # the step after the first one, which allocates
_PRODUCTS, _SIZE = 5, 512
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides which candidates there are."""

    module: str  # its class
    parameters: int
    device: str  # "cpu" or "cuda"
    batch_size: int  # of one process
    counts_examples: bool  # whether the first dimension of a batch's first tensor is its number of examples
    stream: bool  # whether the data is an IterableDataset, which each process sees as a whole
    accumulate: int
    batch_argument: bool  # whether the data has an argument batch_size
    fixed_batches: str | None  # why the batch size cannot be changed
    made_of_tensors: bool  # whether a batch of the data takes one operation per tensor
    num_workers: int
    optimizers: list[str]  # classes
    fusable: bool  # whether torch has a fused implementation that is not used
    automatic_optimization: bool
    batch_norm: bool
    convolutions: bool
    blocks: int  # that are repeated
    threads: int
    precision: str
    bfloat16: float  # how many times as fast a matrix product is as in float32
    step_seconds: float  # of the second step
    memory: MemoryModel | None  # None if nothing can be measured
    notes: list[str] = field(default_factory=list)
    given_loader: bool = False  # whether the data is a DataLoader that is passed to Trainer.fit


def start_probe(project: Project, folder: Path) -> TrainerProcess:
    """Start the process; its ``finish()`` returns the facts."""
    return TrainerProcess(partial(_probe, project), folder)


def _probe(project: Project, connection: Connection, folder: Path) -> Facts:
    connection.recv()
    os.environ.setdefault("LIGHTNING_ORT_CONFIG", json.dumps(NOT_COMPILED))
    # as the user has it, but for the strategy, which may need several processes or compile
    found: list[Any] = []

    def callbacks(namespace: LightningNamespace) -> list[Any]:
        base = importlib.import_module(f"{namespace.package}.callbacks").Callback
        found.append(type("Probe", (_Probe, base), {})())
        return found

    train(project, Candidate(engine="stock"), folder, callbacks)
    if not found[0].has_trained:
        raise ValueError("the DataLoader is empty, or the Trainer has limit_train_batches=0")
    return found[0].facts(project.batch_argument is not None)


class _Probe:
    """A callback that looks at everything once, and ends training."""

    def __init__(self) -> None:
        self._steps = 0

    @property
    def has_trained(self) -> bool:
        return self._steps > 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._module = trainer, pl_module
        self._memory: MemoryModel | None = None
        self._seconds = 0.0
        self._is_marked = False
        self._sizes: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Measure the second step."""
        self._steps += 1
        self._sizes.append(size_of(namespace_of_class(type(pl_module)), batch))
        self._start = time.perf_counter()
        if self._steps == _MEASURED:
            # Lightning zeroes gradients after the forward pass: those of the step before are there until then
            self._gradients = sum(p.grad.nbytes for p in pl_module.parameters() if p.grad is not None)
            self._measuring = MeasuredStep(trainer.strategy.root_device)
            self._measuring.start()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End if there are no batches."""
        trainer.should_stop |= not self.has_trained

    def on_before_zero_grad(self, *args: Any) -> None:
        """Note that the forward pass is done; Lightning zeroes gradients after it."""
        self._forward_done()

    def on_before_backward(self, *args: Any) -> None:
        """Note that the forward pass is done; there may have been no gradients to zero."""
        self._forward_done()

    def _forward_done(self) -> None:
        if self._steps == _MEASURED and not self._is_marked:
            self._is_marked = True
            self._measuring.forward_done()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read what was measured, and end."""
        if self._steps < _MEASURED:
            return
        self._seconds = time.perf_counter() - self._start
        if (levels := self._measuring.stop()) is not None:
            size = _batch_size(trainer.train_dataloader)
            self._memory = MemoryModel.of(pl_module, trainer.optimizers, batch, size, self._gradients, levels)
        trainer.should_stop = True

    def facts(self, batch_argument: bool) -> Facts:
        """Return what was seen."""
        module, trainer = self._module, self._trainer
        loader = trainer.train_dataloader
        modules = list(module.modules())
        device = trainer.strategy.root_device
        bfloat16 = bfloat16_speed() if device.type == "cpu" else 1.0
        notes = [] if self._memory else ["the memory of a step could not be measured"]
        return Facts(
            module=type(module).__name__,
            parameters=sum(p.numel() for p in module.parameters()),
            device=device.type,
            batch_size=_batch_size(loader),
            counts_examples=max(self._sizes) == _batch_size(loader),
            stream=any(isinstance(getattr(one, "dataset", None), IterableDataset) for one in loaders_in(loader)),
            accumulate=trainer.accumulate_grad_batches,
            batch_argument=batch_argument,
            fixed_batches=fixed_batches(loader),
            made_of_tensors=is_made_of_tensors(getattr(loader, "dataset", None)),
            num_workers=getattr(loader, "num_workers", 0),
            optimizers=[type(one).__name__ for one in trainer.optimizers],
            fusable=any(_fusable(one) for one in trainer.optimizers),
            automatic_optimization=module.automatic_optimization,
            batch_norm=any(isinstance(one, BATCH_NORMS) for one in modules),
            convolutions=any(isinstance(one, _CONVOLUTIONS) for one in modules),
            blocks=len(list(repeated_blocks(module))),
            threads=torch.get_num_threads(),
            precision=trainer.precision,
            bfloat16=bfloat16,
            step_seconds=self._seconds,
            memory=self._memory,
            notes=notes,
            given_loader=type(trainer.datamodule).__name__ == GIVEN,
        )


def bfloat16_speed() -> float:
    """Return how many times as fast a product of two matrices is in bfloat16 as in float32 on the CPU."""
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in range(_PRODUCTS):
        for dtype, found in seconds.items():
            matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
            start = time.perf_counter()
            matrix @ matrix
            found.append(time.perf_counter() - start)
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def _batch_size(loader: Any) -> int:
    """Return a loader's batch size; 1 if only the data knows it, or if there are several loaders."""
    sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 1


def _fusable(optimizer: torch.optim.Optimizer) -> bool:
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    return type(optimizer) in known and not any(group.get("fused") for group in optimizer.param_groups)
