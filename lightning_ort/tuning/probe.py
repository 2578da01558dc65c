"""What has to be known of a module and its data before the search: :class:`Facts`, from a step of a Trainer."""

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ort.callbacks.training_settings import BATCH_NORMS, fixed_batches
from lightning_ort.compat.torch import tree_leaves
from lightning_ort.strategies.whole_batches import is_made_of_tensors
from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.project import Project, start
from lightning_ort.tuning.trainer_process import TimeIsUp

_PRODUCTS, _SIZE = 5, 512
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides which candidates there are."""

    module: str  # its class
    device: str  # "cpu" or "cuda"
    batch_size: int  # of one process
    counts_examples: bool = False  # whether the first dimension of a batch's first tensor is its number of examples
    stream: bool  # whether the data is an IterableDataset, which each process sees as a whole
    accumulate: int
    loader_changes: bool = True  # whether the loader can be another, which is no DataLoader that is passed to fit
    batches_change: bool = True  # whether the same examples can come in other batches, with accumulated gradients
    made_of_tensors: bool  # whether a batch of the data takes one operation per tensor
    num_workers: int
    fusable: bool  # whether torch has a fused implementation that is not used
    batch_norm: bool
    convolutions: bool
    threads: int
    precision: str
    bfloat16: float  # how many times as fast a matrix product is as in float32


def probed(project: Project, folder: Path, deadline: float) -> Facts:
    """Return the facts of a project; ``VariantFailed`` if it cannot train, ``TimeIsUp`` if that takes too long."""
    if deadline <= time.monotonic():
        raise TimeIsUp
    # as the user has it, but for the strategy, which may need several processes or compile
    process = start(project, Candidate(engine="stock"), folder, partial(_facts, project.data is not None))
    try:
        sample = process.sample(1, deadline - time.monotonic())
        facts: Facts = process.finish(deadline - time.monotonic())
    finally:
        process.stop()
    return dataclasses.replace(facts, counts_examples=sample.examples == facts.batch_size)


def _facts(has_data: bool, trainer: Any) -> Facts:
    module, loader = trainer.lightning_module, trainer.train_dataloader
    modules = list(module.modules())
    changes = type(loader) is DataLoader and not (has_data and trainer.datamodule is None)
    device = trainer.strategy.root_device
    return Facts(
        module=type(module).__name__,
        device=device.type,
        batch_size=_batch_size(loader),
        stream=any(isinstance(getattr(one, "dataset", None), IterableDataset) for one in tree_leaves(loader)),
        accumulate=trainer.accumulate_grad_batches,
        loader_changes=changes,
        batches_change=changes and module.automatic_optimization and fixed_batches(loader) is None,
        made_of_tensors=is_made_of_tensors(getattr(loader, "dataset", None)),
        num_workers=getattr(loader, "num_workers", 0),
        fusable=any(_fusable(one) for one in trainer.optimizers),
        batch_norm=any(isinstance(one, BATCH_NORMS) for one in modules),
        convolutions=any(isinstance(one, _CONVOLUTIONS) for one in modules),
        threads=torch.get_num_threads(),
        precision=trainer.precision,
        bfloat16=bfloat16_speed() if device.type == "cpu" else 1.0,
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
