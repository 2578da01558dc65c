"""Strategy names in the registry of each installed Lightning.

Importing Lightning takes seconds, and a program uses one of its two names. If the program has imported a namespace
already, its names are registered at once; otherwise at the end of the program's own import of it. Both can happen while
one of our modules, which need Lightning, is being imported. A name is therefore registered without its class, which is
imported when the name is looked up.

Lightning asks its registry for the list of names once for each Trainer. While our names are registered, that list knows
which of them a misspelt one resembles.
"""

import difflib
import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from lightning_ort._imports import NAMESPACES, LightningNamespace, namespace_of
from lightning_ort._strategies import SHORT_NAMES, STRATEGIES

log = logging.getLogger(__name__)

# what people write -> the name that they mean
_MEANT = {each: each for names in STRATEGIES.values() for each in names.arguments}
_MEANT |= {kind.lower(): names.name for kind, names in STRATEGIES.items()}
_MEANT |= dict.fromkeys(("onnxruntime", "onnx", "lightning_ort"), "ort")


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
        for kind, names in STRATEGIES.items():
            for name in names.arguments:
                if name not in registry:
                    registry[name] = RegistryEntry(name, namespace, kind, type(registry))
        available = getattr(registry, "available_strategies", None)
        if available is not None and "available_strategies" not in vars(registry):
            registry.available_strategies = lambda: KnownNames(available(), namespace)
    except Exception as error:  # a broken Lightning, or a stub in its place
        log.debug("the strategies are not registered in %s", namespace.package, exc_info=True)
        if not isinstance(error, ImportError):
            log.warning("The strategies of lightning-ort are not known to %s: %s", namespace.package, error)


class KnownNames(list[str]):
    """Names of strategies in a namespace; what is meant for ours and is none raises an error where it is looked up."""

    def __init__(self, names: Iterable[str], namespace: LightningNamespace) -> None:
        super().__init__(names)
        self._namespace = namespace

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        if isinstance(name, type) and name.__name__ in STRATEGIES:
            raise ValueError(
                f"Trainer(strategy={name.__name__}): that is the class; pass an object, {name.__name__}()."
            )
        of = namespace_of(type(name))  # Lightning asks for objects too
        if of not in (None, self._namespace) and (ours := _class_of_ours(type(name))) is not None:
            raise ValueError(
                f"Trainer(strategy={ours}(...)): this object is for a Trainer of {of.package}, and this is one of"
                f" {self._namespace.package}: import {ours} from {self._namespace.module}."
            )
        # those of Lightning too, so that `fdsp` is no question about ours
        meant = {**dict.fromkeys(self), **_MEANT}
        close = difflib.get_close_matches(name.lower(), meant, n=1) if isinstance(name, str) else []
        if close and (ours := meant[close[0]]) is not None:
            raise ValueError(
                f"Trainer(strategy={name!r}): there is no such strategy; did you mean {ours!r}? The strategies of"
                f" lightning-ort are {', '.join(SHORT_NAMES)}."
            )
        return False


def _class_of_ours(kind: type) -> str | None:
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in STRATEGIES), None)


class RegistryEntry(dict[str, Any]):
    """The entry of a strategy's name; its class, ``kind``, is imported when it is looked up."""

    def __init__(self, name: str, namespace: LightningNamespace, kind: str, registry: type) -> None:
        super().__init__(strategy_name=name)
        self._namespace, self._kind, self._registry = namespace, kind, registry

    def __missing__(self, key: str) -> Any:
        registry = self._registry()
        getattr(self._namespace.classes, self._kind).register_strategies(registry)
        self.update(registry[self["strategy_name"]])
        return dict(self)[key]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function, which must not raise, once after a module was imported, and not when only its spec is found."""

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
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        """Let one loader call us after it has executed the module; its class and other loaders stay as they are."""
        execute = loader.exec_module

        def execute_and_finish(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # another one of these hooks may have removed it
            execute(module)
            self._finish()

        with suppress(AttributeError, TypeError):  # a loader that takes no attributes stays as it is
            loader.exec_module = execute_and_finish

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
