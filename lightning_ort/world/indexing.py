"""What a ``__getitem__`` returns, where it does nothing but index: :func:`what_is_indexed`.

It runs once, on stand-ins for the index and for its object, instead of once for each index. That does no harm: nothing
of the object's can be called or written, and no global variable but ``torch`` can be read.
"""

import dis
import functools
import inspect
import types
from typing import Any

import torch

# Instructions that do what the stand-ins do, and build tuples, lists and dictionaries (CPython 3.10 to 3.14)
_HARMLESS = {"RESUME", "NOP", "CACHE", "LOAD_CONST", "LOAD_SMALL_INT", "RETURN_VALUE", "RETURN_CONST", "POP_TOP"}
_HARMLESS |= {"LOAD_ATTR", "BINARY_SUBSCR", "BINARY_OP", "STORE_SUBSCR", "UNPACK_SEQUENCE", "SWAP", "COPY", "DUP_TOP"}
_HARMLESS |= {"ROT_TWO", "ROT_THREE", "ROT_FOUR", "BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"}
_HARMLESS |= {"LOAD_GLOBAL", "LOAD_METHOD", "PUSH_NULL", "PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD"}
_HARMLESS |= {"TO_BOOL", "NOT_TAKEN", "UNARY_NOT", "JUMP_FORWARD"}
_LOCAL = ("LOAD_FAST", "STORE_FAST")
_BRANCHES = {"POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE"}
_MOST = 500  # instructions
_UNUSUAL = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR
_UNUSUAL |= inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
_HAVE_TRUTH = (type(None), bool, int, float, str, list, tuple, dict)  # that runs no code


class _Index:
    """Stands for the index."""


class Row:
    """Stands for what something has at the index.

    Attributes:
        of: What has it.
    """

    def __init__(self, of: Any) -> None:
        self.of = of


class Empty:
    """Stands for ``torch.Tensor()``."""


class _Torch:
    """Stands for the module."""

    Tensor = Empty


class _Held:
    """Stands for the object, and for what it has, without running code to get it."""

    __iter__ = None  # or Python would call __getitem__ with numbers

    def __init__(self, value: Any) -> None:
        self.__value = value

    def __getattr__(self, name: str) -> "_Held":
        if has_code_for(type(self.__value), name):
            raise AttributeError(name)
        return _Held(vars(self.__value)[name])

    def __getitem__(self, key: Any) -> Any:
        if type(key) is _Index:
            return Row(self.__value)
        if type(key) in (str, int) and type(self.__value) in (dict, list, tuple):
            return _Held(self.__value[key])
        raise TypeError

    def __bool__(self) -> bool:
        if type(self.__value) not in _HAVE_TRUTH:
            raise TypeError
        return bool(self.__value)


def has_code_for(kind: type, *names: str) -> bool:
    """Whether attributes of a class's objects may be more than what these hold, such as properties."""
    own = kind.__getattribute__ is object.__getattribute__
    return not own or any(hasattr(kind, name) for name in ("__getattr__", *names))


def what_is_indexed(value: Any) -> Any:
    """Return what the ``__getitem__`` of an object returns now, with a :class:`Row` or :class:`Empty` in each place.

    ``None`` if it does, or may do, anything but index what the object holds.
    """
    function = getattr(type(value), "__getitem__", None)
    if type(function) is not types.FunctionType or not _is_harmless(function.__code__):
        return None
    known: dict[str, Any] = {"__builtins__": {}}
    if function.__globals__.get("torch") is torch and torch.Tensor is _TENSOR:
        known["torch"] = _Torch
    try:
        found = types.FunctionType(function.__code__, known)(_Held(value), _Index())
        return found if _is_made_of_rows(found) else None
    except Exception:  # it does more
        return None


_TENSOR = torch.Tensor


@functools.lru_cache(256)
def _is_harmless(code: types.CodeType) -> bool:
    arguments = (code.co_argcount, code.co_kwonlyargcount, code.co_flags & _UNUSUAL)
    ops = list(dis.get_instructions(code))
    if arguments != (2, 0, 0) or len(ops) > _MOST or code.co_freevars or code.co_cellvars:
        return False
    return all(
        op.opname in _HARMLESS
        or op.opname.startswith(_LOCAL)
        or (op.opname in _BRANCHES and op.argval > op.offset)  # so it ends
        for op in ops
    )


def _is_made_of_rows(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str or type(key) is int for key in value) and all(map(_is_made_of_rows, value.values()))
    if type(value) in (tuple, list):
        return all(map(_is_made_of_rows, value))
    return type(value) is Row or type(value) is Empty
