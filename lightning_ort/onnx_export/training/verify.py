"""Some steps of an exported folder in onnxruntime, compared with the module's in PyTorch."""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ort.compat.onnxruntime import import_onnxruntime
from lightning_ort.compat.torch import TorchDispatchMode
from lightning_ort.compiler.reproducer_script import largest_difference
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.models import Settings
from lightning_ort.onnx_export.training.steps import Step

aten = torch.ops.aten
_BERNOULLI = (aten.bernoulli.p, aten.bernoulli.Tensor, aten.bernoulli_.float, aten.bernoulli_.Tensor)
STEPS = 3
Batch = tuple[Any, Mapping[str, Tensor]]  # as the module takes it, and by field


@dataclass(frozen=True)
class Difference:
    """How far onnxruntime's numbers are from PyTorch's after some steps, see :func:`largest_difference`."""

    loss: float
    state: float


class MeanDraws(TorchDispatchMode):
    """Within the block dropout passes its input on: what it draws is always the mean."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is aten.bernoulli.default:
            return args[0].clone()
        if func in _BERNOULLI:
            chance = args[1] if len(args) > 1 else 0.5
            result = args[0] if func in (aten.bernoulli_.float, aten.bernoulli_.Tensor) else torch.empty_like(args[0])
            return result.copy_(chance) if isinstance(chance, Tensor) else result.fill_(chance)
        return func(*args, **(kwargs or {}))


class Reference:
    """The module's own training, on copies of its parameters and buffers."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: Settings,
        dtype: torch.dtype = torch.float32,
        halved: Collection[str] = (),
    ) -> None:
        def taken(tensor: Tensor, name: str = "") -> Tensor:
            kept = tensor.detach().half() if name in halved else tensor.detach().clone()
            return kept.to(dtype if tensor.is_floating_point() else tensor.dtype)

        self.module, self.settings, self.dtype = module, settings, dtype
        self.values: dict[str, Tensor] = {
            name: taken(value, name).requires_grad_(value.requires_grad) for name, value in module.named_parameters()
        }
        self.buffers = {name: taken(value) for name, value in module.named_buffers()}
        self.optimizer = None if optimizer is None else self._copied(optimizer)
        self.pending, self.failed = 0, False

    def _copied(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        groups = [
            {**group, "params": [self.values[names[id(parameter)]] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        for group in groups:
            group.update(dict.fromkeys(("fused", "foreach"), None) | {"lr": float(group["lr"])})
        kind: Any = type(optimizer)
        made = kind([{k: v for k, v in group.items() if k != "decoupled_weight_decay"} for group in groups])
        for parameter, state in optimizer.state.items():
            made.state[self.values[names[id(parameter)]]] = {
                key: value.detach().clone().to(self.dtype if value.dim() else value.dtype)
                if isinstance(value, Tensor)
                else value
                for key, value in copy.copy(state).items()
            }
        return made

    def step(self, batch: Any) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        """Train on a batch; return the loss, what is logged and the gradients, as they are after clipping."""
        run = _Called(self.module, Step(self.module, "training_step"), self.settings.accumulate)
        loss, logged = functional_call(
            run, {f"module.{name}": value for name, value in (self.values | self.buffers).items()}, (batch,)
        )
        trained = {name: value for name, value in self.values.items() if value.requires_grad}
        self.pending += 1
        gradients: dict[str, Tensor] = {}
        if self.optimizer is None or self.pending >= self.settings.accumulate:
            self._clip(list(trained.values()))
            gradients = {name: value.grad.clone() for name, value in trained.items() if value.grad is not None}
            if self.optimizer is not None:
                self.optimizer.step()
            for value in trained.values():
                value.grad = None
            self.pending = 0
        return loss.item(), {name: value.item() for name, value in logged.items()}, gradients

    def _clip(self, values: list[Tensor]) -> None:
        limit = self.settings.clip_value
        if limit is None:
            return
        if self.settings.clip_algorithm == "norm":
            nn.utils.clip_grad_norm_(values, limit)
        else:
            nn.utils.clip_grad_value_(values, limit)

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and states, called as in a folder."""
        found = {**self.values, **self.buffers}
        if self.optimizer is not None:
            for name, value in self.values.items():
                for key, state in self.optimizer.state.get(value, {}).items():
                    if isinstance(state, Tensor) and state.shape == value.shape and key != "step":
                        found[f"{key}/{name}"] = state
        return {name: value.detach() for name, value in found.items()}


class _Called(nn.Module):
    """A step and its backward pass, in which checkpointed parts run again with the same parameters."""

    def __init__(self, module: nn.Module, step: Step, accumulate: int) -> None:
        super().__init__()
        self.module = module
        self._step, self._accumulate = step, accumulate

    def forward(self, batch: Any) -> Any:
        loss, logged = self._step(batch)
        assert loss is not None
        (loss / self._accumulate).backward()
        return loss.detach(), logged


def verify(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Settings,
    batches: list[Batch],
    tolerance: float,
    halved: Collection[str] = (),
) -> Difference:
    """Compare steps of a folder, whose model drops nothing, with the module's.

    Args:
        folder: The folder.
        module: The module.
        optimizer: Its optimizer, which is not changed.
        settings: What the folder was exported with.
        batches: Batches, each as the module takes it and by field.
        tolerance: The largest difference of losses and states.
        halved: The frozen parameters that it has in float16; they are compared with a module that has them so too.

    Raises:
        ExportFailed: If there is a larger one. PyTorch's own error, its difference from float64, is allowed for: Adam
            makes a step of a gradient that is zero but for rounding.

    """
    import_onnxruntime()
    try:
        training = runner.Training.load(folder)
    except runner.TrainingError as error:
        raise ExportFailed(f"The exported model is not valid: {error}") from error
    with _as_exported():
        single, double = (
            Reference(module, optimizer, settings, dtype, halved) for dtype in (torch.float32, torch.float64)
        )
        loss = 0.0
        for batch, fields in batches:
            loss = max(loss, _step(training, single, double, batch, fields, tolerance))
        exact = single if double.failed else double
        state = _compare_states(training, single.state(), exact.state(), tolerance)
    return Difference(loss, state)


def rounding(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Settings,
    batches: list[Batch],
    halved: Collection[str],
) -> Difference:
    """How far steps of the module are from its own if these parameters are rounded to float16."""
    with _as_exported():
        own, rounded = (Reference(module, optimizer, settings, halved=names) for names in ((), halved))
        losses = [(own.step(batch)[0], rounded.step(batch)[0]) for batch, _ in batches]
    loss = max(largest_difference(torch.tensor(got), torch.tensor(expected)) for expected, got in losses)
    expected = own.state()
    state = max(
        largest_difference(value, expected[name]) for name, value in rounded.state().items() if name not in halved
    )
    return Difference(loss, state)


@contextmanager
def _as_exported() -> Iterator[None]:
    with MeanDraws(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng([]):
        yield


def _step(
    training: runner.Training, single: Reference, double: Reference, batch: Any, fields: Any, tolerance: float
) -> float:
    name = f"{type(single.module).__name__}.training_step"
    sizes = ", ".join(f"{field} {list(value.shape)}" for field, value in fields.items())
    expected, logged, gradients = single.step(batch)
    exact, exact_gradients = expected, gradients
    if not double.failed:
        try:
            exact, _, exact_gradients = double.step(_in_float64(batch))
        except Exception:  # a module that names float32 itself, where nothing is allowed for then
            double.failed = True
    try:
        got = training.step({field: value.detach().cpu().numpy() for field, value in fields.items()})
    except Exception as error:  # onnxruntime's own classes
        raise ExportFailed(f"{name}({sizes}) fails as a model: {error}") from error
    largest = 0.0
    for key, value in {"loss": expected, **logged}.items():
        own = abs(expected - exact) if key == "loss" else 0.0
        difference = largest_difference(torch.tensor(got[key]), torch.tensor(value, dtype=torch.float64).float())
        if not difference <= tolerance + 10 * own:
            raise ExportFailed(
                f"{name}({sizes}): the exported model's {key!r} is {got[key]:.7g}, the module's {value:.7g}; allowed is"
                f" a difference of {tolerance:.3g}. The step must not depend on random numbers other than dropout's, or"
                " on state that is in no buffer."
            )
        largest = max(largest, difference)
    if training.gradients:
        found = {key: torch.from_numpy(value) for key, value in training.gradients.items()}
        _compare(found, gradients, exact_gradients, tolerance, "gradient of ")
    return largest


def _in_float64(batch: Any) -> Any:
    from lightning_ort.onnx_export.training.batch import fields_of, rebuilt

    fields = fields_of(batch)
    return rebuilt(
        batch, {name: value.double() if value.is_floating_point() else value for name, value in fields.items()}
    )


def _compare_states(training: runner.Training, single: Any, double: Any, tolerance: float) -> float:
    got = {name: torch.from_numpy(array) for name, array in training.state.items() if name in single}
    return _compare(got, single, double, tolerance, "")


def _compare(got: Any, single: Any, double: Any, tolerance: float, what: str) -> float:
    largest = 0.0
    for name, value in got.items():
        if name not in single:
            continue
        difference = largest_difference(value, single[name])
        own = largest_difference(single[name].double(), double[name].double()) if value.is_floating_point() else 0.0
        if not difference <= tolerance + 10 * own:
            raise ExportFailed(
                f"After {STEPS} steps the exported model's {what}{name} differs from the module's by {difference:.3g};"
                f" allowed is {tolerance:.3g}."
            )
        largest = max(largest, difference)
    return largest
