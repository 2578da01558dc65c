"""A step of a LightningModule as a function of tensors: what it logs is returned, and there is no Trainer."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_ort.compat.lightning import TRAINER_ATTRIBUTE
from lightning_ort.compat.torch import without_tracing
from lightning_ort.compat.torchmetrics import value_of_batch
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.strategies.capture.shims import Shims

_MANUAL = ("all_gather", "clip_gradients", "lr_schedulers", "manual_backward", "optimizers", "print")
_STEP_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
_NUMBERS = (bool, int, float, str)


class StepFailed(ExportFailed):
    """What a step does cannot be part of a model."""


def check_module(module: nn.Module) -> None:
    """Raise ``StepFailed`` for what a Trainer would do and a model cannot."""
    name = type(module).__name__
    if not hasattr(module, "training_step") or _is_lightnings(type(module), "training_step"):
        raise TypeError(f"{name} has no `training_step`: pass a LightningModule that defines one.")
    if not getattr(module, "automatic_optimization", True):
        raise StepFailed(
            f"{name} uses manual optimization (automatic_optimization=False). Only a step that returns its loss can be"
            " exported."
        )
    for hook in _STEP_HOOKS:
        if not _is_lightnings(type(module), hook):
            raise StepFailed(f"{name} overrides `{hook}`, which would not be part of the model: remove it.")


def _is_lightnings(kind: type, method: str) -> bool:
    found = getattr(kind, method, None)
    return found is None or found.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def defines(module: nn.Module, method: str) -> bool:
    """Whether a user's class has a method of its own."""
    return not _is_lightnings(type(module), method)


class Step:
    """One of a module's steps, such as ``training_step``, called with a batch: returns its loss and what it logs.

    Calling it changes no attribute of the module but its buffers.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, batch: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run it."""
        logged: dict[str, Tensor] = {}
        shims = self._shims(logged)
        with _attributes_kept(self.module, f"{type(self.module).__name__}.{self.name}", self.name == "training_step"):
            shims.install()
            try:
                if defines(self.module, "on_after_batch_transfer"):
                    batch = self.module.on_after_batch_transfer(batch, 0)  # type: ignore[operator]
                function = getattr(self.module, self.name)
                result = function(*(batch, 0, 0)[: _count_of_parameters(function)])
            finally:
                shims.remove()
        return self._loss(result), logged

    def _loss(self, result: Any) -> Tensor | None:
        if isinstance(result, Mapping):
            result = result.get("loss")
        if self.name != "training_step":
            return result if isinstance(result, Tensor) and result.numel() == 1 else None
        if not isinstance(result, Tensor) or result.numel() != 1:
            what = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise StepFailed(f"{self.name} must return a loss of one number, or a dict with it; got {what}.")
        return result.reshape(())

    def _shims(self, logged: dict[str, Tensor]) -> Shims:
        shims = Shims()

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            _note(logged, name, value, copies)

        def log_dict(values: Any, *_: Any, **__: Any) -> None:
            items = values.items() if isinstance(values, Mapping) else ()
            for name, value in items:
                _note(logged, name, value, copies)

        shims.add(self.module, "log", log)
        shims.add(self.module, "log_dict", log_dict)
        for name in _MANUAL:
            if hasattr(self.module, name):
                shims.add(self.module, name, _refusing(f"{self.name} calls self.{name}()"))
        copies: dict[int, Metric] = {}
        for child in self.module.modules():
            if isinstance(child, Metric) and not isinstance(child, MetricCollection):
                copies[id(child)] = metric = _fresh(child)
                shims.add(child, "forward", metric.forward)
                shims.add(child, "update", metric.forward)
                shims.add(child, "compute", metric.compute)
        shims.add(self.module, TRAINER_ATTRIBUTE, _NoTrainer(self.name))
        return shims


def _count_of_parameters(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return 2
    return len([parameter for parameter in parameters if parameter.kind in kinds])


def _fresh(metric: Metric) -> Metric:
    """A copy of a metric whose states are those of no batch; it checks no values, which a graph has not."""
    with without_tracing():
        made = copy.deepcopy(metric)
        made.reset()
    if hasattr(made, "validate_args"):
        made.validate_args = False
    return made


def _note(logged: dict[str, Tensor], name: str, value: Any, copies: Mapping[int, Metric]) -> None:
    if isinstance(value, MetricCollection):
        for key, metric in value.items():
            _note(logged, key, metric, copies)
        return
    if isinstance(value, Metric):
        value = value_of_batch(copies.get(id(value), value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            _note(logged, f"{name}_{key}" if name else str(key), item, copies)
        return
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise StepFailed(f"self.log({name!r}, ...): the value must be one number; got {type(value).__name__}.")
    logged[name] = value.detach().reshape(()).to(torch.float32)


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise StepFailed(f"{what}, which a model cannot do.")

    return refuse


class _NoTrainer:
    """In place of the Trainer, whose counters would become constants of the model."""

    training = is_global_zero = True
    sanity_checking = testing = validating = predicting = False
    world_size, global_rank, local_rank, num_devices, num_nodes = 1, 0, 0, 1, 1
    loggers: tuple[Any, ...] = ()
    logger = None

    def __init__(self, step: str) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        raise StepFailed(f"{self._step} reads trainer.{name}, which would be a constant of the model.")


@contextmanager
def _attributes_kept(module: nn.Module, step: str, refuses: bool) -> Iterator[None]:
    """Undo what a step does to plain attributes; refuse it if it counts on them."""
    before = [(child, dict(vars(child))) for child in module.modules()]
    lists = [(value, list(value)) for _, values in before for value in values.values() if type(value) is list]
    changed: list[str] = []
    try:
        yield
    finally:
        for child, values in before:
            now = vars(child)
            for name in {*now, *values}:
                if now.get(name, None) is not values.get(name, None):
                    if name.startswith("_") and isinstance(now.get(name), bool):
                        continue  # that something has been installed, as in transformers
                    if isinstance(now.get(name), _NUMBERS) or isinstance(values.get(name), _NUMBERS):
                        changed.append(f"{type(child).__name__}.{name}")
                    if name in values:
                        now[name] = values[name]
                    else:
                        del now[name]
        for value, items in lists:
            if len(value) != len(items):
                value[:] = items
    if changed and refuses:
        raise StepFailed(
            f"{step} changes {', '.join(sorted(changed))}, which a model cannot hold: register it as a buffer, a tensor"
            " that the step writes to in place."
        )
