"""The strategies by name: :data:`STRATEGIES`, from which they are registered, named, explained and tuned.

A new one is an entry here, a class in ``lightning.py``, and its name in ``__init__.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StrategyNames:
    """The names of one strategy."""

    name: str  # that of ``Trainer(strategy=...)``
    description: str  # for ``StrategyRegistry``
    # what may follow the name, each with the arguments that it stands for
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    several_processes: bool = True  # whether it is for more than one process

    @property
    def arguments(self) -> dict[str, Mapping[str, Any]]:
        """Each name, with the arguments that it stands for."""
        return {self.name: {}} | {f"{self.name}{suffix}": arguments for suffix, arguments in self.variants.items()}


_UNUSED = {"_find_unused_parameters_true": {"find_unused_parameters": True}}
# as Lightning's names of DDP
_STARTS = {
    f"{start}{unused}": {"start_method": method, **find}
    for start, method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items()
    for unused, find in {"": {}, **_UNUSED}.items()
    if start or unused
}

# class -> its names
STRATEGIES = {
    "ORTStrategy": StrategyNames("ort", "One device, on ONNX Runtime", several_processes=False),
    "ORTDDPStrategy": StrategyNames("ort_ddp", "DDP on ONNX Runtime", _STARTS),
    "ORTNativeZeRO1Strategy": StrategyNames("ort_zero1_native", "DDP on ONNX Runtime, optimizer states split", _STARTS),
    "ORTZeRO1Strategy": StrategyNames(
        "ort_zero1", "DeepSpeed's ZeRO stage 1 on ONNX Runtime", {"_offload": {"offload_optimizer": True}}
    ),
}
# without those that only say how processes start
SHORT_NAMES = [
    name
    for names in STRATEGIES.values()
    for name, arguments in names.arguments.items()
    if arguments.keys().isdisjoint(("start_method", "find_unused_parameters"))
]
