"""Private names of Lightning's loops (2.5, 2.6), for :mod:`lightning_ort.strategies.lean`."""

import functools
import logging
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning import AFTER_CLOSURE, logger_connector
from lightning_ort.compat.torch import next_batch

CURRENT_HOOK = "_current_fx_name"  # of a LightningModule: which hook or step of it runs
# of a logger connector: the metrics that people read, and what `shown` calls them
DICTIONARIES = {"_progress_bar_metrics": "pbar", "_callback_metrics": "callback", "_logged_metrics": "log"}
OF_BAR, OF_CALLBACKS, OF_LOGGERS = DICTIONARIES
RESTARTING = "_restarting"  # of a loop: whether it goes on in the middle
BY_TIME = "_val_check_time_interval"  # of a Trainer: the seconds after which it validates, if any
# attributes of a LightningModule that Lightning calls itself, and nobody else is to override
MODULE_INTERNALS = ("_on_before_batch_transfer", "_apply_batch_transfer_handler", "_call_batch_hook")

current_results: Callable[[Any], Any] = operator.attrgetter("_results")  # what the loop that runs logs to


def current_batch(trainer: Any) -> Any:
    """Return the batch whose size is that of what is logged now."""
    return getattr(current_results(trainer), "batch", None)


def after_closure(precision: Any, module: Any, optimizer: Any) -> None:
    """Call the hooks between a backward pass and the optimizer's step, and clip."""
    getattr(precision, AFTER_CLOSURE)(module, optimizer)


def says_each_call(namespace: LightningNamespace) -> Callable[[], bool]:
    """Return a function that tells whether Lightning logs each call of a hook now."""
    log: logging.Logger = namespace.submodule("trainer.call").log
    return functools.partial(log.isEnabledFor, logging.DEBUG)


def transfer_batch(trainer: Any, call: Any, batch: Any, dataloader_idx: int) -> Any:
    """Move a batch to the device with all hooks, by Lightning's own code; ``call`` is its module of that name."""
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)


def step_values(results: Any) -> "tuple[list[Any], list[Any], Any, Any] | None":
    """Return what this step logged: metadata, values, collection, number of the loader; ``None`` if hidden."""
    metas, values, loader = [], [], results.dataloader_idx
    for item in results.values():
        meta, value = item.meta, item._forward_cache
        if meta.on_step and value is not None and not item.has_reset and meta.dataloader_idx == loader:
            if not isinstance(value, torch.Tensor) or (meta.prog_bar and value.numel() != 1):
                return None
            metas.append(meta)
            values.append(value)
    return metas, values, results, loader


def shown(kept: "tuple[list[Any], list[Any], Any, Any]") -> Any:
    """Return Lightning's dictionaries of what :func:`step_values` returned."""
    metas, values, results, loader = kept
    then = type(results)(results.training)
    then.dataloader_idx = loader
    for number, (meta, value) in enumerate(zip(metas, values, strict=True)):
        then[str(number)] = SimpleNamespace(meta=meta, _forward_cache=value, has_reset=False)
    return then.metrics(on_step=True)


def step_schedulers(strategy: Any) -> list[bool]:
    """Return for each scheduler that is asked after each step whether it only counts."""
    own, configs = torch.optim.lr_scheduler.__name__, strategy.lr_scheduler_configs
    return [
        type(config.scheduler).__module__ == own and not config.reduce_on_plateau
        for config in configs
        if config.interval == "step"
    ]


def idle_hooks(
    namespace: LightningNamespace,
) -> dict[tuple[type, Any], Callable[[Any, Any], tuple[float, float] | None]]:
    """Return hooks around batches that are not always needed.

    By class and function: from the callback and the Trainer, in how many of the next batches, and for how many seconds,
    they do nothing; ``None`` if only they know.
    """
    callbacks = namespace.submodule("callbacks")

    def saves(checkpoint: Any, trainer: Any) -> tuple[float, float] | None:
        if checkpoint._train_time_interval is not None:
            return None
        if (every := checkpoint._every_n_train_steps) < 1:
            return math.inf, math.inf
        done = trainer.global_step % every
        # after an update it looks again in each batch whose gradients wait for the next one
        return (0 if not done and trainer.accumulate_grad_batches > 1 else every - done - 1), math.inf

    def stops(timer: Any, trainer: Any) -> tuple[float, float]:
        if timer._interval != "step" or timer._duration is None:
            return math.inf, math.inf
        return math.inf, timer._duration - timer.time_elapsed()

    def waits(callback: Any, trainer: Any) -> tuple[float, float]:
        return math.inf, math.inf

    bars, stages = (callbacks.TQDMProgressBar, callbacks.RichProgressBar), ("validation", "test", "predict")
    found = {
        # it looks where loggers do, and bars where another loader begins: before both a window ends
        (callbacks.LearningRateMonitor, "on_train_batch_start"): waits,
        **{(bar, f"on_{stage}_batch_start"): waits for bar in bars for stage in stages},
        (callbacks.ModelCheckpoint, "on_train_batch_end"): saves,
        (callbacks.Timer, "on_train_batch_end"): stops,
    }
    return {(kind, vars(kind).get(name)): idle for (kind, name), idle in found.items()}


