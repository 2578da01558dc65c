"""The steps of a LightningModule that become models: functions of tensors, which return what they log."""

import copy
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_ort._imports import is_inherited
from lightning_ort._shims import Shims
from lightning_ort.compat.lightning import TRAINER_ATTRIBUTE
from lightning_ort.compat.step_trace import note_forward
from lightning_ort.compat.torch import tree_map
from lightning_ort.compat.torch_graphs import without_tracing
from lightning_ort.compat.torchmetrics import keywords_of, value_of_batch
from lightning_ort.compiler.graphs.nodes import reached
from lightning_ort.onnx_export.export import modes_kept
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.signature import bind_sample, mapped, named_inputs, named_outputs
from lightning_ort.onnx_export.training.batch import chosen_sizes, of_distinct_sizes, rebuilt
from lightning_ort.onnx_export.training.state import Restored, check_repeats, python_kept
from lightning_ort.onnx_export.training.tracing import Sizes, Trace, trace

log = logging.getLogger(__name__)

_MANUAL = ("all_gather", "clip_gradients", "lr_schedulers", "manual_backward", "optimizers", "print")
TRANSFER_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
_ONCE_AN_UPDATE = ("on_before_zero_grad", "on_before_optimizer_step")
_STEP_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
# numbers of batches: a model is traced with the first, and compared with a module that gets the others in turn
_TRACED, _COMPARED = 0, (1, 1_000_003)


def check_module(module: nn.Module, accumulate: int = 1) -> None:
    """Raise ``ExportFailed`` for what a Trainer would do and a model cannot."""
    name = type(module).__name__
    if not defines(module, "training_step"):
        raise TypeError(f"{name} has no `training_step`: pass a LightningModule that defines one.")
    if not getattr(module, "automatic_optimization", True):
        raise ExportFailed(
            f"{name} uses manual optimization (automatic_optimization=False). Only a step that returns its loss can be"
            " exported."
        )
    for hook in _STEP_HOOKS:
        if defines(module, hook):
            raise ExportFailed(f"{name} overrides `{hook}`, which would not be part of the model: remove it.")
    for hook in _ONCE_AN_UPDATE if accumulate > 1 else ():
        if defines(module, hook):
            raise ExportFailed(
                f"{name} overrides `{hook}`, which a Trainer calls before an update, and a model in each batch: do it"
                f" in `training_step`, or export without accumulate_grad_batches={accumulate}."
            )


def defines(module: nn.Module, method: str) -> bool:
    """Whether a user's class has a method of its own."""
    found = getattr(type(module), method, None)
    return found is not None and not is_inherited(found)


