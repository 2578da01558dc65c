"""The fused and foreach loops of torch's own optimizers, switched on in the user's optimizer object."""

import functools
import logging
import operator
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn, optim

from lightning_ort.compat.torch import is_zero_tensor
from lightning_ort.compat.torch_optimizers import STEPS, pop_amp_scaling_mark, shard_of
from lightning_ort.optim.fused_update import CHECK
from lightning_ort.optim.param_groups import name_of, sparse_embedding
from lightning_ort.optim.registry import TORCH_FLAGS, runs
from lightning_ort.optim.replacement import load_other_forms

log = logging.getLogger(__name__)

FUSED_CLASSES: tuple[type[optim.Optimizer], ...] = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)


def auto_unsupported_reason(module: nn.Module, optimizer: optim.Optimizer) -> str | None:
    """Return why ``optim="auto"`` does not replace an optimizer, or ``None``."""
    if type(optimizer) not in FUSED_CLASSES:
        return "no fused implementation"
    groups = [optimizer.defaults, *optimizer.param_groups]
    chosen = [flag for flag in TORCH_FLAGS if any(group.get(flag) is not None for group in groups)]
    if chosen:
        return f"{' and '.join(chosen)} set by the module"
    return fused_unsupported_reason(module, optimizer)


def fused_unsupported_reason(module: nn.Module, optimizer: optim.Optimizer) -> str | None:
    """Return why one of :data:`FUSED_CLASSES` cannot run fused, or ``None``."""
    for group in optimizer.param_groups:
        if reason := _group_unsupported_reason(module, type(optimizer), group):
            return reason
    if sparse := sparse_embedding(module, optimizer):
        return f"{sparse} has sparse gradients (sparse=True), which fused optimizers do not support"
    return None


def _group_unsupported_reason(module: nn.Module, cls: type[optim.Optimizer], group: dict[str, Any]) -> str | None:
    if group.get("differentiable"):
        return "there is no fused implementation for differentiable=True"
    if group.get("momentum") and group.get("dampening"):
        return "with dampening, a first gradient that comes late counts in full"
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            return f"{name_of(module, parameter)} is {parameter.dtype}: fused needs floating-point parameters"
        if not _has_fused_kernel(cls, parameter.device.type, parameter.dtype):  # type: ignore[arg-type]
            return f"torch has no working fused {cls.__name__} for {parameter.dtype} on {parameter.device.type}"
        if nn.parameter.is_lazy(parameter) or parameter.is_contiguous():
            continue
        # without gaps it has its twin's strides
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            return f"{name_of(module, parameter)} has gaps in its memory, which fused kernels write to"
    return None


