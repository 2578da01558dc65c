"""Replaces the implementation of the optimizers that a module configured: :class:`OptimizerSwap`.

The user's optimizer objects stay, because schedulers, hooks, ``trainer.optimizers`` and the module hold them. What
changes is inside: torch's flags in the parameter groups (:mod:`~lightning_ort.optim.fused`) or, for another
implementation, the object's class and contents (:mod:`~lightning_ort.optim.replacement`). Checkpoints are written as
they would be with the flags that the user configured.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from lightning_ort._arguments import check_integer, check_mapping
from lightning_ort.compat.lightning import is_mock_optimizer
from lightning_ort.compiler.run_part import OptimizerReport
from lightning_ort.optim import registry
from lightning_ort.optim.fused import auto_unsupported_reason, fused_unsupported_reason, set_flag
from lightning_ort.optim.param_groups import EMBEDDINGS, name_of, parameters_of, sparse_embedding
from lightning_ort.optim.registry import TORCH_FLAGS, Implementation
from lightning_ort.optim.replacement import load_other_forms, replace
from lightning_ort.optim.states import ALGORITHMS

_DECAYS = {True: "decouples weight decay", False: "adds weight decay to the gradient"}
# what will be done to one optimizer, if anything, and the reason for the report
_Plan = tuple[Callable[[], None] | None, str]


class OptimizerSwap:
    """Replaces the implementation of the configured optimizers; :class:`~lightning_ort.ORTOptimizer` has its docs."""

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
        if self.options and name != "adamw_deepspeed" and name not in registry.REPLACEMENTS:
            raise ValueError(
                f"options={self.options} has no effect with optim={name!r}, which keeps torch's own optimizer."
            )
        is_bnb = name in registry.REPLACEMENTS and registry.REPLACEMENTS[name].package == "bitsandbytes"
        if (self.bits or self.min_8bit_size != 4096) and not is_bnb:
            raise ValueError(f"`bits` and `min_8bit_size` are settings of bitsandbytes, not of optim={name!r}.")
        if wrong := {key: value for key, value in self.bits.items() if type(value) is not int or value not in (8, 32)}:
            raise ValueError(f"bits={wrong}: choose 8 or 32.")

    def apply(
        self, module: nn.Module, optimizers: Sequence[optim.Optimizer], device: torch.device
    ) -> list[OptimizerReport]:
        """Change the optimizers of a module in place, and return what runs each one.

        With a ``ModuleNotFoundError`` for a missing package, or a ``ValueError`` where the implementation cannot stand
        for one of them, all are as they were.
        """
        configured = [registry.runs(optimizer) for optimizer in optimizers]
        plans = [self._plan(module, optimizer, device) for optimizer in optimizers]
        for change, _ in plans:
            if change is not None:
                change()
        return [
            OptimizerReport(before, registry.runs(optimizer), reason)
            for before, optimizer, (_, reason) in zip(configured, optimizers, plans, strict=True)
        ]

    def _plan(self, module: nn.Module, optimizer: optim.Optimizer, device: torch.device) -> _Plan:
        if not parameters_of(optimizer) or is_mock_optimizer(optimizer):
            return None, "no parameters"
        if self.name == "keep":
            return functools.partial(load_other_forms, optimizer), "optim='keep'"
        if self.name == "auto":
            if reason := auto_unsupported_reason(module, optimizer):
                return functools.partial(load_other_forms, optimizer), reason
            return functools.partial(set_flag, optimizer, "fused"), ""
        target, note = registry.resolve(self.name, device)
        if not isinstance(target, str):
            return self._plan_replacement(module, optimizer, device, target, note)
        self._check_class(optimizer, registry.ADAMS)
        if target == "fused" and (reason := fused_unsupported_reason(module, optimizer)):
            raise ValueError(f"optim={self.name!r}: {reason}")
        return functools.partial(set_flag, optimizer, target), note

    def _plan_replacement(
        self, module: nn.Module, optimizer: optim.Optimizer, device: torch.device, target: Implementation, note: str
    ) -> _Plan:
        if reason := target.unavailable_reason(device):
            error = ModuleNotFoundError if "Install" in reason else ValueError
            raise error(f"optim={self.name!r} cannot be used: {reason}.")
        if isinstance(optimizer, target.load()):
            return None, "configured so"
        self._check_class(optimizer, target.replaces)
        self._check_parameters(module, optimizer, target)
        self._check_hyperparameters(optimizer, target)
        if target.algorithm != ALGORITHMS.get(type(optimizer)):
            other = f"another algorithm than {registry.runs(optimizer)}: same groups, lr and weight decay"
            note = f"{other}; {note}".rstrip("; ")
        arguments = {**target.arguments, **self.options}
        bits = None
        if target.package == "bitsandbytes":
            arguments["min_8bit_size"] = self.min_8bit_size
            bits = self._parameter_bits(module)  # here: an unknown module is an error before anything changes

        def change() -> None:
            replace(optimizer, target, target.hyperparameters, arguments)
            if bits is not None:
                optimizer.parameter_bits = bits  # type: ignore[attr-defined]

        return change, note

    def _check_class(self, optimizer: optim.Optimizer, replaced: Sequence[type[optim.Optimizer]]) -> None:
        if type(optimizer) not in replaced:
            names = " or ".join(f"torch.optim.{cls.__name__}" for cls in replaced)
            raise ValueError(
                f"optim={self.name!r} replaces {names}, but `configure_optimizers` returned"
                f" {registry.runs(optimizer)}, which it cannot replace. Use optim='auto' or 'keep'."
            )

    def _check_hyperparameters(self, optimizer: optim.Optimizer, target: Implementation) -> None:
        cls = type(optimizer)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                raise ValueError(f"optim={self.name!r} needs a number as lr, not a tensor.")
            decouples = cls is optim.AdamW or group.get("decoupled_weight_decay", False)  # with it, Adam is AdamW
            if (decay := group.get("weight_decay")) and decouples != target.decouples:
                hint = "Configure torch.optim.AdamW" if target.decouples else "Leave it out"
                raise ValueError(
                    f"optim={self.name!r} {_DECAYS[target.decouples]}; torch.optim.{cls.__name__} with weight_decay="
                    f"{decay} {_DECAYS[decouples]}, a different algorithm. {hint}, or use optim='auto'."
                )
            for name, default in _defaults_of(cls).items():
                value = group.get(name, default)
                if name not in target.hyperparameters and name not in self.options and value != default:
                    raise ValueError(
                        f"optim={self.name!r} does not support {name} of torch's {cls.__name__}, but the optimizer has"
                        f" {name}={value}. Leave it out, or use optim='auto'."
                    )

    def _check_parameters(self, module: nn.Module, optimizer: optim.Optimizer, target: Implementation) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.is_complex() or (target.dtypes and parameter.dtype not in target.dtypes):
                allowed = ", ".join(sorted(str(dtype) for dtype in target.dtypes)) or "floating-point dtypes"
                name = name_of(module, parameter)
                raise ValueError(f"optim={self.name!r} supports {allowed}, but {name} is {parameter.dtype}.")
        if sparse := sparse_embedding(module, optimizer):
            raise ValueError(f"optim={self.name!r} does not support sparse gradients, but {sparse} has sparse=True.")

    def _parameter_bits(self, module: nn.Module) -> dict[int, int]:
        modules = dict(module.named_modules())
        if unknown := [name for name in self.bits if name not in modules]:
            raise ValueError(f"bits: there is no module {unknown[0]!r}. Use names from `named_modules()`.")
        embeddings = [submodule for submodule in modules.values() if isinstance(submodule, EMBEDDINGS)]
        bits = {id(parameter): 32 for submodule in embeddings for parameter in submodule.parameters(recurse=False)}
        # outer modules first, so that the name of an inner one wins
        for name in sorted(self.bits, key=lambda name: name.count(".") + bool(name)):
            bits.update({id(parameter): self.bits[name] for parameter in modules[name].parameters()})
        return bits


def _defaults_of(cls: type[optim.Optimizer]) -> dict[str, Any]:
    """Return the values of hyperparameters that a user does not set; flags are no matter of another implementation."""
    others = ("self", "params", *TORCH_FLAGS, "decoupled_weight_decay")
    parameters = inspect.signature(cls.__init__).parameters
    return {name: each.default for name, each in parameters.items() if name not in others}