class Step:
    """One of a module's steps, such as ``training_step``, called with a batch: returns its loss and what it logs.

    Hooks get what Lightning would pass them: the optimizer. The loss is divided by ``accumulate``, as Lightning would.
    The number of the batch, which a model does not know, is another one in each call.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        optimizer: torch.optim.Optimizer | None = None,
        accumulate: int = 1,
        number: int = _TRACED,
    ) -> None:
        self.module, self.name = module, name
        self._optimizer, self._accumulate = optimizer, accumulate
        self._outputs: dict[str, Any] = {}  # what Lightning passes on of a training step
        self._numbers = itertools.chain((number,), itertools.cycle(_COMPARED))

    def __call__(self, batch: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run it, with the backward pass of its loss if it is a ``training_step``, and the hooks around it."""
        logged: dict[str, Tensor] = {}
        self._given: dict[str, Any] = {}
        self._returned: Any = None
        shims, number = self._shims(logged), next(self._numbers)
        trains = self.name == "training_step"
        shims.install()
        try:
            for hook in TRANSFER_HOOKS:
                batch = self._hook(hook, batch, 0)
            answer = self._hook("on_train_batch_start", batch, number) if trains else None
            if type(answer) is int and answer == -1:
                raise ExportFailed("on_train_batch_start returns -1, which ends an epoch: a model has none.")
            function, before = getattr(self.module, self.name), self._with_gradients()
            result = function(*(batch, number, 0)[: _count_of_parameters(function)])
            if trains and self._accumulate > 1 and self._with_gradients() - before:
                raise ExportFailed(
                    f"{self.name} calls backward itself: a Trainer adds such gradients to those of the loss in some"
                    " batches of an accumulation alone. Pass accumulate_grad_batches=1, or use torch.autograd.grad."
                )
            loss = self._loss(result)
            if trains:
                assert loss is not None
                self._backward(loss)
                loss = loss.detach().to(torch.float32)
                others = result if isinstance(result, Mapping) else {}
                self._outputs = tree_map(_detached, {**others, "loss": loss})
            if self._given.get("loss") is self._returned:  # as most do
                logged.pop("loss", None)
        finally:
            shims.remove()
        return loss, logged

    def end(self, batch: Any) -> None:
        """Call the hook after the update with what the last call returned."""
        self._given = {}
        shims = self._shims({})
        shims.install()
        try:
            self._hook("on_train_batch_end", self._outputs, batch, 0)
        finally:
            shims.remove()

    def _with_gradients(self) -> set[nn.Parameter]:
        return {parameter for parameter in self.module.parameters() if parameter.grad is not None}

    def _backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ExportFailed(f"{self.name} returns a loss that no parameter has a part in.")
        scaled = loss / self._accumulate if self._accumulate > 1 else loss
        self._hook("on_before_zero_grad", self._optimizer)
        # as zero_grad: the step may have called backward itself
        for parameter in self.module.parameters() if self._accumulate == 1 else ():
            parameter.grad = None
        self._hook("on_before_backward", scaled)
        note_forward(scaled)
        scaled.backward()
        self._hook("on_after_backward")
        self._hook("on_before_optimizer_step", self._optimizer)

    def _hook(self, name: str, *args: Any) -> Any:
        """Call a hook that the user's class defines; without one, return its first argument."""
        if not defines(self.module, name):
            return args[0] if args else None
        return getattr(self.module, name)(*args)

    def _loss(self, result: Any) -> Tensor | None:
        if isinstance(result, Mapping):
            result = result.get("loss")
        self._returned = result
        if self.name != "training_step":
            return result if isinstance(result, Tensor) and result.numel() == 1 else None
        if not isinstance(result, Tensor) or result.numel() != 1:
            what = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ExportFailed(f"{self.name} must return a loss of one number, or a dict with it; got {what}.")
        return result.reshape(())

    def _shims(self, logged: dict[str, Tensor]) -> Shims:
        shims = Shims()

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            self._given[name] = value
            _note(logged, name, value, copies)

        def log_dict(values: Any, *_: Any, **__: Any) -> None:
            for name, value in _items(values):
                log(name, value)

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
            elif isinstance(child, MetricCollection):
                shims.add(child, "update", partial(_update_each, child))
        shims.add(self.module, TRAINER_ATTRIBUTE, _NoTrainer(self.name))
        return shims


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


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


def _update_each(metrics: MetricCollection, *args: Any, **kwargs: Any) -> None:
    """Update each metric by itself: which of them share their states is found out by values, which a graph has not."""
    for _, metric in _items(metrics):
        metric.update(*args, **keywords_of(metric, kwargs))


