"""The update of an optimizer in standard operators, as torch computes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training.graph import PortableGraph
from lightning_ort.optim.fused_update import may_update

_SETTINGS = {
    torch.optim.SGD: ("momentum", "weight_decay", "nesterov"),
    torch.optim.Adam: ("betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay"),
    torch.optim.AdamW: ("betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay"),
}
SUPPORTED = ", ".join(kind.__name__ for kind in _SETTINGS)
STEP = "step"  # what torch calls the number of updates of one parameter
_WITHOUT = "take export_training(..., optimizer=None) (--gradients-only), which returns gradients."


@dataclass(frozen=True)
class Group:
    """A parameter group: its learning rate, which is an input of the model, and its other settings."""

    learning_rate: float
    parameters: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as a model has it."""

    name: str  # SGD, Adam or AdamW
    groups: tuple[Group, ...]  # its groups, with those parameters that are trained
    # the values of its states, by kind and then by parameter; with "step" if some parameters are younger than others
    states: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    step: int = 0  # how many updates it has made
    scheduler: str | None = None  # the class of the learning rate's schedule, if the module configures one
    scheduled_momentum: bool = False  # whether a schedule sets the momentum or betas too

    def update(
        self, ctx: PortableGraph, name: str, value: Value, gradient: Value, states: dict[str, Value], clock: "Clock"
    ) -> tuple[Value, dict[str, Value]]:
        """Return the new value of a parameter, and of its states."""
        index = next(index for index, group in enumerate(self.groups) if name in group.parameters)
        settings = self.groups[index].settings
        own = {STEP: states[STEP] + 1} if STEP in states else {}
        if own:
            clock = clock.at(own[STEP])
        rate = clock.rate(index)
        function = _sgd if self.name == "SGD" else _adam
        value, new = function(value, gradient, states, rate, clock, settings)
        return value, new | own


class Clock:
    """The learning rates and the number of the update, and what is computed from them once."""

    def __init__(self, ctx: PortableGraph, rates: Value, step: Value) -> None:
        self._rates, self._ctx = rates, ctx
        self.step = step
        self._known: dict[Any, Value] = {}

    def at(self, step: Value) -> "Clock":
        """Return a clock with the same rates for another number of updates."""
        return Clock(self._ctx, self._rates, step)

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return what was made for a key, or make it."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def rate(self, group: int) -> Value:
        """The learning rate of a group."""
        return self.once(("rate", group), lambda: self._rates.op("Gather", self._ctx.const(group, torch.int64)))

    def correction(self, beta: float) -> Value:
        """1 - beta ** step, in float64: the difference from 1 is small at first."""

        def make() -> Value:
            return 1 - self._ctx.const(beta, torch.float64).op("Pow", self.step.cast(torch.float64))

        return self.once(("correction", beta), make)


def _sgd(
    value: Value, gradient: Value, states: dict[str, Value], rate: Value, clock: Clock, settings: Mapping[str, Any]
) -> tuple[Value, dict[str, Value]]:
    if settings["weight_decay"]:
        gradient = gradient + value * settings["weight_decay"]
    if not settings["momentum"]:
        return value - gradient * rate, {}
    momentum = settings["momentum"]
    buffer = states["momentum_buffer"] * momentum + gradient
    step = gradient + buffer * momentum if settings["nesterov"] else buffer
    return value - step * rate, {"momentum_buffer": buffer}


