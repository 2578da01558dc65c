"""Whether a run may be lean: only where all that is replaced is as it was when this was written."""

from collections.abc import Iterator
from typing import Any

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning_loops import MODULE_INTERNALS, parts_of, stock_parts
from lightning_ort.compat.lightning_sources import unknown_function


def unknown_release(namespace: LightningNamespace) -> str:
    """Return why no run of a namespace may be lean, or nothing."""
    if name := unknown_function(namespace):
        return f"{namespace.package}.{name} is not as in the releases 2.5.0 to 2.6.6"
    return ""


def reason_against(namespace: LightningNamespace, trainer: Any, strategy: Any) -> str:
    """Return why a run is Lightning's own, or nothing."""
    return next(_reasons(namespace, trainer, strategy), "")


def _reasons(namespace: LightningNamespace, trainer: Any, strategy: Any) -> Iterator[str]:
    if type(trainer.profiler) is not namespace.submodule("profilers").PassThroughProfiler:
        yield "a profiler sees each call"
    stock_strategy: Any = namespace.submodule("strategies.strategy").Strategy
    if type(strategy).post_training_step is not stock_strategy.post_training_step:
        yield f"{type(strategy).__name__} overrides post_training_step"
    base = namespace.submodule("trainer.trainer").Trainer
    for name, value in vars(base).items():
        if isinstance(value, property) and getattr(type(trainer), name) is not value:
            yield f"{type(trainer).__name__} overrides {name}"
    for part, stock in zip(parts_of(trainer), stock_parts(namespace), strict=True):
        if type(part) is not stock:
            yield f"{type(part).__name__} is a class of its own"
    module = namespace.submodule("core.module").LightningModule
    for name in MODULE_INTERNALS:
        if getattr(type(strategy.lightning_module), name) is not getattr(module, name):
            yield f"{type(strategy.lightning_module).__name__} overrides {name}"
    if release := unknown_release(namespace):
        yield release
