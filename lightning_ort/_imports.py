"""What is installed: the one place that knows that Lightning comes under two names.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class trees with the same content: a strategy of one fails
in the Trainer of the other. A :class:`LightningNamespace` names the modules of one of them, without importing them.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.imports import RequirementCache


@dataclass(frozen=True)
class LightningNamespace:
    """One of the two names of Lightning.

    Args:
        package: The import package of the Trainer.
        distribution: The distribution that installs it.
        strategies: Our module with the strategy classes for it.
        callbacks: Our module with the callbacks for it.
        precision: Our package with the precision plugins for it.
        predictor: Our module with the LightningModule around an ONNX model for it.

    """

    package: str
    distribution: str
    strategies: str
    callbacks: str
    precision: str
    predictor: str

    @property
    def available(self) -> RequirementCache:
        """Whether it is installed; as a string, the error message for when it is not."""
        return RequirementCache(self.distribution)

    @property
    def imported(self) -> bool:
        """Whether the program has imported it."""
        return self.package in sys.modules

    def submodule(self, name: str) -> Any:
        """Import a module of Lightning, such as ``"plugins.precision"``."""
        return importlib.import_module(f"{self.package}.{name}")

    def misconfiguration(self, message: str) -> Exception:
        """Return this namespace's ``MisconfigurationException``."""
        return self.submodule("utilities.exceptions").MisconfigurationException(message)


LIGHTNING = LightningNamespace(
    "lightning.pytorch",
    "lightning",
    "lightning_ort.strategies",
    "lightning_ort.callbacks",
    "lightning_ort.precision",
    "lightning_ort.onnx_export.predictor",
)
PYTORCH_LIGHTNING = LightningNamespace(
    "pytorch_lightning",
    "pytorch-lightning",
    "lightning_ort.pytorch_lightning.strategies",
    "lightning_ort.pytorch_lightning.callbacks",
    "lightning_ort.pytorch_lightning.precision",
    "lightning_ort.pytorch_lightning.predictor",
)
NAMESPACES = (LIGHTNING, PYTORCH_LIGHTNING)
# what torch.onnx.export converts with
ONNXSCRIPT = RequirementCache("onnxscript")


def preferred_namespace() -> LightningNamespace:
    """Return the namespace of the top-level names: ``lightning``, or ``pytorch-lightning`` where only that is installed.

    Raises:
        ModuleNotFoundError: If neither is installed.

    """
    for namespace in NAMESPACES:
        if namespace.available:
            return namespace
    raise ModuleNotFoundError(f"The strategies of lightning-ort need Lightning. {LIGHTNING.available}")
