"""What a run on a GPU leaves unused: :func:`advice_for`, for the report.

What pays most comes first. Each piece of advice says what to do; nothing is changed.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ort.compat.torch import tree_map
from lightning_ort.config import ORTConfig

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

_TILE = 64  # elements: tensor cores compute with blocks of this width, and a part of one takes as long
_AMPERE = 8  # compute capability 8.0, the first with bfloat16 and TF32
_SHOWN = 3


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
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        yield 'TF32 is off; where the run stays in float32, Trainer(plugins=[ORTMatmulPrecision("high")])'


def _attention(module: nn.Module) -> Iterator[str]:
    if not torch.backends.cuda.flash_sdp_enabled():
        yield "flash attention is switched off; torch.backends.cuda.enable_flash_sdp(True)"
    # as Hugging Face's models name it
    if getattr(_config_of(module), "_attn_implementation", None) == "eager":
        yield 'attention is computed step by step; from_pretrained(..., attn_implementation="sdpa") has flash attention'


def _config_of(module: nn.Module) -> Any:
    return next((child.config for child in module.modules() if hasattr(child, "config")), None)


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
    found: list[Any] = []
    tree_map(found.append, loaders)
    if any(isinstance(loader, DataLoader) and not loader.pin_memory for loader in found):
        yield "batches are copied to the GPU while it waits; DataLoader(pin_memory=True)"
