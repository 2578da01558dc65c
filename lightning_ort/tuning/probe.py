"""What has to be known of a module and its data before the search: :class:`Facts`, from two steps of a Trainer.

Among them are the bytes that a step needs, measured (:class:`MeasuredStep`), and predicted for others
(:class:`MemoryModel`): what it takes beyond parameters, gradients, states and the batch grows with the batch.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import IterableDataset

from lightning_ort._imports import LightningNamespace
from lightning_ort.callbacks.training_settings import BATCH_NORMS, fixed_batches, repeated_blocks
from lightning_ort.compat.torch import tree_leaves
from lightning_ort.optim.memory import predict, state_bytes
from lightning_ort.strategies.whole_batches import is_made_of_tensors
from lightning_ort.tuning.candidate import NOT_COMPILED, Candidate
from lightning_ort.tuning.project import GIVEN, Project, train
from lightning_ort.tuning.trainer_process import TrainerProcess, namespace_of_class, size_of

_FORWARD_DONE = "lightning_ort: forward done"
# what torch's own optimizers keep, in the names of lightning_ort.optim.memory
_KNOWN = {"Adam": "adamw_torch_fused", "AdamW": "adamw_torch_fused"}
# those that `tune` may try, which need not be all
_STATES_OF_ADAM = ("adamw_torch_fused", "adamw_torch_foreach", "adamw_bnb_8bit", "adamw_anyprecision")


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step. ``other`` is buffers and the batch."""

    parameters: int
    gradients: int
    states: int
    activations: int
    other: int
    peak: int


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of a step for other batch sizes and optimizers."""

    step: StepMemory  # what was measured
    batch_size: int  # with which batch size
    states: dict[str, int]  # bytes of optimizer states by implementation, as far as they are known

    def peak(self, batch_size: int | None = None, optim: str | None = None, kept: float = 1.0) -> int:
        """Return the peak; ``kept`` is the share of the activations that are not recomputed."""
        step = self.step
        fixed = step.parameters + step.gradients + step.other
        working = max(0, step.peak - fixed - step.states)
        scale = kept * (batch_size or self.batch_size) / self.batch_size
        return fixed + self.states.get(optim or "", step.states) + int(scale * working)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizers: Sequence[Any],
        batch: Any,
        batch_size: int,
        before: int,
        levels: tuple[int, int, int],
    ) -> "MemoryModel":
        """Return the model for a step that was measured, once its optimizers have their states.

        ``before`` are the bytes of the gradients that were there in the forward pass; ``levels`` what
        :meth:`MeasuredStep.stop` returned.
        """
        forward, forward_peak, later = levels
        gradients = gradient_bytes(module)
        parameters = sum(p.nbytes for p in module.parameters())
        other = sum(each.nbytes for each in (*module.buffers(), *filter(torch.is_tensor, tree_leaves(batch))))
        states = state_bytes(optimizers)
        peak = parameters + states + other + max(before + forward_peak, later)
        names = {_KNOWN.get(type(optimizer).__name__) for optimizer in optimizers}
        is_known = gradients > 0 and None not in names
        known = {name: predict(module, name).states for name in _STATES_OF_ADAM} if is_known else {}
        return cls(StepMemory(parameters, gradients, states, forward, other, peak), batch_size, known)


def gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's gradients, sparse ones among them."""
    return sum(_bytes_of(p.grad) for p in module.parameters() if p.grad is not None)


def _bytes_of(gradient: Tensor) -> int:
    if gradient.layout is not torch.sparse_coo:
        return gradient.nbytes
    gradient = gradient.coalesce()
    return gradient.indices().nbytes + gradient.values().nbytes


