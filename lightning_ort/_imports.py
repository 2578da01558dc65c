"""What is installed: the one place that knows that Lightning comes under two names.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class trees with the same content: a strategy of one fails
in the Trainer of the other. A :class:`LightningNamespace` names the modules of one of them, without importing them.
"""

import importlib
import linecache
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from lightning_utilities.core.imports import RequirementCache

try:
    __version__ = version("lightning-ort")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"


@dataclass(frozen=True)
class LightningNamespace:
    """One of the two names of Lightning."""

    package: str  # the import package of the Trainer
    distribution: str  # the distribution that installs it
    module: str  # our module with the classes for it

    @property
    def available(self) -> RequirementCache:
        """Whether it is installed; as a string, the error message for when it is not."""
        return RequirementCache(self.distribution)

    @property
    def imported(self) -> bool:
        """Whether the program has imported it."""
        return self.package in sys.modules

    @property
    def classes(self) -> ModuleType:
        """Our module with the classes for it, imported."""
        # Lightning first, and as a whole: two threads that import parts of it at once wait for each other forever
        self.load()
        if self.module not in sys.modules:
            _forget_sources()
        return importlib.import_module(self.module)

    def load(self) -> Any:
        """Import the package of the Trainer."""
        return importlib.import_module(self.package)

    def submodule(self, name: str) -> Any:
        """Import a module of Lightning, such as ``"plugins.precision"``."""
        full = f"{self.package}.{name}"
        return sys.modules.get(full) or importlib.import_module(full)

    def misconfiguration(self, message: str) -> Exception:
        """Return this namespace's ``MisconfigurationException``."""
        return self.submodule("utilities.exceptions").MisconfigurationException(message)


LIGHTNING = LightningNamespace("lightning.pytorch", "lightning", "lightning_ort.lightning")
PYTORCH_LIGHTNING = LightningNamespace("pytorch_lightning", "pytorch-lightning", "lightning_ort.pytorch_lightning")
NAMESPACES = (LIGHTNING, PYTORCH_LIGHTNING)
# what torch.onnx.export converts with
ONNXSCRIPT = RequirementCache("onnxscript")
OPTUNA = RequirementCache("optuna>=4")  # what `tune` searches with


def absence(requirement: RequirementCache) -> str:
    """Return why a requirement is not met, without the command that lightning-utilities guesses from its name."""
    return str(requirement).partition(" HINT")[0]


def preferred_namespace() -> LightningNamespace:
    """Return the namespace of the top-level names: ``pytorch-lightning`` if only that is installed."""
    for namespace in NAMESPACES:
        if namespace.available:
            return namespace
    raise ModuleNotFoundError(f"The strategies of lightning-ort need Lightning. {LIGHTNING.available}")


def _forget_sources() -> None:
    """Free the lines of files that others looked at while they were imported: 3.5 MB for torch, as our code takes.

    They are read again where somebody asks for them. Code that is in no file stays, such as cells of a notebook.
    """
    for file, entry in [*linecache.cache.items()]:
        # size, time of the file, lines, name; some give cells a time too
        if len(entry) == 4 and entry[1] is not None and os.path.isfile(file):
            linecache.cache.pop(file, None)


def is_inherited(method: Any) -> bool:
    """Whether a method is that of LightningModule or Callback itself, which no class derived from it replaces."""
    where = f"{getattr(method, '__module__', '')}."
    return any(
        where.startswith((f"{each.package}.core.", f"{each.package}.callbacks.callback.")) for each in NAMESPACES
    )


def namespace_of(kind: type) -> LightningNamespace | None:
    """Return the namespace of the Lightning class that a class derives from, if it derives from one."""
    for base in kind.__mro__:
        for namespace in NAMESPACES:
            if f"{base.__module__}.".startswith(f"{namespace.package}."):
                return namespace
    return None
