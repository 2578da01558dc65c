"""The names of ``optim=`` and the implementation that each one stands for, with all that is particular to it.

A new one is a name in :data:`OptimName` and an entry in :data:`REPLACEMENTS`; :class:`Implementation` says what that
needs. For another algorithm, or states in a form of their own, :mod:`~lightning_ort.optim.states` has a line of each.
"""

import functools
import importlib
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import nn, optim

from lightning_ort._arguments import check_type, closest
from lightning_ort._imports import absence
from lightning_ort.compat.bitsandbytes import BLOCK_SIZE
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

_SCALE = 4  # bytes of the float32 scale of a block of quantized states
_MIN_8BIT_SIZE = 4096  # the default of bitsandbytes and torchao
ADAMS = (optim.Adam, optim.AdamW)
_BASIC = frozenset({"lr", "betas", "eps", "weight_decay"})
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def adam_bytes(p: nn.Parameter) -> int:
    """Return the bytes of two values of the parameter's dtype for each element."""
    return 2 * p.nbytes


def _bitsandbytes_bytes(p: nn.Parameter, tensors: int = 2) -> int:
    if p.numel() < _MIN_8BIT_SIZE:
        return tensors * 4 * p.numel()
    return tensors * (p.numel() + _SCALE * math.ceil(p.numel() / BLOCK_SIZE))


def _torchao_bytes(p: nn.Parameter, bits: int = 8, block: int = 256) -> int:
    if p.numel() < _MIN_8BIT_SIZE or p.numel() % block:
        return 2 * p.nbytes
    return 2 * (p.numel() * bits // 8 + _SCALE * p.numel() // block)


def _adafactor_bytes(p: nn.Parameter) -> int:
    if p.dim() < 2:
        return p.nbytes
    return p.element_size() * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2])


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A class that runs an optimizer algorithm, in place of one of torch's that a module configures.

    It is called with parameter groups and keyword arguments, and is an optimizer of torch. Checkpoints of the same
    algorithm have to load into torch's optimizer, and those of torch's into it.
    """

    path: str  # ``"module:name"`` of the class; imported when it is used
    algorithm: Algorithm = "adam"  # what it computes; a checkpoint of another one is refused
    # the classes of torch that it stands for, exactly: it does not know what a subclass changes
    replaces: tuple[type[optim.Optimizer], ...] = ADAMS
    package: str = ""  # the requirement that installs it; empty for torch and for this package
    install: str = ""  # the command, where it is not ``pip install <package>``
    devices: tuple[str, ...] = ("cpu", "cuda")  # types of devices that it supports
    dtypes: frozenset[torch.dtype] = frozenset()  # of the parameters that it supports; empty for all
    # those of these classes that it takes over; others raise an error if they are set
    hyperparameters: frozenset[str] = _BASIC
    decouples: bool = True  # whether its weight decay is decoupled, as AdamW's; else it is added to the gradient
    arguments: Mapping[str, Any] = field(default_factory=dict)  # for its constructor
    form: Form = "torch"  # of the states that it saves, as :func:`~lightning_ort.optim.states.form` tells them apart
    # converts states that were loaded in torch's form, for a class that keeps them otherwise;
    # :mod:`~lightning_ort.optim.states` has one for each way to count steps, and one for torchao's tensors
    adopt: Callable[[optim.Optimizer], None] | None = None
    # corrects its state dicts where they are neither in torch's form nor in one that ``form`` tells
    to_save: Callable[[optim.Optimizer, dict[str, Any]], None] | None = None
    commands: tuple[str, ...] = ()  # programs on the PATH with which it compiles its extension
    # the bytes of the states of a parameter, for ``lightning-ort memory``; ``None`` where nobody has measured them
    state_bytes: Callable[[nn.Parameter], int] | None = adam_bytes
    embedding_bytes: int | None = None  # of states for an element of an embedding, if these are not as others

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why it cannot be used on a device and how to install it, or ``None``."""
        if device.type not in self.devices:
            return f"it supports {' and '.join(self.devices)}, but the module is on {device.type}"
        if self.package and not (available := RequirementCache(self.package)):
            return f"{absence(available)} Install it with `{self.install or f'pip install {self.package}'}`"
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


_BNB: dict[str, Any] = {
    "package": "bitsandbytes",
    "install": "pip install 'lightning-ort[bnb]'",
    "dtypes": _FLOATS,
    "form": "bitsandbytes",
    "state_bytes": _bitsandbytes_bytes,
    "embedding_bytes": 8,  # which it does not quantize
}
_TORCHAO: dict[str, Any] = {
    "package": "torchao",
    "install": "pip install 'lightning-ort[torchao]'",
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
        hyperparameters=frozenset({"lr", "weight_decay"}),  # its betas mean something else
        **_BNB | {"state_bytes": functools.partial(_bitsandbytes_bytes, tensors=1), "embedding_bytes": 4},
    ),
    "adamw_torchao_8bit": Implementation(path="torchao.optim:AdamW8bit", state_bytes=_torchao_bytes, **_TORCHAO),
    "adamw_torchao_4bit": Implementation(
        path="torchao.optim:AdamW4bit", state_bytes=functools.partial(_torchao_bytes, bits=4, block=128), **_TORCHAO
    ),
    "adamw_apex_fused": Implementation(
        path="apex.optimizers:FusedAdam",
        package="apex",
        install="pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex",
        hyperparameters=_BASIC | {"capturable"},
        adopt=states.count_in_groups,
        state_bytes=None,
        **_FUSED_ADAM,
    ),
    "adafactor": Implementation(
        path="torch.optim:Adafactor",
        algorithm="adafactor",
        hyperparameters=frozenset({"lr", "weight_decay", "maximize"}),
        state_bytes=_adafactor_bytes,
    ),
    "adamw_anyprecision": Implementation(
        path="lightning_ort.optim.anyprecision:AnyPrecisionAdamW",
        dtypes=_FLOATS,
        hyperparameters=_BASIC | {"maximize"},
        form="anyprecision",
        state_bytes=lambda p: (6 if p.element_size() >= 4 else 8) * p.numel(),
    ),
}
DEEPSPEED = {
    "cpu": Implementation(
        path="deepspeed.ops.adam:DeepSpeedCPUAdam",
        package="deepspeed",
        install="pip install 'lightning-ort[zero]'",
        devices=("cpu",),
        dtypes=_FLOATS,
        arguments={"adamw_mode": True},
        adopt=states.count_in_integers,
        commands=("g++", "ninja"),
        state_bytes=lambda p: 8 * p.numel(),
    ),
    "cuda": Implementation(
        path="deepspeed.ops.adam:FusedAdam",
        package="deepspeed",
        install="pip install 'lightning-ort[zero]'",
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
        raise ValueError(f"{argument}={name!r} is not known: {closest(name, names, 'implementations')}")


def resolve(name: str, device: torch.device) -> tuple[str | Implementation, str]:
    """Return the flag or the implementation that a name stands for on a device, and a note for the report."""
    if name == "adamw_ort_fused":
        if _ort_extension_loads(device):
            return _ORT, "onnxruntime-training's FusedAdam"
        return "fused", "onnxruntime-training's FusedAdam needs CUDA and an extension, which does not load here"
    if (flag := name.removeprefix("adamw_torch_")) in TORCH_FLAGS:
        return flag, ""
    if name == "adamw_deepspeed":
        return DEEPSPEED.get(device.type, DEEPSPEED["cuda"]), ""
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
