"""Put another implementation in place of the optimizers that a module configured: :class:`OptimizerSwap`.

The user's optimizer objects stay, since schedulers, hooks, ``trainer.optimizers`` and the module itself hold them. What
changes is inside: torch's flags in the parameter groups (fused, foreach) or, for another implementation, the object's
class and contents. Checkpoints are written as the user's own choice of flags would write them.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from lightning_ort._arguments import check_integer, check_mapping
from lightning_ort.compiler.report import OptimizerReport
from lightning_ort.optim import registry, states
from lightning_ort.optim.registry import FUSED_CLASSES, TORCH_FLAGS, Algorithm, Implementation

log = logging.getLogger(__name__)

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_ALGORITHMS: Mapping[type[optim.Optimizer], Algorithm] = {
    optim.Adam: "adam",
    optim.AdamW: "adam",
    optim.SGD: "sgd",
    optim.Adagrad: "adagrad",
    optim.Adafactor: "adafactor",
}
# what torch's Adam does where a hyperparameter is left alone
_ADAM_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(optim.Adam.__init__).parameters.items()
    if name not in ("self", "params", *TORCH_FLAGS, "decoupled_weight_decay")
}


@dataclass(frozen=True)
class _Plan:
    """What will be done to one optimizer; made for all of them before anything is changed."""

    change: Callable[[], None] | None
    reason: str


class OptimizerSwap:
    """Runs the configured optimizers by another implementation.

    Args:
        name: One of :data:`~lightning_ort.optim.registry.OptimName`.
        min_8bit_size: Tensors with fewer elements keep 32-bit states (bitsandbytes).
        bits: Module name -> 8 or 32: bits of the states of its parameters (bitsandbytes). Embeddings have 32 unless
            they are named here.
        options: Further arguments for the implementation's constructor.

    Raises:
        ValueError: If the name is unknown, or a setting has no effect on it.

    """

    def __init__(
        self,
        name: str = "auto",
        *,
        min_8bit_size: int = 4096,
        bits: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        registry.check_name(name)
        self.name = name
        self.min_8bit_size = check_integer("min_8bit_size", min_8bit_size, 0)
        self.bits = check_mapping("bits", bits, "a mapping from names of modules to 8 or 32")
        self.options = check_mapping("options", options, "a mapping from names to values")
        replaces = name == "adamw_deepspeed" or name in registry.REPLACEMENTS
        if self.options and not replaces:
            raise ValueError(f"options={self.options} has no effect on optim={name!r}: torch's own optimizer stays.")
        is_bnb = name in registry.REPLACEMENTS and registry.REPLACEMENTS[name].package == "bitsandbytes"
        if (self.bits or self.min_8bit_size != 4096) and not is_bnb:
            raise ValueError(f"`bits` and `min_8bit_size` are settings of bitsandbytes, not of optim={name!r}.")
        if wrong := {
            module: bits for module, bits in self.bits.items() if type(bits) is not int or bits not in (8, 32)
        }:
            raise ValueError(f"bits={wrong}: choose 8 or 32.")

    def apply(
        self, module: nn.Module, optimizers: Sequence[optim.Optimizer], device: torch.device
    ) -> list[OptimizerReport]:
        """Change the optimizers in place.

        Args:
            module: Whose parameters they optimize.
            optimizers: As configured.
            device: Of the parameters.

        Returns:
            What runs each one.

        Raises:
            ModuleNotFoundError: If a package is missing.
            ValueError: If the implementation cannot stand for one of the optimizers; all are as they were.

        """
        configured = [registry.runs(optimizer) for optimizer in optimizers]
        plans = [self._plan(module, optimizer, device) for optimizer in optimizers]
        for plan in plans:
            if plan.change is not None:
                plan.change()
        return [
            OptimizerReport(before, registry.runs(optimizer), plan.reason)
            for before, optimizer, plan in zip(configured, optimizers, plans, strict=True)
        ]

    def _plan(self, module: nn.Module, optimizer: optim.Optimizer, device: torch.device) -> _Plan:
        if self.name == "keep":
            return _Plan(functools.partial(_read_other_forms, optimizer), "optim='keep'")
        if self.name == "auto":
            reason = _not_fused(module, optimizer)
            change = _read_other_forms if reason else functools.partial(_set_flag, flag="fused")
            return _Plan(functools.partial(change, optimizer), reason or "")
        target, note = registry.resolve(self.name, device)
        if isinstance(target, str):
            self._check_counterpart(optimizer)
            if target == "fused" and (reason := _cannot_fuse(module, optimizer)):
                raise ValueError(f"optim={self.name!r}: {reason}")
            return _Plan(functools.partial(_set_flag, optimizer, flag=target), note)
        return self._plan_replacement(module, optimizer, device, target, note)

    def _plan_replacement(
        self,
        module: nn.Module,
        optimizer: optim.Optimizer,
        device: torch.device,
        target: Implementation,
        note: str,
    ) -> _Plan:
        if reason := target.unavailable(device):
            error = ModuleNotFoundError if "Install" in reason else ValueError
            raise error(f"optim={self.name!r} cannot be used: {reason}.")
        if isinstance(optimizer, target.load()):
            return _Plan(None, "configured so")
        self._check_counterpart(optimizer)
        self._check_parameters(module, optimizer, target)
        other_algorithm = target.algorithm != "adam"
        carried = target.hyperparameters - {"betas", "eps"} if other_algorithm else target.hyperparameters
        self._check_hyperparameters(optimizer, carried)
        arguments = {**target.arguments, **self.options}
        bits = None
        if target.package == "bitsandbytes":
            arguments["min_8bit_size"] = self.min_8bit_size
            bits = self._parameter_bits(module)  # here: an unknown module is an error before anything changes

        def change() -> None:
            _replace(optimizer, target, carried, arguments)
            if bits is not None:
                optimizer.parameter_bits = bits  # type: ignore[attr-defined]

        if other_algorithm:
            note = f"another algorithm than {registry.runs(optimizer)}: same groups, lr and weight decay; {note}"
        return _Plan(change, note.rstrip("; "))

    def _check_counterpart(self, optimizer: optim.Optimizer) -> None:
        # exact classes: what a subclass changed, another implementation does not know
        if type(optimizer) not in (optim.Adam, optim.AdamW):
            raise ValueError(
                f"optim={self.name!r} stands for torch.optim.Adam or torch.optim.AdamW, and `configure_optimizers`"
                f" returned {registry.runs(optimizer)}, which has no counterpart. Use optim='auto' or 'keep'."
            )

    def _check_hyperparameters(self, optimizer: optim.Optimizer, carried: Iterable[str]) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                raise ValueError(f"optim={self.name!r} takes a number as lr, not a tensor.")
            if type(optimizer) is optim.Adam and group["weight_decay"]:
                raise ValueError(
                    f"optim={self.name!r} decouples weight decay; torch.optim.Adam adds its weight_decay="
                    f"{group['weight_decay']} to the gradient, which is another algorithm. Configure torch.optim.AdamW."
                )
            for name, default in _ADAM_DEFAULTS.items():
                value = group.get(name, default)
                if name not in (*carried, *self.options, "weight_decay") and value != default:
                    raise ValueError(
                        f"optim={self.name!r} has no {name} as torch's Adam has it, and it was configured with {name}="
                        f"{value}. Leave it out, or use optim='auto'."
                    )

    def _check_parameters(self, module: nn.Module, optimizer: optim.Optimizer, target: Implementation) -> None:
        names = _names(module)
        for parameter in _parameters(optimizer):
            if parameter.is_complex() or (target.dtypes and parameter.dtype not in target.dtypes):
                allowed = ", ".join(sorted(str(dtype) for dtype in target.dtypes)) or "floating-point dtypes"
                raise ValueError(
                    f"optim={self.name!r} takes {allowed}, and {names.get(id(parameter), 'a parameter')} is"
                    f" {parameter.dtype}."
                )
        if sparse := _sparse(module, optimizer):
            raise ValueError(f"optim={self.name!r} takes no sparse gradients, which {sparse} gives (sparse=True).")

    def _parameter_bits(self, module: nn.Module) -> dict[int, int]:
        modules = dict(module.named_modules())
        if unknown := [name for name in self.bits if name not in modules]:
            raise ValueError(f"bits: there is no module {unknown[0]!r}. Names are those of `named_modules()`.")
        bits = {
            id(parameter): 32
            for submodule in modules.values()
            if isinstance(submodule, EMBEDDINGS)
            for parameter in submodule.parameters(recurse=False)
        }
        # outer modules first, so that a more special name wins
        for name in sorted(self.bits, key=lambda name: name.count(".") + bool(name)):
            bits.update({id(parameter): self.bits[name] for parameter in modules[name].parameters()})
        return bits


def _parameters(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _sparse(module: nn.Module, optimizer: optim.Optimizer) -> str | None:
    mine = {id(parameter) for parameter in _parameters(optimizer)}
    for name, submodule in module.named_modules():
        if isinstance(submodule, EMBEDDINGS) and submodule.sparse and id(submodule.weight) in mine:
            return name
    return None


def _not_fused(module: nn.Module, optimizer: optim.Optimizer) -> str | None:
    """Why ``optim="auto"`` leaves an optimizer as it is, or ``None``."""
    if type(optimizer) not in FUSED_CLASSES:
        return "no fused form"
    flags = [optimizer.defaults, *optimizer.param_groups]
    chosen = [flag for flag in TORCH_FLAGS if any(group.get(flag) is not None for group in flags)]
    if chosen:
        return f"{' and '.join(chosen)} chosen by the module"
    return _cannot_fuse(module, optimizer)


def _cannot_fuse(module: nn.Module, optimizer: optim.Optimizer) -> str | None:
    names = _names(module)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True has no fused form"
    for parameter in _parameters(optimizer):
        name = names.get(id(parameter), "a parameter")
        if not parameter.is_floating_point():
            return f"{name} is {parameter.dtype}: fused needs floating-point parameters"
        if not _fused_runs(type(optimizer), parameter.device.type, parameter.dtype):  # type: ignore[arg-type]
            return f"torch has no fused {type(optimizer).__name__} for {parameter.dtype} on {parameter.device.type}"
    if sparse := _sparse(module, optimizer):
        return f"{sparse} gives sparse gradients (sparse=True), which fused does not take"
    return None


@functools.cache
def _fused_runs(cls: type[optim.Optimizer], device_type: str, dtype: torch.dtype) -> bool:
    """Whether a class has a fused kernel, found out by running it: no list in torch says so for every class."""
    if device_type == "meta":
        return False
    try:
        parameter = torch.zeros(1, device=device_type, dtype=dtype, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        cls([parameter], lr=0.1, fused=True).step()  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return True


# torch's own optimizers, in place


def _read_other_forms(optimizer: optim.Optimizer) -> None:
    """Let an optimizer of torch load the states that another implementation saved."""
    algorithm = _ALGORITHMS.get(type(optimizer))
    if algorithm is not None and not _is_hooked(optimizer):
        optimizer.register_load_state_dict_pre_hook(functools.partial(_to_torch_form, algorithm=algorithm, own="torch"))


def _is_hooked(optimizer: optim.Optimizer) -> bool:
    hooks = optimizer._optimizer_load_state_dict_pre_hooks.values()
    return any(getattr(hook, "func", None) is _to_torch_form for hook in hooks)


def _to_torch_form(
    optimizer: optim.Optimizer, saved: dict[str, Any], *, algorithm: Algorithm, own: str
) -> dict[str, Any] | None:
    states.check_algorithm(saved, algorithm, registry.runs(optimizer))
    if any(states.form(state) not in ("torch", own) for state in saved["state"].values() if state):
        return states.to_torch_form(saved)
    return None


def _set_flag(optimizer: optim.Optimizer, flag: str) -> None:
    """Make one of torch's optimizers run fused or foreach, and keep it so when it loads a checkpoint."""
    configured = {name: optimizer.defaults.get(name) for name in TORCH_FLAGS}

    def set_flags(optimizer: optim.Optimizer) -> None:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update({name: name == flag or None for name in TORCH_FLAGS})
        for parameter, state in optimizer.state.items():
            step = state.get("step") if state else None  # a shard has no states for what other ranks update
            if isinstance(step, torch.Tensor) and flag == "fused":
                state["step"] = step.to(parameter.device, torch.float32)
        # Its mark of unscaling gradients itself makes Lightning refuse clipping: left out, the scaler unscales them.
        optimizer.__dict__.pop("_step_supports_amp_scaling", None)

    def as_configured(optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
        for group in saved["param_groups"]:  # copies of the optimizer's groups
            group.update(configured)

    set_flags(optimizer)
    _read_other_forms(optimizer)
    loaded = optimizer.register_load_state_dict_post_hook(set_flags)
    optimizer.register_state_dict_post_hook(as_configured)

    def give_up() -> None:
        loaded.remove()
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update(configured)
        log.warning("A gradient is sparse, which fused does not take: %s runs as configured.", registry.runs(optimizer))

    if flag == "fused" and type(optimizer) in (optim.SGD, optim.Adagrad):  # Adam takes none in any form
        _call_if_sparse(optimizer, give_up)


def _call_if_sparse(optimizer: optim.Optimizer, function: Callable[[], None]) -> None:
    """Call a function in the first step if a gradient is sparse, as ``F.embedding(..., sparse=True)`` makes them."""

    def look() -> None:
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in _parameters(optimizer)):
            function()

    def before_step(optimizer: optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        handle.remove()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            look()
            return None

        def then_look() -> Any:  # the gradients are not there before
            loss = closure()
            look()
            return loss

        return (optimizer,), {"closure": then_look}

    handle = optimizer.register_step_pre_hook(before_step)


# other classes


def _replace(
    optimizer: optim.Optimizer,
    target: Implementation,
    carried: Iterable[str],
    arguments: Mapping[str, Any],
) -> None:
    """Make an optimizer object one of another class, over the same parameter groups."""
    before = optimizer.state_dict() if optimizer.state else None
    # what `arguments` gives holds for all groups
    keys = [key for key in carried if key in optimizer.defaults and key not in arguments]
    groups = [{key: group[key] for key in ("params", *keys) if key in group} for group in optimizer.param_groups]
    defaults = {key: optimizer.defaults[key] for key in keys}
    other = target.load()(groups, **{**defaults, **arguments})
    become(optimizer, other)
    to_torch_form = functools.partial(_to_torch_form, algorithm=target.algorithm, own=target.form)
    optimizer.register_load_state_dict_pre_hook(to_torch_form)
    optimizer.register_state_dict_post_hook(_numbers_as_lr)
    if target.adopt is not None:
        optimizer.register_load_state_dict_post_hook(target.adopt)
    if before is not None:
        optimizer.load_state_dict(before)


def _numbers_as_lr(optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
    """Save learning rates as the numbers that were configured: torchao makes tensors of them."""
    for group in saved["param_groups"]:  # copies of the optimizer's groups
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"].item()


def become(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    """Make an optimizer object be another one over the same parameters.

    Args:
        optimizer: Keeps its parameter groups, updated with the other's entries, its hooks, and what the user put on it.
        other: Is what the first one was, afterwards.

    """
    groups = optimizer.param_groups
    for group, new in zip(groups, other.param_groups, strict=True):
        group.update(new)
    other.defaults = {**optimizer.defaults, **other.defaults}
    other.param_groups = groups
    replaced = {"state", "defaults", "param_groups", "step", "_zero_grad_profile_name", "_step_supports_amp_scaling"}
    kept = {key: value for key, value in vars(optimizer).items() if key not in replaced}
    counted = "step" in vars(optimizer)
    contents = {**vars(other), **kept}
    # exchanged, not copied: the other one's destructor must not free what is used now
    optimizer.__class__, other.__class__ = _named(type(other), type(optimizer).__name__), type(optimizer)  # type: ignore[arg-type]
    optimizer.__dict__, other.__dict__ = contents, vars(optimizer)
    if counted:
        _count_steps(optimizer)


@functools.cache
def _named(cls: type[optim.Optimizer], name: str) -> type[optim.Optimizer]:
    """The same class under a name: LearningRateMonitor makes its keys, and so a user's plots, of the class's name."""
    return type(name, (cls,), {"__qualname__": cls.__qualname__, "__module__": cls.__module__})


def _count_steps(optimizer: optim.Optimizer) -> None:
    """Wrap ``step`` as :class:`torch.optim.lr_scheduler.LRScheduler` did with that of the former class."""
    reference = weakref.ref(optimizer)
    step = type(optimizer).step

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        current = reference()
        assert current is not None
        current._opt_called = True  # type: ignore[attr-defined]
        return step(current, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]