def prepare_state(state: dict[str, Any], parameter: torch.Tensor, fused: bool) -> None:
    """Lay the states of a parameter out as it is, and have its steps as fused kernels do.

    They go through the memory of both from its start, and take the number of steps on the same device.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
            state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    if fused and isinstance(state.get("step"), torch.Tensor):
        state["step"] = state["step"].to(parameter.device, torch.float32)


@functools.cache
def _has_fused_kernel(cls: type[optim.Optimizer], device_type: str, dtype: torch.dtype) -> bool:
    # tried, because torch has no list of the kernels of every class, and compared with the plain loop, because fused
    # SGD on CPUs updates float16 and bfloat16 elements only where they fill no vector (torch 2.13)
    if device_type == "meta":
        return False
    try:
        fused, plain = (_after_steps(cls, device_type, dtype, fused) for fused in (True, False))
        return torch.allclose(fused, plain, rtol=8 * torch.finfo(dtype).eps)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False


def _after_steps(cls: type[optim.Optimizer], device_type: str, dtype: torch.dtype, fused: bool) -> torch.Tensor:
    parameter = torch.linspace(1, 2, 100, device=device_type).to(dtype).requires_grad_()
    momentum: dict[str, Any] = {"momentum": 0.9} if issubclass(cls, optim.SGD) else {}
    optimizer = cls([parameter], lr=0.1, fused=fused, foreach=False, **momentum)  # type: ignore[call-arg]
    parameter.grad = parameter.detach().clone()
    for _ in range(3):
        STEPS[cls](optimizer)  # not what somebody may have put in its place, and without hooks of all optimizers
    return parameter.detach()


def set_flag(optimizer: optim.Optimizer, flag: str) -> None:
    """Make an optimizer of torch's run ``"fused"`` or ``"foreach"``; its checkpoints keep what the user configured."""
    configured = {name: optimizer.defaults.get(name) for name in TORCH_FLAGS}
    check = _StepCheck(optimizer, configured) if flag == "fused" else None

    def set_flags(optimizer: optim.Optimizer) -> None:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update({name: name == flag or None for name in TORCH_FLAGS})
        if check is not None:
            check.known_groups = check.first_groups  # those that were added may be without the flag
        for parameter, state in optimizer.state.items():
            if state:  # a shard has none for what other ranks update
                prepare_state(state, parameter, flag == "fused")
        pop_amp_scaling_mark(optimizer)  # with it, Lightning refuses gradient clipping

    def save_as_configured(optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
        for group in saved["param_groups"]:  # copies of the optimizer's groups
            group.update(configured)

    set_flags(optimizer)
    load_other_forms(optimizer)
    after_loading = optimizer.register_load_state_dict_post_hook(set_flags)
    optimizer.register_state_dict_post_hook(save_as_configured)
    if check is not None:
        check.undo = after_loading.remove
        _call_with_gradients(optimizer, check)


class _StepCheck:
    """Before each step, allows for what torch's fused implementations cannot deal with.

    That is: sparse gradients, which a function such as ``F.embedding(..., sparse=True)`` makes in any step; gradients
    and states that are laid out otherwise than their parameter, since fused kernels go through the memory of all from
    its start; gradients without memory, such as that of ``torch.sgn``; gradients that come late; and groups that are
    added.
    """

    def __init__(self, optimizer: optim.Optimizer, configured: dict[str, Any]) -> None:
        self.optimizer = optimizer
        self.configured = configured
        self.first_groups = self.known_groups = len(optimizer.param_groups)
        self.undo: Callable[[], None] = lambda: None
        self._strides: dict[torch.Tensor, tuple[int, ...]] = {}  # of the parameters that are not contiguous

    def __call__(self) -> None:
        owner = shard_of(self.optimizer)
        if len(self.optimizer.param_groups) != self.known_groups:
            self._check_added_groups(type(owner))
        # a shard has groups of its own, which get the settings of the whole's in its step
        pairs = zip(self.optimizer.param_groups, owner.param_groups, strict=True)
        fused = []
        strided: list[torch.Tensor] = []  # few or none
        for group, own in pairs:
            if not group.get("fused"):
                continue
            fused.append((group, own["params"]))
            if not _are_plain(own["params"]):
                strided += [p for p in own["params"] if p.grad is not None and not _are_plain([p])]
        if strided and any(p.grad is not None and p.grad.is_sparse for p in strided):
            self._give_up()
            return
        if strided or self._strides:
            self._lay_out(owner, strided)
        for group, parameters in fused:
            if group.get("momentum"):
                _fill_momentum(owner.state, parameters)

    def _check_added_groups(self, cls: type[optim.Optimizer]) -> None:
        groups = self.optimizer.param_groups
        for group in groups[self.known_groups :]:
            if group.get("fused") and (reason := _group_unsupported_reason(nn.Module(), cls, group)):
                group.update(self.configured)
                log.warning("A parameter group that was added to %s is not fused: %s.", runs(self.optimizer), reason)
        self.known_groups = len(groups)

    def _give_up(self) -> None:
        self.undo()
        for group in (self.optimizer.defaults, *self.optimizer.param_groups):
            group.update(self.configured)
        log.warning(
            "A gradient is sparse, which fused optimizers do not support: %s runs as configured.", runs(self.optimizer)
        )

    @torch.no_grad()
    def _lay_out(self, owner: optim.Optimizer, strided: list[torch.Tensor]) -> None:
        strides = {p: p.stride() for p in strided if not p.is_contiguous()}
        if strides != self._strides:
            for p in {**self._strides, **strides}:
                prepare_state(owner.state.get(p, {}), p, True)
            self._strides = strides
        for p in strided:
            if p.grad is not None and (p.grad.stride() != p.stride() or is_zero_tensor(p.grad)):
                p.grad = torch.empty_like(p).copy_(p.grad)


def _are_plain(parameters: list[torch.Tensor]) -> bool:
    """Whether these and their gradients are contiguous memory; an ordinary model pays for this alone."""
    tensors = [*parameters, *[gradient for gradient in map(_GRAD, parameters) if gradient is not None]]
    return all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(is_zero_tensor, tensors))


_GRAD = operator.attrgetter("grad")


def _fill_momentum(state: MutableMapping[torch.Tensor, Any], parameters: list[torch.Tensor]) -> None:
    """Add the buffers that a group lacks: torch adds those of all its gradients or, if one has one, none (2.13)."""
    with_gradient = [p for p in parameters if p.grad is not None]
    lacking = [p for p in with_gradient if state.get(p, {}).get("momentum_buffer") is None]
    if len(lacking) < len(with_gradient):
        state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in lacking})


def _call_with_gradients(optimizer: optim.Optimizer, check: Callable[[], None]) -> None:
    """Call a function in each step when its gradients are there."""

    def before_step(optimizer: optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            check()
            return None

        def closure_and_check() -> Any:  # the closure computes the gradients
            loss = closure()
            check()
            return loss

        return (optimizer,), {"closure": closure_and_check}

    setattr(before_step, CHECK, check)
    optimizer.register_step_pre_hook(before_step)
