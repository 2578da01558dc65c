"""The steps of a module that become models."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ort.compiler.running.eager_runs import versions_of
from lightning_ort.onnx_export.failure import ExportFailed, explain
from lightning_ort.onnx_export.signature import bind_sample, mapped, named_inputs, named_outputs
from lightning_ort.onnx_export.training.batch import rebuilt
from lightning_ort.onnx_export.training.sizes import chosen_sizes, of_distinct_sizes
from lightning_ort.onnx_export.training.steps import Step, StepFailed, attributes_kept, defines
from lightning_ort.onnx_export.training.tracing import Sizes, Trace, trace
from lightning_ort.onnx_export.training.values import Restored

log = logging.getLogger(__name__)

METHODS = {"training": "training_step", "prediction": "forward", "evaluation": "validation_step"}


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
    name = type(module).__name__

    def step(method: str) -> Trace:
        run = Step(module, method, optimizer, accumulate)

        def call(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            loss, logged = run(rebuilt(batch, values))
            others = {f"logged/{key}": value for key, value in logged.items()}
            if loss is None:
                return others
            return {"loss": loss, **others} if method == "training_step" else {"logged/loss": loss, **others}

        what = f"{name}.{method}"
        trains = method == "training_step"
        with attributes_kept(module, what if trains else None):
            found = trace(module, call, fields, sizes, what, gradients=trains, means=means)
        if trains:
            found.end = lambda values: run.end(rebuilt(batch, values))
        return found

    found = {"training": step("training_step")}
    if defines(module, "on_train_batch_end"):
        _refuse_late_writes(Step(module, "training_step", optimizer, accumulate), rebuilt(batch, fields))
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        if defines(module, "validation_step"):
            found["evaluation"] = step("validation_step")
        if (bound := _forward_arguments(module, batch)) is not None:
            found["prediction"] = _forward_trace(module, bound, means)
    finally:
        for child, training in modes:
            child.training = training
    return found


def _refuse_late_writes(step: Step, batch: Any) -> None:
    """Raise :class:`StepFailed` if ``on_train_batch_end`` writes to a tensor of the module."""
    module = step.module
    what = f"{type(module).__name__}.on_train_batch_end"

    def tensors() -> dict[str, Tensor]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    with attributes_kept(module), Restored(module, gradients=True), torch.random.fork_rng([]):
        try:
            step(batch)
            before = {name: (one, versions_of([one]), one.detach().clone()) for name, one in tensors().items()}
            step.end(batch)
        except ExportFailed:
            raise
        except Exception as error:  # the user's code
            raise ExportFailed(f"{what} cannot be run: {explain(error)}") from error
        now = tensors()
        written = [
            name
            for name, (one, versions, value) in before.items()
            if now.get(name) is not one or versions_of([one]) != versions or not torch.equal(one, value)
        ]
    if written:
        raise StepFailed(
            f"{what} writes to {', '.join(written)} after the update, which a model does not: do it in"
            " `training_step` or `on_before_zero_grad`."
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
    with attributes_kept(module):
        return trace(module, call, fields, chosen_sizes(fields, None), what, gradients=False, means=means)
