"""What has to be known of a module and its data before the search: :class:`Facts`, from three steps of a Trainer."""

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
from lightning_ort.tuning.memory import MeasuredStep, MemoryModel, Saved, SavedTensors, StepMemory, model_of, states_of
from lightning_ort.tuning.project import GIVEN, Project, train
from lightning_ort.tuning.trainer_process import TrainerProcess, loaders_in, namespace_of_class, size_of

_MEASURED, _TRACED = 2, 3  # the steps after the first one, which allocates
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
    memory: MemoryModel | None  # None if nothing can be traced
    measured: StepMemory | None
    notes: list[str] = field(default_factory=list)
    given_loader: bool = False  # whether the data is a DataLoader that is passed to Trainer.fit


def start_probe(project: Project, folder: Path, traced: bool = True) -> TrainerProcess:
    """Start the process; its ``finish()`` returns the facts. ``traced`` says whether saved tensors are looked at."""
    return TrainerProcess(partial(_probe, project, traced), folder)


def _probe(project: Project, traced: bool, connection: Connection, folder: Path) -> Facts:
    connection.recv()
    os.environ.setdefault("LIGHTNING_ORT_CONFIG", json.dumps(NOT_COMPILED))
    # as the user has it, but for the strategy, which may need several processes or compile
    found: list[Any] = []

    def callbacks(namespace: LightningNamespace) -> list[Any]:
        base = importlib.import_module(f"{namespace.package}.callbacks").Callback
        found.append(type("Probe", (_Probe, base), {})(traced))
        return found

    train(project, Candidate(engine="stock"), folder, callbacks)
    if not found[0].has_trained:
        raise ValueError("the DataLoader is empty, or the Trainer has limit_train_batches=0")
    return found[0].facts(project.batch_argument is not None)


class _Probe:
    """A callback that looks at everything once, and ends training."""

    def __init__(self, traced: bool) -> None:
        self._is_traced = traced
        self._steps = 0

    @property
    def has_trained(self) -> bool:
        return self._steps > 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._module = trainer, pl_module
        self._traced: SavedTensors | None = None
        self._saved: list[Saved] | None = None
        self._memory: MemoryModel | None = None
        self._measured: StepMemory | None = None
        self._seconds = 0.0
        self._measuring: MeasuredStep | None = None
        self._is_marked = False
        self._levels: tuple[int, int, int] | None = None
        self._sizes: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Measure the second step and trace the third."""
        self._steps += 1
        self._sizes.append(size_of(namespace_of_class(type(pl_module)), batch))
        self._batch = batch
        self._start = time.perf_counter()
        if self._steps == _TRACED and self._is_traced:
            self._traced = SavedTensors(pl_module, batch, profiled=trainer.strategy.root_device.type == "cpu")
            self._traced.__enter__()
        elif self._steps == _MEASURED:
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
        if self._traced is not None and self._saved is None:
            self._traced.__exit__(None, None, None)
            self._saved = self._traced.found
        elif self._steps == _MEASURED and self._measuring is not None and not self._is_marked:
            self._is_marked = True
            self._measuring.forward_done()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read what was measured, and end after the last step."""
        if self._steps == _MEASURED and self._measuring is not None:
            self._seconds = time.perf_counter() - self._start
            self._levels = self._measuring.stop()
        if self._steps == _TRACED:
            self._read_memory()
            trainer.should_stop = True

    def _read_memory(self) -> None:
        if self._traced is not None:
            if self._saved is None:  # manual optimization without a backward pass
                self._traced.__exit__(None, None, None)
            self._traced.stop()
        if self._saved is None:
            return
        module, optimizers = self._module, self._trainer.optimizers
        size = _batch_size(self._trainer.train_dataloader)
        self._memory = model_of(module, optimizers, self._batch, size, self._saved)
        if self._levels is None:
            return
        forward, forward_peak, later = self._levels
        step, states = self._memory.step, states_of(optimizers)
        trained = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        peak = step.parameters + states + step.other + max(self._gradients + forward_peak, later)
        self._measured = StepMemory(step.parameters, trained, states, forward, step.other, peak)

    def facts(self, batch_argument: bool) -> Facts:
        """Return what was seen."""
        module, trainer = self._module, self._trainer
        loader = trainer.train_dataloader
        modules = list(module.modules())
        device = trainer.strategy.root_device
        bfloat16 = bfloat16_speed() if device.type == "cpu" else 1.0
        why = "no gradient is computed by Lightning" if self._is_traced else "the step fails while it is looked at"
        notes = [] if self._memory else [f"activations could not be traced: {why}"]
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
            measured=self._measured,
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
