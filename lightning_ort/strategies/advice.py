"""What would make a training step faster, for the report: :func:`advice_on_time`."""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from lightning_ort.compat.torch import tree_leaves
from lightning_ort.compiler.run_part import StepTimeReport
from lightning_ort.strategies.whole_batches import is_made_of_tensors

if TYPE_CHECKING:
    import lightning.pytorch as pl

_MUCH = 0.4  # of a step
_HANDED_OVER = 0.5  # ms: what a batch from a worker costs at least


def advice_on_time(time: StepTimeReport | None, module: "pl.LightningModule | None") -> StepTimeReport | None:
    """Return what the time of a step is made of, with advice that holds on an idle machine too."""
    if time is None or time.is_busy:
        return time
    found = [] if module is None else tree_leaves(module.trainer.train_dataloader)
    loaders = [loader for loader in found if isinstance(loader, DataLoader)]
    workers = max((loader.num_workers for loader in loaders), default=None)
    of_tensors = all(is_made_of_tensors(loader.dataset) for loader in loaders)
    return dataclasses.replace(time, advice=what_would_help(time.ms, workers, of_tensors, os.cpu_count() or 1))


def what_would_help(ms: Mapping[str, float], workers: int | None, of_tensors: bool, processors: int) -> str:
    """Return what would make a step faster; nothing if its time goes where it should.

    ``ms`` is the time of each part. ``workers`` are those of the DataLoader, ``None`` if the data comes from something
    else, and ``of_tensors`` says whether a batch is fetched at once.
    """
    much = _MUCH * sum(ms.values())
    if ms["loader"] > much:
        if workers is None or of_tensors or (workers == 0 and processors == 1):
            return "larger batches would help, or a faster loader"
        if workers:
            return f"more than {workers} workers would help, DataLoader(num_workers=...)"
        if ms["loader"] > _HANDED_OVER:
            return "a worker would help, DataLoader(num_workers=1, persistent_workers=True)"
        return "larger batches would help"
    if ms["Trainer"] > much:
        return "larger batches would help, or fewer logged values and callbacks"
    if ms["optimizer"] > much:
        return "larger batches would help, or Trainer(accumulate_grad_batches=...)"
    return ""
