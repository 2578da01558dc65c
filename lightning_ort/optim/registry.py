"""The names of ``optim=``, and what each one stands for."""

import difflib
import importlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import optim

from lightning_ort._arguments import check_type
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

# what torch's Adam can be told beyond these is refused where an implementation lacks it
_BASIC = frozenset({"lr", "betas", "eps", "weight_decay"})
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A class that runs an optimizer algorithm.

    Args:
        path: Where its class is, as ``"module:name"``.
        algorithm: What it computes.
        package: The requirement that brings it; empty for torch and for this package.
        install: How to get it.
        devices: Device types on which it works.
        dtypes: Dtypes of the parameters that it takes; empty for all.
        hyperparameters: Those of torch's Adam that it has too.
        arguments: Passed to its constructor, always.
        form: Of the states that it saves.
        adopt: Brings states that were loaded in torch's form to its own.
        commands: Programs that it needs on the PATH, to compile its extension.

    """

    path: str
    algorithm: Algorithm = "adam"
    package: str = ""
    install: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: frozenset[torch.dtype] = frozenset()
    hyperparameters: frozenset[str] = _BASIC
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    form: Form = "torch"
    adopt: Callable[[optim.Optimizer], None] | None = None
    commands: tuple[str, ...] = ()

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot be used on a device and how to get it, or ``None``."""
        if device.type not in self.devices:
            return f"it works on {' and '.join(self.devices)}, the module is on {device.type}"
        if self.package and not (available := RequirementCache(self.package)):
            return f"{available}. Install it with `{self.install or f'pip install {self.package}'}`"
        if missing := [command for command in self.commands if shutil.which(command) is None]:
            return (
                f"it compiles an extension, and {' and '.join(missing)} is not on the PATH. It needs a C++ compiler and"
                " ninja (`pip install ninja`, with the virtual environment active), or use 'adamw_torch_fused'"
            )
        return None

    def load(self) -> type[optim.Optimizer]:
        """Import its class."""
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

REPLACEMENTS: Mapping[str, Implementation] = MappingProxyType(
    {
        "adamw_bnb_8bit": Implementation(path="lightning_ort.optim.eight_bit:AdamW8bit", **_BNB),
        "paged_adamw_8bit": Implementation(
            path="lightning_ort.optim.eight_bit:AdamW8bit", arguments={"is_paged": True}, **_BNB
        ),
        "lion_8bit": Implementation(
            path="lightning_ort.optim.eight_bit:Lion8bit",
            algorithm="lion",
            **{**_BNB, "hyperparameters": frozenset({"lr", "betas", "weight_decay"})},
        ),
        "adamw_torchao_8bit": Implementation(path="torchao.optim:AdamW8bit", **_TORCHAO),
        "adamw_torchao_4bit": Implementation(path="torchao.optim:AdamW4bit", **_TORCHAO),
        "adamw_apex_fused": Implementation(
            path="apex.optimizers:FusedAdam",
            package="apex",
            install="pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex",
            devices=("cuda",),
            dtypes=_FLOATS,
            hyperparameters=_BASIC | {"capturable"},
            arguments={"adam_w_mode": True},
            adopt=states.count_in_groups,
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
)
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
        devices=("cuda",),
        dtypes=_FLOATS,
        arguments={"adam_w_mode": True},
        adopt=states.count_in_groups,
    ),
}
_ORT = Implementation(
    path="onnxruntime.training.optim:FusedAdam",
    package="onnxruntime-training",
    devices=("cuda",),
    dtypes=_FLOATS,
)

# choices of torch's own, made on the user's optimizer
TORCH_FLAGS = ("fused", "foreach")
FUSED_CLASSES: tuple[type[optim.Optimizer], ...] = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)


def check_name(name: str, argument: str = "optim") -> None:
    """Refuse what is not a name of ``optim=``.

    Args:
        name: What was passed.
        argument: What it is called there.

    Raises:
        ValueError: With the closest name.
        TypeError: If it is no string.

    """
    names = get_args(OptimName)
    check_type(argument, name, str, f"one of {', '.join(map(repr, names))}, or, to a strategy, an ORTOptimizer")
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Choose one of {', '.join(map(repr, names))}."
        raise ValueError(f"{argument}={name!r} is not known. {hint}")


def resolve(name: str, device: torch.device) -> tuple[str | Implementation, str]:
    """What a name stands for on a device.

    Args:
        name: Other than ``"auto"`` and ``"keep"``.
        device: Of the module.

    Returns:
        A flag of torch's optimizers (``"fused"`` or ``"foreach"``) or an implementation, and what to say about it.

    """
    if name == "adamw_ort_fused":
        if _ort_extension_loads(device):
            return _ORT, "onnxruntime-training's FusedAdam"
        return "fused", "onnxruntime-training's FusedAdam needs CUDA and an extension that does not load here"
    if (flag := name.removeprefix("adamw_torch_")) in TORCH_FLAGS:
        return flag, ""
    if name == "adamw_deepspeed":
        return _DEEPSPEED.get(device.type, _DEEPSPEED["cuda"]), ""
    implementation = REPLACEMENTS[name]
    slow = implementation.package == "bitsandbytes" and device.type == "cpu"
    return implementation, "made for GPUs: on a CPU a step takes many times a fused AdamW's" if slow else ""


def _ort_extension_loads(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        _ORT.load()
        importlib.import_module("onnxruntime.training.ortmodule.torch_cpp_extensions.cuda.fused_ops")
    except Exception:  # an extension built for another torch raises what it likes
        return False
    return True


def runs(optimizer: optim.Optimizer) -> str:
    """Name an optimizer's class and, of torch's own, which of its loops it runs."""
    cls = type(optimizer)
    name = f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"
    flags = [flag for flag in TORCH_FLAGS if any(group.get(flag) for group in optimizer.param_groups)]
    return f"{name} ({', '.join(flags)})" if flags else name
