"""One device, chosen by the Trainer: :class:`AutoDeviceMixin`."""

from typing import Any, ClassVar

import torch
from typing_extensions import override

from lightning_ort._arguments import check_device, check_type
from lightning_ort._imports import LightningNamespace
from lightning_ort.compat import lightning_bases

_TYPES = {  # argument: the module of its class in each namespace, and the name of the class
    "accelerator": ("accelerators", "Accelerator"),
    "checkpoint_io": ("plugins", "CheckpointIO"),
    "precision_plugin": ("plugins.precision", "Precision"),
}


class AutoDeviceMixin(lightning_bases.SingleDeviceStrategy):
    """Lets the Trainer choose the device of a single-device strategy.

    Lightning creates a single-device strategy from its name with ``device="cpu"``, whatever the accelerator. It passes
    the Trainer's devices only to strategies that have ``parallel_devices``.

    Args:
        device: The device; ``None`` for the one that the Trainer's ``accelerator`` and ``devices`` say.
        **kwargs: For the strategy.
    """

    namespace: ClassVar[LightningNamespace]

    def __init__(self, device: torch.device | str | int | None = None, **kwargs: Any) -> None:
        if device is not None:
            check_device("device", device)
        for argument, (module, name) in _TYPES.items():
            kind = getattr(self.namespace.submodule(module), name)
            check_type(argument, kwargs.get(argument), (kind, type(None)), f"a {kind.__module__}.{name} or None")
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._device = super().root_device
        self._is_fixed = device is not None
        if self._is_fixed and self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", 0)  # Lightning needs the index

    @property
    @override
    def root_device(self) -> torch.device:
        return self._device

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, in a list, if this strategy was created with one; ``None`` lets the Trainer choose."""
        return [self._device] if self._is_fixed else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise self._one_only(f"{len(devices)} devices ({', '.join(map(str, devices))})", "devices=1")
        self._device = devices[0]

    @property
    def num_nodes(self) -> int:
        """One."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise self._one_only(f"num_nodes={num_nodes}", "num_nodes=1")

    def _one_only(self, got: str, instead: str) -> Exception:
        name = type(self).strategy_name
        return self.namespace.misconfiguration(
            f"Trainer(strategy={name!r}) runs on one device, but got {got}. Pass `{instead}`;"
            f" for several devices, use the strategy '{name}_ddp'."
        )
