"""What torch would load and search without need when it compiles for the first time, longer than a small step takes.

All of it was read in torch 2.13; a version without a name that is replaced here is left as it is.
"""

import functools
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch._export.utils as export_utils
from torch._decomp import core_aten_decompositions
from torch._dynamo.variables import higher_order_ops
from torch._ops import OpOverload

_FUNC_MAP = "torch.distributed.tensor.experimental._func_map"


@contextmanager
def without_collections() -> Iterator[None]:
    """Within the block the garbage collector waits: a look at all objects of torch and Lightning takes 0.1 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def compiled_quickly() -> Iterator[None]:
    """Within the block dynamo looks at no garbage, and does not load ``local_map`` to know its calls."""
    with ExitStack() as stack:
        stack.enter_context(without_collections())
        owner = getattr(higher_order_ops, "LocalMapWrappedHigherOrderVariable", None)
        if (known := getattr(owner, "should_wrap_in_hop", None)) is not None:
            # nobody has a function of a module that is not loaded: 50 ms
            is_one = staticmethod(lambda value: _FUNC_MAP in sys.modules and known(value))
            stack.enter_context(patch.object(owner, "should_wrap_in_hop", is_one))
        yield


def load_autograd() -> None:
    """Load AOTAutograd, and networkx not before something of that is used: 60 ms and 300 modules."""
    if "networkx" in sys.modules or "torch._functorch.partitioners" in sys.modules:
        return
    later = _Later("networkx")
    sys.modules["networkx"] = later
    try:
        importlib.import_module("torch._functorch.aot_autograd")
    finally:
        later.is_found()


class _Later(ModuleType):
    """A module in place of one that is loaded when something of it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._annotates: int | None = threading.get_ident()

    def is_found(self) -> None:
        """From now on whoever imports it gets the module itself."""
        self._annotates = None
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._annotates:  # it is loaded by what names it in annotations
            return name
        self.is_found()
        return getattr(importlib.import_module(self.__name__), name)


def core_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return torch's decompositions to core ATen ops; it lists the ops of C++ once, and not for each library: 70 ms."""
    listed = getattr(export_utils, "_materialize_cpp_cia_ops", None)
    if listed is None:
        return dict(core_aten_decompositions())
    with patch.object(export_utils, "_materialize_cpp_cia_ops", functools.cache(listed)):
        return dict(core_aten_decompositions())
