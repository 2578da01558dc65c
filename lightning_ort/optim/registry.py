"""The names of ``optim=`` and the implementation that each one stands for."""

import difflib
import importlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import optim

from lightning_ort._arguments import check_type
from lightning_ort.compat.onnxruntime import import_fused_ops
from lightning_ort.optim import states
from lightning_ort.optim.states import Algorithm, Form

OptimName = Literal[
    "auto",
    "keep",
    "adamw_torch_fused",
    "adamw_torch_foreach",
    "adamw_ort_fused",
    "adamw_apex_fused",
    "adamw_deepspeed",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "adamw_torchao_8bit",
    "adamw_torchao_4bit",
    "adafactor",
    "adamw_anyprecision",
]

# other hyperparameters of torch's Adam raise an error if they are set and an implementation does not have them
_BASIC = frozenset({"lr", "betas", "eps", "weight_decay"})
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A class that runs an optimizer algorithm."""

    path: str  # "module:name" of the class
    algorithm: Algorithm = "adam"
    package: str = ""  # the requirement that installs it; empty for torch and for this package
    install: str = ""  # the command, where it is not `pip install <package>`
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: frozenset[torch.dtype] = frozenset()  # of the parameters; empty for all
    hyperparameters: frozenset[str] = _BASIC  # those of torch's Adam that it has too
    arguments: Mapping[str, Any] = field(default_factory=dict)  # for its constructor
    form: Form = "torch"  # of the states that it saves
    adopt: Callable[[optim.Optimizer], None] | None = None  # converts states that were loaded in torch's form
    to_save: Callable[[optim.Optimizer, dict[str, Any]], None] | None = None  # corrects its state dicts
    commands: tuple[str, ...] = ()  # programs on the PATH with which it compiles its extension

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why it cannot be used on a device and how to install it, or ``None``."""
        if device.type not in self.devices:
            return f"it supports {' and '.join(self.devices)}, but the module is on {device.type}"
        if self.package and not (available := RequirementCache(self.package)):
            return f"{available}. Install it with `{self.install or f'pip install {self.package}'}`"
        if missing := [command for command in self.commands if shutil.which(command) is None]:
            return (
                f"it compiles an extension, and {' and '.join(missing)} is not on the PATH. It needs a C++ compiler and"
                " ninja (`pip install ninja`, with the virtual environment active), or use 'adamw_torch_fused'"
            )
        return None

    def load(self) -> type[optim.Optimizer]:
        """Import and return its class."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


_BNB: dict[str, Any] = {"package": "bitsandbytes", "dtypes": _FLOATS, "form": "bitsandbytes"}
_TORCHAO: dict[str, Any] = {
    "package": "torchao",
    "dtypes": _FLOATS,
    "hyperparameters": _BASIC | {"amsgrad"},
    "form": "torchao",
    "adopt": states.to_torchao_form,
}
_FUSED_ADAM: dict[str, Any] = {  # of apex, and of DeepSpeed, which has it from there
    "devices": ("cuda",),
    "dtypes": _FLOATS,
    "arguments": {"adam_w_mode": True},
}
_EIGHT_BIT = "lightning_ort.optim.eight_bit"

REPLACEMENTS: Mapping[str, Implementation] = {
    "adamw_bnb_8bit": Implementation(path=f"{_EIGHT_BIT}:AdamW8bit", **_BNB),
    "paged_adamw_8bit": Implementation(path=f"{_EIGHT_BIT}:AdamW8bit", arguments={"is_paged": True}, **_BNB),
    "lion_8bit": Implementation(
        path=f"{_EIGHT_BIT}:Lion8bit",
        algorithm="lion",
        hyperparameters=frozenset({"lr", "betas", "weight_decay"}),
        **_BNB,
    ),
    "adamw_torchao_8bit": Implementation(path="torchao.optim:AdamW8bit", **_TORCHAO),
    "adamw_torchao_4bit": Implementation(path="torchao.optim:AdamW4bit", **_TORCHAO),
    "adamw_apex_fused": Implementation(
        path="apex.optimizers:FusedAdam",
        package="apex",
        install="pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex",
        hyperparameters=_BASIC | {"capturable"},
        adopt=states.count_in_groups,
        **_FUSED_ADAM,
    ),
    "adafactor": Implementation(
        path="torch.optim:Adafactor",
        algorithm="adafactor",
        hyperparameters=frozenset({"lr", "weight_decay", "maximize"}),
    ),
    "adamw_anyprecision": Implementation(
        path="lightning_ort.optim.anyprecision:AnyPrecisionAdamW",
        dtypes=_FLOATS,
        hyperparameters=_BASIC | {"maximize"},
        form="anyprecision",
    ),
}
_DEEPSPEED = {
    "cpu": Implementation(
        path="deepspeed.ops.adam:DeepSpeedCPUAdam",
        package="deepspeed",
        devices=("cpu",),
        dtypes=_FLOATS,
        arguments={"adamw_mode": True},
        adopt=states.count_in_integers,
        commands=("g++", "ninja"),
    ),
    "cuda": Implementation(
        path="deepspeed.ops.adam:FusedAdam",
        package="deepspeed",
        adopt=states.count_in_last_state,
        to_save=states.save_count_of_last_state,
        **_FUSED_ADAM,
    ),
}
_ORT = Implementation(
    path="onnxruntime.training.optim:FusedAdam", package="onnxruntime-training", devices=("cuda",), dtypes=_FLOATS
)

# flags of torch's own optimizers
TORCH_FLAGS = ("fused", "foreach")


def check_name(name: str, argument: str = "optim") -> None:
    """Raise ``ValueError`` with the closest name if this is no :data:`OptimName`, ``TypeError`` if it is no string."""
    names = get_args(OptimName)
    check_type(argument, name, str, f"one of {', '.join(map(repr, names))}, or, to a strategy, an ORTOptimizer")
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Choose one of {', '.join(map(repr, names))}."
        raise ValueError(f"{argument}={name!r} is not known. {hint}")


def resolve(name: str, device: torch.device) -> tuple[str | Implementation, str]:
    """Return what a name other than ``"auto"`` and ``"keep"`` stands for on a device, and a note for the report.

    That is a flag of torch's optimizers (``"fused"`` or ``"foreach"``) or an implementation.
    """
    if name == "adamw_ort_fused":
        if _ort_extension_loads(device):
            return _ORT, "onnxruntime-training's FusedAdam"
        return "fused", "onnxruntime-training's FusedAdam needs CUDA and an extension, which does not load here"
    if (flag := name.removeprefix("adamw_torch_")) in TORCH_FLAGS:
        return flag, ""
    if name == "adamw_deepspeed":
        return _DEEPSPEED.get(device.type, _DEEPSPEED["cuda"]), ""
    implementation = REPLACEMENTS[name]
    slow = implementation.package == "bitsandbytes" and device.type == "cpu"
    return (
        implementation,
        "made for GPUs: on a CPU, a step takes many times as long as with a fused AdamW" if slow else "",
    )


def _ort_extension_loads(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        _ORT.load()
        import_fused_ops()
    except Exception:  # an extension built for another torch raises errors of many types
        return False
    return True


def runs(optimizer: optim.Optimizer) -> str:
    """Return the name of an optimizer's class, with the flag that is set if it is one of torch's own."""
    cls = type(optimizer)
    name = f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"
    flags = [flag for flag in TORCH_FLAGS if any(group.get(flag) for group in optimizer.param_groups)]
    return f"{name} ({', '.join(flags)})" if flags else name