def _items(values: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(values, MetricCollection):
        return values.items(copy_state=False)  # states would be copied, as tensors of the graph that is traced
    return values.items() if isinstance(values, Mapping) else ()


def _note(logged: dict[str, Tensor], name: str, value: Any, copies: Mapping[int, Metric]) -> None:
    if isinstance(value, MetricCollection):
        for key, metric in _items(value):
            _note(logged, key, metric, copies)
        return
    if isinstance(value, Metric):
        value = value_of_batch(copies.get(id(value), value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            _note(logged, f"{name}_{key}" if name else str(key), item, copies)
        return
    if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = torch.full((), float(value) if isinstance(value, (bool, int)) else value, dtype=torch.float32)  # type: ignore[arg-type]
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ExportFailed(f"self.log({name!r}, ...): the value must be one number; got {type(value).__name__}.")
    logged[name] = value.detach().reshape(()).to(torch.float32, copy=True)  # it may be written to later


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ExportFailed(f"{what}, which a model cannot do.")

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
        raise ExportFailed(f"{self._step} reads trainer.{name}, which would be a constant of the model.")


def traces_of(
    module: nn.Module,
    batch: Any,
    fields: Mapping[str, Tensor],
    sizes: Sizes,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
    means: bool = False,
) -> dict[str, Trace]:
    """Trace the steps that a module, as it is to be trained, has, by the model; ``means``: for what dropout draws."""

    def step(method: str) -> Trace:
        run = Step(module, method, optimizer, accumulate)

        def call(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            loss, logged = run(rebuilt(batch, values))
            others = {f"logged/{key}": value for key, value in logged.items()}
            if loss is None:
                return others
            return {"loss": loss, **others} if method == "training_step" else {"logged/loss": loss, **others}

        def again(number: int) -> None:
            one = Step(module, method, optimizer, accumulate, number)
            one(rebuilt(batch, fields))
            one.end(rebuilt(batch, fields))

        def end(values: Mapping[str, Tensor]) -> None:
            run.end(rebuilt(batch, values))
            if defines(module, "validation_step"):  # which may run between two steps
                with Restored(module, gradients=True), modes_kept(module), torch.no_grad():
                    module.eval()
                    Step(module, "validation_step")(rebuilt(batch, fields))

        what = f"{type(module).__name__}.{method}"
        trains = method == "training_step"
        with python_kept(module):
            found = trace(module, call, fields, sizes, what, gradients=trains, means=means)
        if trains:
            found.end = end
            check_repeats(again, module, what)
        return found

    found = {"training": step("training_step")}
    with modes_kept(module):
        module.eval()
        if defines(module, "validation_step"):
            found["evaluation"] = step("validation_step")
            _refuse_written(found)
        if (bound := _forward_arguments(module, batch)) is not None:
            found["prediction"] = _forward_trace(module, bound, means)
    return found


def _refuse_written(traces: Mapping[str, Trace]) -> None:
    """Raise :class:`ExportFailed` if validation writes to a tensor that makes a difference to what models return."""
    evaluation, training = traces["evaluation"], traces["training"]
    of_results = reached(evaluation.results.values(), lambda node: node.all_input_nodes)
    read = {name for name, node in evaluation.state.items() if node in of_results}
    read |= {name for name, node in training.state.items() if node.users}
    if found := sorted(read & evaluation.written.keys()):
        raise ExportFailed(
            f"{evaluation.what} writes to {', '.join(found)}, which evaluation.onnx does not: do it in `training_step`."
        )


def _forward_arguments(module: nn.Module, batch: Any) -> inspect.BoundArguments | None:
    """Return arguments for ``forward``: the module's example, or what of the batch fits."""
    if not defines(module, "forward") or type(module).forward is nn.Module.forward:
        return None
    sample = getattr(module, "example_input_array", None)
    if sample is None:
        parameters = inspect.signature(module.forward).parameters.values()
        needed = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
        if isinstance(batch, Mapping):
            known = {parameter.name for parameter in parameters}
            sample = {key: value for key, value in batch.items() if key in known}
        else:
            parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
            sample = parts[: max(len(needed), 1)]
    try:
        bound = bind_sample(module, sample)
        with torch.no_grad():
            named_outputs(module(*bound.args, **bound.kwargs), named_inputs(bound))
    except Exception as error:  # the user's code, with a guess
        log.info("%s.forward is not exported: %s", type(module).__name__, str(error).partition("\n")[0])
        return None
    return bound


def _forward_trace(module: nn.Module, bound: inspect.BoundArguments, means: bool) -> Trace:
    fields = of_distinct_sizes(named_inputs(bound))
    names = list(fields)

    def call(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = iter([values[name] for name in names])
        arguments = mapped(bound, lambda _: next(given))
        return named_outputs(module(*arguments.args, **arguments.kwargs), names)[1]

    what = f"{type(module).__name__}.forward"
    with python_kept(module):
        return trace(module, call, fields, chosen_sizes(fields, None), what, gradients=False, means=means)