def _adam(
    value: Value, gradient: Value, states: dict[str, Value], rate: Value, clock: Clock, settings: Mapping[str, Any]
) -> tuple[Value, dict[str, Value]]:
    (beta1, beta2), eps, decay = settings["betas"], settings["eps"], settings["weight_decay"]
    if decay and settings["decoupled_weight_decay"]:
        value = value * clock.once(("keep", id(rate), decay), lambda: 1 - rate * decay)
    elif decay:
        gradient = gradient + value * decay
    mean = states["exp_avg"] * beta1 + gradient * (1 - beta1)
    square = states["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2)
    new = {"exp_avg": mean, "exp_avg_sq": square}
    largest = square
    if settings["amsgrad"]:
        largest = new["max_exp_avg_sq"] = states["max_exp_avg_sq"].max(square)
    # value - rate / correction1 * mean / (sqrt(square / correction2) + eps), with what is a number computed once
    root = clock.once(("root", beta2), lambda: clock.correction(beta2).op("Sqrt"))
    scale = clock.once(
        ("scale", id(rate), beta1, beta2),
        lambda: (rate.cast(torch.float64) / clock.correction(beta1) * root).cast(torch.float32),
    )
    margin = clock.once(("margin", beta2, eps), lambda: (root * eps).cast(torch.float32))
    return value - mean / (largest.op("Sqrt") + margin) * scale, new


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ExportFailed`` if a model cannot have an optimizer, whatever it updates."""
    kind = type(optimizer)
    if kind not in _SETTINGS:
        raise ExportFailed(
            f"The optimizer {kind.__module__}.{kind.__qualname__} cannot be part of a model. Use one of {SUPPORTED} of"
            f" torch.optim, or {_WITHOUT}"
        )
    if not may_update(optimizer):
        raise ExportFailed(
            f"The optimizer {kind.__name__} has hooks, or a `step` of its own, which would not be part of the model: do"
            f" what they do in `training_step` or `on_before_optimizer_step`, or {_WITHOUT}"
        )


def read(optimizer: torch.optim.Optimizer, module: nn.Module, trained: set[str], scheduler: str | None) -> Optimizer:
    """Take over an optimizer with its groups and states, or raise ``ExportFailed`` if the model cannot have them."""
    check_kind(optimizer)
    kind = type(optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: list[Group] = []
    states: dict[str, dict[str, Tensor]] = {name: {} for name in _state_names(optimizer)}
    steps: dict[str, int] = {}  # of trained parameters
    for group in optimizer.param_groups:
        if unknown := [key for key in ("dampening", "maximize") if group.get(key)]:
            raise ExportFailed(f"The optimizer {kind.__name__} has {unknown[0]}, which a model has not: leave it out.")
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        if len(own) < len(group["params"]):
            raise ExportFailed(f"The optimizer {kind.__name__} has parameters that are not the module's.")
        settings = {key: group.get(key, False) for key in _SETTINGS[kind]}
        if kind is torch.optim.AdamW:
            settings["decoupled_weight_decay"] = True
        settings = {key: tuple(map(float, v)) if isinstance(v, (tuple, list)) else v for key, v in settings.items()}
        kept = tuple(name for name in own if name in trained)
        groups.append(Group(float(group["lr"]), kept, settings))
        for name, parameter in zip(own, group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            if name in trained:
                steps[name] = int(state.get(STEP, 0))
            for key in _state_names_of(kind, settings) if name in trained else ():
                value = state.get(key)
                states[key][name] = torch.zeros_like(parameter) if value is None else value.detach().clone()
    if len({*steps.values()}) > 1:  # some are trained since a later step, as Lightning's BaseFinetuning does
        states[STEP] = {name: torch.tensor(float(step)) for name, step in steps.items()}
    missing = trained - {name for group in groups for name in group.parameters}
    if missing:
        raise ExportFailed(
            f"The optimizer does not update {', '.join(sorted(missing))}, which need gradients: set requires_grad to"
            " False there."
        )
    # what schedules note there (torch 2.13)
    if scheduler is None and any("initial_lr" in group for group in optimizer.param_groups):
        scheduler = "the schedule"
    scheduled = any("base_momentum" in group for group in optimizer.param_groups)
    step = max(steps.values(), default=0)
    return Optimizer(kind.__name__, tuple(groups), states, step, scheduler, scheduled)


def _state_names_of(kind: type, settings: Mapping[str, Any]) -> list[str]:
    if kind is torch.optim.SGD:
        return ["momentum_buffer"] if settings["momentum"] else []
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else [])]


def _state_names(optimizer: torch.optim.Optimizer) -> list[str]:
    names: dict[str, None] = {}
    for group in optimizer.param_groups:
        names |= dict.fromkeys(_state_names_of(type(optimizer), {"momentum": 0, "amsgrad": False, **group}))
    return list(names)


def configured(module: nn.Module) -> tuple[torch.optim.Optimizer, str | None]:
    """Return the optimizer that a LightningModule configures, and the class of its schedule, if any."""
    try:
        made: Any = module.configure_optimizers()  # type: ignore[operator]
    except Exception as error:  # the user's code is run
        raise ExportFailed(
            f"configure_optimizers raised {type(error).__name__}: {str(error).rstrip('.')}. If it needs the Trainer,"
            " set module.trainer = Trainer(max_steps=...) first, pass an optimizer, or export at the end of a fit, by"
            " OnnxExport(..., training=True)."
        ) from error
    scheduler = None
    if isinstance(made, Mapping):
        made, scheduler = made["optimizer"], made.get("lr_scheduler")
    elif isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], (tuple, list)):
        (made, scheduler) = made
        scheduler = scheduler[0] if scheduler else None
    if isinstance(made, (tuple, list)) and len(made) == 1:
        made = made[0]
        if isinstance(made, Mapping):
            made, scheduler = made["optimizer"], made.get("lr_scheduler")
    if isinstance(scheduler, Mapping):
        scheduler = scheduler["scheduler"]
    if not isinstance(made, torch.optim.Optimizer):
        what = f"{len(made)} optimizers" if isinstance(made, (tuple, list)) else type(made).__name__
        raise ExportFailed(f"configure_optimizers returned {what}; a training model has one optimizer. Or {_WITHOUT}")
    return made, None if scheduler is None else type(scheduler).__name__