def parts_of(trainer: Any) -> list[Any]:
    """Return the objects of a Trainer that run its batches."""
    fit = trainer.fit_loop
    epoch = fit.epoch_loop
    evaluations = [epoch.val_loop, trainer.validate_loop, trainer.test_loop]
    optimizations = [epoch.automatic_optimization, epoch.manual_optimization]
    return [fit, epoch, *optimizations, *evaluations, trainer.predict_loop, logger_connector(trainer)]


def stock_parts(namespace: LightningNamespace) -> list[Any]:
    """Return the classes of :func:`parts_of`."""
    loops, optimizations = namespace.submodule("loops"), namespace.submodule("loops.optimization")
    connector = namespace.submodule("trainer.connectors.logger_connector")._LoggerConnector
    evaluations = [loops._EvaluationLoop] * 3
    kinds = [optimizations._AutomaticOptimization, optimizations._ManualOptimization]
    return [loops._FitLoop, loops._TrainingEpochLoop, *kinds, *evaluations, loops._PredictionLoop, connector]


def stock_fetcher(namespace: LightningNamespace) -> Any:
    """Return the class of what fetches batches for steps."""
    return namespace.submodule("loops.fetchers")._PrefetchDataFetcher


def only_loader(fetcher: Any, loaders: Any) -> Any:
    """Return what iterates over the only loader of a fetcher that is not done, or over one after the other.

    ``None`` if it is neither, or if the next loader is due.
    """
    combined = fetcher.iterator
    if combined.__class__ is not loaders.CombinedLoader or fetcher.done:
        return None
    cycle = combined._iterator
    if cycle.__class__ is loaders._Sequential:
        is_due = cycle.iterators and (cycle.limits is None or cycle.limits[cycle._iterator_idx] > cycle._idx)
        return cycle if is_due else None
    is_only = cycle.__class__ is loaders._MaxSizeCycle and len(cycle.iterators) == 1
    return cycle if is_only and combined._iterables is combined._flattened[0] else None


def next_of_only(cycle: Any) -> Any:
    """Return the next batch of what :func:`only_loader` returned, its number, and that of the loader."""
    loader = vars(cycle).get("_iterator_idx")
    try:
        batch = next_batch(cycle.iterators[0])
    except StopIteration:
        if loader is not None:
            cycle._use_next_iterator()
            return next(cycle)
        cycle._consumed[0] = True
        raise
    number = cycle._idx
    cycle._idx += 1
    return batch, number, loader or 0


class KnownMetric:
    """One metric of a collection, and the call of ``log`` that it comes from."""

    def __init__(self, results: Any, key: str, value: Any) -> None:
        self._results, self._key, self._item = results, key, results[key]
        is_tensor = self._item.is_tensor
        self.metric = None if is_tensor else value
        self.device = self._item.value.device if is_tensor else value.device
        self._update = vars(type(self._item))["update"]
        meta = self._item.meta
        # in one process the value of a step is only kept; what syncs is made anew if that changes
        sync = meta.sync.__call__ if is_tensor and meta.on_step and not meta.on_epoch else None
        self._keeps = sync if getattr(sync, "func", None) is type(meta.sync).no_op else None

    def is_in(self, results: Any) -> bool:
        """Return whether it is still part of a collection."""
        return self._results is results and results.get(self._key) is self._item

    def update(self, value: Any, batch_size: int | None) -> None:
        """Do what a call of ``log`` with another value does."""
        item, results, state = self._item, self._results, self._item.__dict__
        keeps = self._keeps is not None and value.dtype is torch.float32 and item.meta.sync.__call__ is self._keeps
        if not keeps:
            batch_size = results._extract_batch_size(item, batch_size, item.meta)
        # as torchmetrics does around it
        state["_computed"] = None
        state["_update_count"] += 1
        if keeps:
            state["_forward_cache"] = state["value"] = value.clone()
        else:
            self._update(item, value, batch_size)
        state["has_reset"] = False


def known_metric(results: Any, hook: str, name: str, value: Any, add_loader: bool) -> KnownMetric | None:
    """Return the metric that a call of ``log`` from a hook has made or updated, if later calls may update it alone."""
    key = f"{hook}.{name}"
    if add_loader and results.dataloader_idx is not None:
        key += f".{results.dataloader_idx}"
    item = results.get(key)
    if item is None or item.meta.enable_graph or item.meta.reduce_fx in (max, min):  # those keep the tensor itself
        return None
    return KnownMetric(results, key, value)
