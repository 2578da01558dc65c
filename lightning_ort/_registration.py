"""Strategy names in the registry of each installed Lightning.

Importing Lightning takes seconds, and a program uses one of its two names. So a flavor that the program has imported is
registered at once, and one that it has not is registered at the end of its own import.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from lightning_ort._imports import FLAVORS, Flavor


def register_strategies() -> None:
    """Make our strategy names known to every installed Lightning; a second call changes nothing."""
    for flavor in FLAVORS:
        if flavor.imported:
            _register(flavor)
        elif not any(isinstance(finder, _AfterImport) and finder.name == flavor.package for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(flavor.package, partial(_register, flavor)))


def _register(flavor: Flavor) -> None:
    registry = importlib.import_module(f"{flavor.package}.strategies").StrategyRegistry
    ours = importlib.import_module(flavor.strategies)
    for strategy in (getattr(ours, name) for name in ours.__all__):
        if strategy.strategy_name not in registry:  # Lightning refuses a name twice
            strategy.register_strategies(registry)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, after a module has been imported.

    Args:
        name: The module.
        callback: The function.

    """

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the one module, with what the other finders say and our callback at the end of its execution."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._callback()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
