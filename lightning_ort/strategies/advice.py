"""What a run on a GPU leaves unused, and what would save time: :func:`advice_for`, :func:`advice_on_time`.

For the report. What pays most comes first. Each piece of advice says what to do; nothing is changed.
"""

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ort.compat.torch import tree_leaves, uses_tf32
from lightning_ort.compiler.run_part import StepTimeReport
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.whole_batches import is_made_of_tensors

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

_TILE = 64  # elements: tensor cores compute with blocks of this width, and a part of one takes as long
_AMPERE = 8  # compute capability 8.0, the first with bfloat16 and TF32
_SHOWN = 3
_MUCH = 0.4  # of a step
_HANDED_OVER = 0.5  # ms: what a batch from a worker costs at least


def advice_for(trainer: "pl.Trainer", module: nn.Module, device: torch.device, config: ORTConfig) -> list[str]:
    """Return what this run could do better on its GPU, in sentences; nothing on other devices."""
    if device.type != "cuda":
        return []
    try:
        return list(_found(trainer, module, device, config))
    except Exception:  # of a module or a loader unlike all others: advice must not end a run
        log.debug("no advice", exc_info=True)
        return []


def _found(trainer: "pl.Trainer", module: nn.Module, device: torch.device, config: ORTConfig) -> Iterator[str]:
    is_ampere = torch.cuda.get_device_capability(device)[0] >= _AMPERE
    yield from _precision(str(trainer.precision), is_ampere)
    yield from _attention(module)
    yield from _optimizers(trainer.optimizers)
    yield from _memory_format(module)
    yield from _sizes(module)
    yield from _data(trainer.train_dataloader)
    if config.dynamic is True:
        yield "dynamic=True keeps steps from being recorded as CUDA graphs; leave it out if sizes are fixed"


def _precision(precision: str, is_ampere: bool) -> Iterator[str]:
    if not precision.startswith("32") or not is_ampere:
        return
    yield 'this GPU has bfloat16 tensor cores, and the run is in float32; Trainer(precision="bf16-mixed")'
    if not uses_tf32():
        yield 'TF32 is off; where the run stays in float32, Trainer(plugins=[ORTMatmulPrecision("high")])'


def _attention(module: nn.Module) -> Iterator[str]:
    if not torch.backends.cuda.flash_sdp_enabled():
        yield "flash attention is switched off; torch.backends.cuda.enable_flash_sdp(True)"
    config = next((child.config for child in module.modules() if hasattr(child, "config")), None)
    if getattr(config, "_attn_implementation", None) == "eager":  # as Hugging Face's models name it
        yield 'attention is computed step by step; from_pretrained(..., attn_implementation="sdpa") has flash attention'


def _optimizers(optimizers: Iterable[Any]) -> Iterator[str]:
    for optimizer in optimizers:
        known = getattr(optimizer, "defaults", {})
        if "fused" in known and not any(group.get("fused") for group in optimizer.param_groups):
            yield f'{type(optimizer).__name__} is not fused; optim="auto" of the strategy, or fused=True'


def _memory_format(module: nn.Module) -> Iterator[str]:
    weights = [child.weight for child in module.modules() if isinstance(child, nn.Conv2d) and child.groups == 1]
    wide = [weight for weight in weights if weight.shape[1] > 1 and weight.shape[2:].numel() > 1]
    if wide and not any(weight.is_contiguous(memory_format=torch.channels_last) for weight in wide):
        yield "convolutions are in the layout NCHW; module.to(memory_format=torch.channels_last) for tensor cores"


def _sizes(module: nn.Module) -> Iterator[str]:
    odd = [
        f"{name} {tuple(child.weight.shape)}"
        for name, child in module.named_modules()
        if isinstance(child, (nn.Linear, nn.Embedding))
        and any(size % _TILE for size in child.weight.shape if size > _TILE)
    ]
    if odd:
        shown = ", ".join(odd[:_SHOWN]) + (f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else "")
        yield f"sizes that are no multiples of {_TILE}: {shown}; pad the vocabulary, or the width"


def _data(loaders: Any) -> Iterator[str]:
    if any(isinstance(loader, DataLoader) and not loader.pin_memory for loader in tree_leaves(loaders)):
        yield "batches are copied to the GPU while it waits; DataLoader(pin_memory=True)"


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
