"""Strategy names in the registry of each installed Lightning.

Importing Lightning takes seconds, and a program uses one of its two names. If the program has imported a namespace
already, its names are registered at once; otherwise at the end of the program's own import of it. Both can happen while
one of our modules, which need Lightning, is being imported. A name is therefore registered without its class, which is
imported when the name is looked up.
"""

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from lightning_ort._imports import NAMESPACES, LightningNamespace

log = logging.getLogger(__name__)

_PARALLEL = [
    f"{start}{unused}"
    for start in ("", "_spawn", "_fork", "_notebook")
    for unused in ("", "_find_unused_parameters_true")
]
# what `register_strategies` of each class registers
NAMES = {
    "ORTStrategy": ["ort"],
    "ORTDDPStrategy": [f"ort_ddp{suffix}" for suffix in _PARALLEL],
    "ORTNativeZeRO1Strategy": [f"ort_zero1_native{suffix}" for suffix in _PARALLEL],
    "ORTZeRO1Strategy": ["ort_zero1", "ort_zero1_offload"],
}


def register_strategies() -> None:
    """Make our strategy names known to every installed Lightning; a second call changes nothing."""
    for namespace in NAMESPACES:
        if namespace.imported:
            _register(namespace)
        elif not any(isinstance(finder, _AfterImport) and finder.name == namespace.package for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(namespace.package, partial(_register, namespace)))


def _register(namespace: LightningNamespace) -> None:
    """Add the missing names to a registry; the import of Lightning belongs to the user, so raise nothing."""
    try:
        registry = namespace.submodule("strategies").StrategyRegistry
        for kind, names in NAMES.items():
            for name in names:
                if name not in registry:
                    registry[name] = RegistryEntry(name, namespace.module, kind, type(registry))
    except Exception as error:  # a broken Lightning, or a stub in its place
        log.debug("the strategies are not registered in %s", namespace.package, exc_info=True)
        if not isinstance(error, ImportError):
            log.warning("The strategies of lightning-ort are not known to %s: %s", namespace.package, error)


class RegistryEntry(dict[str, Any]):
    """The entry of one strategy name; the class is imported when the strategy is looked up.

    Args:
        name: The strategy name.
        module: The module of the class.
        kind: The name of the class.
        registry: The class of the registry.

    """

    def __init__(self, name: str, module: str, kind: str, registry: type) -> None:
        super().__init__(strategy_name=name)
        self._module, self._kind, self._registry = module, kind, registry

    def __missing__(self, key: str) -> Any:
        registry = self._registry()
        getattr(importlib.import_module(self._module), self._kind).register_strategies(registry)
        self.update(registry[self["strategy_name"]])
        return dict(self)[key]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, after a module was imported; not when somebody only looks for its spec.

    Args:
        name: The module.
        callback: The function; it must not raise.

    """

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self._callback = callback
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give for the module, with our callback at the end of its import."""
        if fullname != self.name or getattr(self._asking, "others", False):
            return None
        self._asking.others = True  # some finders ask all finders again
        try:
            spec = self._ask(fullname, path, target)
        except Exception:  # Python asks the finder again, which then raises its error itself
            return None
        finally:
            self._asking.others = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._finish)  # type: ignore[arg-type]
        return spec

    def _ask(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(fullname, path, target)) is not None:
                return spec
        return None

    def _finish(self) -> None:
        with suppress(ValueError):  # another thread, or the user, has removed it
            sys.meta_path.remove(self)
        self._callback()


class _Loader(importlib.abc.Loader):
    """Loads a module with the loader that was found for it, and then calls a function."""

    def __init__(self, loader: importlib.abc.Loader, callback: Callable[[], None]) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Delegate to the loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own loader back, execute it, and call the function unless that fails."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback()