def _events_of(finished: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


class MeasuredStep:
    """Measures the allocator's peak over a step: started before it, told when its forward pass is done, and stopped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None
        self._forward: int | None = None  # on a GPU

    def start(self) -> None:
        """Start before the step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()

    def forward_done(self) -> None:
        """Tell that the forward pass is done."""
        if self._device.type == "cuda":
            self._forward = torch.cuda.memory_allocated(self._device) - self._start
            self._forward_peak = torch.cuda.max_memory_allocated(self._device) - self._start
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._profile is not None:
            with record_function(_FORWARD_DONE):
                pass

    def stop(self) -> tuple[int, int, int] | None:
        """Return the bytes that were added at the end of the forward pass, at its peak, and at the peak after it."""
        if self._device.type == "cuda":
            if self._forward is None:  # as of manual optimization without a backward pass
                return None
            later = torch.cuda.max_memory_allocated(self._device) - self._start
            return self._forward, self._forward_peak, later
        if self._profile is None:
            return None
        self._profile.__exit__(None, None, None)
        events = _events_of(self._profile)
        done = min((event["ts"] for event in events if event.get("name") == _FORWARD_DONE), default=None)
        levels = [(one["ts"], one["args"]["Total Allocated"]) for one in events if one.get("name") == "[memory]"]
        if done is None or not levels:
            return None
        forward = [level for ts, level in levels if ts <= done] or [0]
        return forward[-1], max(forward), max((level for ts, level in levels if ts > done), default=forward[-1])


_MEASURED = 2  # the step after the first one, which allocates
_PRODUCTS, _SIZE = 5, 512
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides which candidates there are."""

    module: str  # its class
    device: str  # "cpu" or "cuda"
    batch_size: int  # of one process
    counts_examples: bool  # whether the first dimension of a batch's first tensor is its number of examples
    stream: bool  # whether the data is an IterableDataset, which each process sees as a whole
    accumulate: int
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
        base = namespace.submodule("callbacks").Callback
        found.append(type("Probe", (_Probe, base), {})())
        return found

    train(project, Candidate(engine="stock"), folder, callbacks)
    if not found[0].has_trained:
        raise ValueError("the DataLoader is empty, or the Trainer has limit_train_batches=0")
    return found[0].facts()


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
        self._is_marked = False
        self._sizes: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._steps += 1
        self._sizes.append(size_of(namespace_of_class(type(pl_module)), batch))
        if self._steps == _MEASURED:
            # Lightning zeroes gradients after the forward pass: those of the step before are there until then
            self._gradients = gradient_bytes(pl_module)
            self._measuring = MeasuredStep(trainer.strategy.root_device)
            self._measuring.start()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End if there are no batches."""
        trainer.should_stop |= not self.has_trained

    def on_before_zero_grad(self, *args: Any) -> None:
        self._forward_done()

    def on_before_backward(self, *args: Any) -> None:
        """Note that the forward pass is done; there may have been no gradients to zero."""
        self._forward_done()

    def _forward_done(self) -> None:
        if self._steps == _MEASURED and not self._is_marked:
            self._is_marked = True
            self._measuring.forward_done()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._steps < _MEASURED:
            return
        if (levels := self._measuring.stop()) is not None:
            size = _batch_size(trainer.train_dataloader)
            self._memory = MemoryModel.of(pl_module, trainer.optimizers, batch, size, self._gradients, levels)
        trainer.should_stop = True

    def facts(self) -> Facts:
        module, trainer = self._module, self._trainer
        loader = trainer.train_dataloader
        modules = list(module.modules())
        device = trainer.strategy.root_device
        bfloat16 = bfloat16_speed() if device.type == "cpu" else 1.0
        notes = [] if self._memory else ["the memory of a step could not be measured"]
        return Facts(
            module=type(module).__name__,
            device=device.type,
            batch_size=_batch_size(loader),
            counts_examples=max(self._sizes) == _batch_size(loader),
            stream=any(isinstance(getattr(one, "dataset", None), IterableDataset) for one in tree_leaves(loader)),
            accumulate=trainer.accumulate_grad_batches,
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
