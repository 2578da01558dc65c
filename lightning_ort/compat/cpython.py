"""What CPython does after a fork, without the handlers that others have registered for it."""

import _imp
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@cache
def handlers_of_forked_children() -> list[Any]:
    """Return the list in which ``os.register_at_fork`` keeps ``after_in_child`` (CPython 3.10 to 3.13).

    No object refers to it: it is found by an entry, :mod:`threading`'s, among the objects that the garbage collector
    knows. If it is not found (``gc.freeze`` hides it), an empty one is returned.
    """
    handler = threading._after_fork  # type: ignore[attr-defined]
    return next((one for one in gc.get_referrers(handler) if type(one) is list and handler in one), [])


def in_forked_children(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function in each process that is forked from this one, where there are such."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=function)
    return function


@contextmanager
def holding_imports() -> Iterator[None]:
    """Within the block no other thread imports, as while ``os.fork`` copies: :func:`adopt_interpreter` lets go."""
    _imp.acquire_lock()
    try:
        yield
    finally:
        _imp.release_lock()


def adopt_interpreter() -> Callable[[], None]:
    """Return the function of C that makes the thread which was copied the interpreter's only one.

    From 3.13 on it ends the process if that thread does not hold the lock of imports (:func:`holding_imports`).
    """
    function = ctypes.pythonapi.PyOS_AfterFork_Child
    function.restype, function.argtypes = None, ()
    return function
