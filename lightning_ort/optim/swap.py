"""Replaces the implementation of the optimizers that a module configured: :class:`OptimizerSwap`.

The user's optimizer objects stay, because schedulers, hooks, ``trainer.optimizers`` and the module hold them. What
changes is inside: torch's flags in the parameter groups (:mod:`~lightning_ort.optim.fused`) or, for another
implementation, the object's class and contents (:mod:`~lightning_ort.optim.replacement`). Checkpoints are written as
they would be with the flags that the user configured.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn, optim

from lightning_ort._arguments import check_integer, check_mapping
from lightning_ort.compat.lightning import is_mock_optimizer
from lightning_ort.compiler.report import OptimizerReport
from lightning_ort.optim import registry
from lightning_ort.optim.fused import auto_unsupported_reason, fused_unsupported_reason, set_flag
from lightning_ort.optim.param_groups import EMBEDDINGS, name_of, parameters_of, sparse_embedding
from lightning_ort.optim.registry import TORCH_FLAGS, Implementation
from lightning_ort.optim.replacement import load_other_forms, replace

# the values of torch's Adam for hyperparameters that a user does not set
_ADAM_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(optim.Adam.__init__).parameters.items()
    if name not in ("self", "params", *TORCH_FLAGS, "decoupled_weight_decay")
}
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

        Raises:
            ModuleNotFoundError: If a package is missing. The optimizers are as they were.
            ValueError: If the implementation cannot stand for one of them. All are as they were.

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
        self._check_class(optimizer)
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
        self._check_class(optimizer)
        self._check_parameters(module, optimizer, target)
        carried = target.hyperparameters
        if target.algorithm != "adam":
            carried = carried - {"betas", "eps"}
            other = f"another algorithm than {registry.runs(optimizer)}: same groups, lr and weight decay"
            note = f"{other}; {note}".rstrip("; ")
        self._check_hyperparameters(optimizer, carried)
        arguments = {**target.arguments, **self.options}
        bits = None
        if target.package == "bitsandbytes":
            arguments["min_8bit_size"] = self.min_8bit_size
            bits = self._parameter_bits(module)  # here: an unknown module is an error before anything changes

        def change() -> None:
            replace(optimizer, target, carried, arguments)
            if bits is not None:
                optimizer.parameter_bits = bits  # type: ignore[attr-defined]

        return change, note

    def _check_class(self, optimizer: optim.Optimizer) -> None:
        # exact classes: another implementation does not know what a subclass changes
        if type(optimizer) not in (optim.Adam, optim.AdamW):
            raise ValueError(
                f"optim={self.name!r} replaces torch.optim.Adam or torch.optim.AdamW, but `configure_optimizers`"
                f" returned {registry.runs(optimizer)}, which it cannot replace. Use optim='auto' or 'keep'."
            )

    def _check_hyperparameters(self, optimizer: optim.Optimizer, carried: Set[str]) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                raise ValueError(f"optim={self.name!r} needs a number as lr, not a tensor.")
            if (
                type(optimizer) is optim.Adam
                and group["weight_decay"]
                and not group.get("decoupled_weight_decay")  # with it, Adam is AdamW
            ):
                raise ValueError(
                    f"optim={self.name!r} decouples weight decay; torch.optim.Adam adds its weight_decay="
                    f"{group['weight_decay']} to the gradient, a different algorithm. Configure torch.optim.AdamW."
                )
            for name, default in _ADAM_DEFAULTS.items():
                value = group.get(name, default)
                if name not in (*carried, *self.options, "weight_decay") and value != default:
                    raise ValueError(
                        f"optim={self.name!r} does not support {name} of torch's Adam, but the optimizer has {name}="
                        f"{value}. Leave it out, or use optim='auto'."
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
