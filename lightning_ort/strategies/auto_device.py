"""One device, chosen by the Trainer: :class:`AutoDeviceMixin`."""

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lightning_ort._arguments import check_device, check_type
from lightning_ort._imports import LightningNamespace

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _DEVICE
    from lightning.pytorch.strategies import SingleDeviceStrategy as _SingleDeviceStrategy
else:
    _SingleDeviceStrategy = object

_LIGHTNINGS = {  # argument: where its class is in each namespace, and what that is called
    "accelerator": ("accelerators", "Accelerator"),
    "checkpoint_io": ("plugins", "CheckpointIO"),
    "precision_plugin": ("plugins.precision", "Precision"),
}


class AutoDeviceMixin(_SingleDeviceStrategy):
    """Lets the Trainer choose the device of a single-device strategy.

    A single-device strategy made from its name gets ``device="cpu"`` whatever the accelerator: the Trainer passes its
    devices on to strategies that have ``parallel_devices``, and to no others.

    Args:
        device: The device; ``None`` for the one that the Trainer's ``accelerator`` and ``devices`` say.
        **kwargs: For the strategy.

    Raises:
        ValueError: If ``device`` is none.
        TypeError: If something of Lightning's is of another type, or of the other namespace.

    """

    namespace: ClassVar[LightningNamespace]

    def __init__(self, device: "_DEVICE | None" = None, **kwargs: Any) -> None:
        if device is not None:
            check_device("device", device)
        for argument, (place, name) in _LIGHTNINGS.items():
            kind = getattr(importlib.import_module(f"{self.namespace.package}.{place}"), name)
            check_type(argument, kwargs.get(argument), (kind, type(None)), f"a {kind.__module__}.{name} or None")
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._chosen_devices: list[torch.device] | None = None
        if device is not None:
            if self._root_device.type == "cuda" and self._root_device.index is None:
                self._root_device = torch.device("cuda", 0)  # Lightning needs the index
            self._chosen_devices = [self._root_device]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, in a list, where this strategy was given one; ``None`` lets the Trainer choose."""
        return self._chosen_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise self._one_only(f"{len(devices)} devices ({', '.join(map(str, devices))})", "devices=1")
        self._root_device = devices[0]

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
            f" several devices are for the strategy '{name}_ddp'."
        )
